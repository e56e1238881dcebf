"""The process that runs a reward program of the user: with limits, without network, and without writing files."""

from __future__ import annotations

import ctypes
import os
import resource
import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from sheepop.core.bounded_child import Alive, serve

FUNCTION = "reward"
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h


def judge(request: Any, alive: Alive) -> Iterator[Any]:
    """Yields the return value of the program's function ``reward(prompt, completion, **fields)`` for each answer."""
    reward = _function(request["program"])
    for answer in request["answers"]:
        found = reward(answer["prompt"], answer["completion"], **answer["fields"])
        # Also takes numbers of other libraries, but no text that looks like a number.
        yield found if isinstance(found, bool | int | float | str | None) else float(found)
        alive()


@cache
def _function(path: str) -> Callable[..., Any]:
    names = runpy.run_path(path, run_name="reward_program")
    if not callable(names.get(FUNCTION)):
        raise LookupError(f"{path} defines no function {FUNCTION}(prompt, completion, **fields)")
    function: Callable[..., Any] = names[FUNCTION]
    return function


def leave_the_network() -> None:
    """Moves this process into an empty network namespace, if the system allows it."""
    try:
        unshare = ctypes.CDLL(None, use_errno=True).unshare
    except (OSError, AttributeError):  # not Linux
        return
    user, group = os.getuid(), os.getgid()
    if unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


if __name__ == "__main__":
    leave_the_network()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it cannot write files
    serve(judge)
