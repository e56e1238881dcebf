"""How the ranks of one command find each other: the launcher's environment variables and the store of the ranks."""

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
    """Returns the store of the ranks, which the launcher hosts, or the first rank if the launcher does not.

    Raises `DeviceError` if there is none after `within`.
    """
    from torch._C._distributed_c10d import TCPStore

    port, address = variable("MASTER_PORT"), os.environ.get("MASTER_ADDR")
    if not address:
        raise ConfigError(_unset("MASTER_ADDR"))
    hosts = rank == 0 and not has_agent()
    try:
        if not hosts:
            _await_listener(address, port, within)
        # `Ranks` waits for the other ranks itself, so that one error names those that are missing.
        store = TCPStore(address, port, size, hosts, within, wait_for_workers=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise DeviceError(unfound(error)) from None
    store.set_timeout(timedelta(seconds=_ARRIVAL_SECONDS))
    return store


def _await_listener(address: str, port: int, within: timedelta) -> None:
    """Waits until the store accepts connections; torch would wait too, but prints pages of traces if it fails."""
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
    """Whether the launcher, and not the first rank, hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def arrival() -> timedelta:
    """Returns how long ranks wait for each other at the start; raises `ConfigError` for an unusable setting."""
    text = os.environ.get(ARRIVAL, str(_ARRIVAL_SECONDS))
    try:
        found = timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        found = timedelta()
    if found <= timedelta():
        raise ConfigError(f"The environment has {ARRIVAL} = {text}, which must be a number of seconds above 0.")
    return found


def unfound(error: Exception) -> str:
    """Returns the message for ranks that do not find each other."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"The {os.environ.get('WORLD_SIZE')} ranks did not find each other at {place}: {error}. Check that all of them "
        "were started, and that no other program uses the port."
    )


def variable(name: str, default: int | None = None) -> int:
    """Returns a whole number from the environment; raises `ConfigError` if it is missing and has no `default`."""
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
