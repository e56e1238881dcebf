"""How the ranks of one command find each other: what their environment says, and the store that they meet at."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from sheepop.core.errors import ConfigError, DeviceError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ARRIVAL = "SHEEPOP_ARRIVAL"
_ARRIVAL_SECONDS = 300.0
_POLL_SECONDS = 0.1


def met(rank: int, size: int, within: timedelta) -> Store:
    """The store that the launcher keeps, or the first rank where there is none that does."""
    from torch._C._distributed_c10d import TCPStore

    port, address = variable("MASTER_PORT"), os.environ.get("MASTER_ADDR")
    if not address:
        raise ConfigError(_unset("MASTER_ADDR"))
    keeps = rank == 0 and not has_agent()
    try:
        if not keeps:
            _await_listener(address, port, within)
        # Nobody waits here for ranks that are to come: who does not is told in one voice.
        store = TCPStore(address, port, size, keeps, within, wait_for_workers=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise DeviceError(unfound(error)) from None
    store.set_timeout(timedelta(seconds=_ARRIVAL_SECONDS))
    return store


def _await_listener(address: str, port: int, within: timedelta) -> None:
    """Waits until somebody listens there; torch, which would too, writes pages about it where nobody does."""
    started = time.monotonic()
    while True:
        try:
            socket.create_connection((address, port), within.total_seconds()).close()
            return
        except OSError:
            if time.monotonic() - started > within.total_seconds():
                raise
        time.sleep(_POLL_SECONDS)


def has_agent() -> bool:
    """Whether the launcher keeps the store, and not the first rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def arrival() -> timedelta:
    """How long ranks wait for each other when they start."""
    text = os.environ.get(ARRIVAL, str(_ARRIVAL_SECONDS))
    try:
        found = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        found = timedelta()
    if found <= timedelta():
        raise ConfigError(f"The environment has {ARRIVAL} = {text}, which must be a number of seconds above 0.")
    return found


def unfound(error: Exception) -> str:
    """What to say where ranks do not meet."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"The {os.environ.get('WORLD_SIZE')} ranks did not find each other at {place}: {error}. See that all of them "
        "were started, and that no other program uses the port."
    )


def variable(name: str, default: int | None = None) -> int:
    """A whole number of the environment; raises `ConfigError` for one that is missing and has no `default`."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(_unset(name)) from None


def _unset(name: str) -> str:
    return (
        f"The environment has WORLD_SIZE = {os.environ.get('WORLD_SIZE')}, but {name} = {os.environ.get(name)}. Start "
        "ranks with torchrun, which sets both."
    )
