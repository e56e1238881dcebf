"""The process that runs an environment of the user: with limits, without network, and without writing files."""

from __future__ import annotations

import inspect
import resource
import runpy
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from sheepop.core.bounded_child import Alive, leave_the_network, serve

CLASS = "Environment"
# The objects of conversations that go on, by number, with the messages that they have answered.
_live: dict[int, tuple[Any, list[Any]]] = {}


def answer(request: Any, alive: Alive) -> Iterator[Any]:
    """Yields what the environment returns in each conversation: from `reset`, or from `step` for the last message."""
    made = _class(request["program"])
    for conversation in request["conversations"]:
        yield _found(made, conversation, alive)


def _found(made: Any, conversation: Mapping[str, Any], alive: Alive) -> Any:
    """An object that is not there, because the process was replaced, is made again and given the earlier messages."""
    number, said = conversation["number"], conversation["said"]
    environment, answered = _live.pop(number, (None, []))
    if not said or environment is None or answered != said[:-1]:
        environment = made()
        found = _reset(environment, conversation)
        for message in said[:-1]:
            alive()
            environment.step(message)
    if said:
        alive()
        found = environment.step(said[-1])
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise TypeError("step must return messages, a reward and whether the conversation is done")
        found = [found[0], _number(found[1]), bool(found[2])]
    _live[number] = environment, said
    return found


def _reset(environment: Any, conversation: Mapping[str, Any]) -> Any:
    takes_seed = "seed" in inspect.signature(environment.reset).parameters
    return environment.reset(conversation["row"], **({"seed": conversation["seed"]} if takes_seed else {}))


def _number(found: Any) -> Any:
    """Also takes numbers of other libraries."""
    return found if isinstance(found, bool | int | float | None) else float(found)


@cache
def _class(path: str) -> Any:
    made = runpy.run_path(path, run_name="environment_program").get(CLASS)
    if not all(callable(getattr(made, name, None)) for name in ("reset", "step")):
        raise LookupError(f"{path} defines no class {CLASS} with reset(row) and step(message)")
    return made


if __name__ == "__main__":
    leave_the_network()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it cannot write files
    serve(answer)
