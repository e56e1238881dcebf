"""The hub on loopback."""

from __future__ import annotations

from ..hub_server import client, fault, hub

__all__ = ["client", "fault", "hub"]
