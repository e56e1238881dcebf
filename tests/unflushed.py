"""Importing this spares the process the waits for its disk, for which the tests of runs and corpora would wait longest.

What a flush does shows only after a loss of power. What is flushed, and in which order, is tested with `disk_order`;
processes that tests start cold wait for the disk as a user's do.
"""

from __future__ import annotations

import os


def _unflushed(descriptor: int) -> None:
    """Refuses what ``os.fsync`` refuses, and waits for nothing."""
    os.fstat(descriptor)


os.fsync = _unflushed
