"""The process that runs a reward program of the user: with limits, without network, and without writing files.

The parameters of its function `reward` say what it gets. ``reward(prompt, completion, **fields)`` gets one answer after
the other, as texts. With a parameter `prompts` or `completions` it gets all answers at once, by name: `answers` are
texts, and `prompts` are rendered texts; with `completions`, these and `prompts` are lists of messages where the prompt
is a conversation, else texts, as in TRL. The other keys of the prompts' lines are further arguments.
"""

from __future__ import annotations

import inspect
import resource
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from sheepop.core.bounded_child import Alive, leave_the_network, serve

FUNCTION = "reward"


def judge(request: Any, alive: Alive) -> Iterator[Any]:
    """Yields the reward of each answer; without answers, whether the program's function takes all of them at once."""
    reward = _function(request["program"])
    parameters = inspect.signature(reward).parameters
    answers, takes_all = request["answers"], not parameters.keys().isdisjoint(("prompts", "completions"))
    if takes_all and parameters.keys().isdisjoint(("answers", "completions")):
        raise LookupError(f"{FUNCTION}(prompts, ...) has no parameter answers (texts) or completions (messages)")
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
    prompts, texts = ([answer[name] for answer in answers] for name in ("prompt", "completion"))
    given = {"prompts": prompts, "answers": texts}
    if "completions" in parameters:
        seen = [answer.get("messages", answer) for answer in answers]
        given |= {"prompts": [each["prompt"] for each in seen], "completions": [each["completion"] for each in seen]}
    names = dict.fromkeys(name for answer in answers for name in answer["fields"])
    if taken := names.keys() & given.keys():
        raise LookupError(f"the key {min(taken)} of the prompts' lines has the name of another argument; rename it")
    given |= {name: [answer["fields"].get(name) for answer in answers] for name in names}
    takes_rest = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    named = parameters.keys() | (names.keys() if takes_rest else set())
    return list(reward(**{name: values for name, values in given.items() if name in named}))


def _number(found: Any) -> Any:
    """A reward as plain data; converts numbers of other libraries, but not text that looks like a number."""
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


if __name__ == "__main__":
    leave_the_network()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it cannot write files
    serve(judge)
