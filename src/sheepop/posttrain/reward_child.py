"""The process that runs a reward program of the user: with limits, without network, and without writing files."""

from __future__ import annotations

import ctypes
import inspect
import os
import resource
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sheepop.core.bounded_child import Alive, serve

FUNCTION = "reward"
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h


def judge(request: Any, alive: Alive) -> Iterator[Any]:
    """Yields the reward of each answer; without answers, whether the program's function takes all of them at once."""
    reward = _function(request["program"])
    parameters = inspect.signature(reward).parameters
    answers, takes_all = request["answers"], "prompts" in parameters
    if not answers:
        yield takes_all
    elif takes_all:
        yield from map(_number, _of_all(reward, parameters, answers))
    else:
        for answer in answers:
            yield _number(reward(answer["prompt"], answer["completion"], **answer["fields"]))
            alive()


def _of_all(
    reward: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], answers: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """The rewards that the function gives to all answers at once; it gets the columns that it names, or all of them."""
    names = dict.fromkeys(name for answer in answers for name in answer["fields"])
    takes_rest = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    columns = {
        name: [answer["fields"].get(name) for answer in answers] for name in names if takes_rest or name in parameters
    }
    prompts, completions = ([answer[name] for answer in answers] for name in ("prompt", "completion"))
    return list(reward(prompts, completions, **columns))


def _number(found: Any) -> Any:
    """Also takes numbers of other libraries, but no text that looks like a number."""
    return found if isinstance(found, bool | int | float | str | None) else float(found)


@cache
def _function(path: str) -> Callable[..., Any]:
    names = runpy.run_path(path, run_name="reward_program")
    if not callable(names.get(FUNCTION)):
        raise LookupError(
            f"{path} defines no function {FUNCTION}(prompt, completion, **fields) or {FUNCTION}(prompts, answers, "
            "**columns)"
        )
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
