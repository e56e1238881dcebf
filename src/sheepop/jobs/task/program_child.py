"""The process that runs a program of the user, for rewards or as an environment.

It has limits, no network, and cannot write files. The parameters of a function `reward` say what it gets.
``reward(prompt, completion, **fields)`` gets one answer after the other, as texts. With a parameter `prompts` or
`completions` it gets all answers at once, by name: `answers` are texts, and `prompts` are rendered texts; with
`completions`, these and `prompts` are lists of messages where the prompt is a conversation, else texts, as in TRL. The
other keys of the prompts' lines are further arguments.
"""

from __future__ import annotations

import inspect
import resource
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from sheepop.core.bounded_child import Alive, leave_the_network, serve

FUNCTION, CLASS = "reward", "Environment"
# The objects of conversations that go on, by number, with the messages that they have answered.
_live: dict[int, tuple[Any, list[Any]]] = {}


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


def converse(request: Any, alive: Alive) -> Iterator[Any]:
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


@cache
def _class(path: str) -> Any:
    made = runpy.run_path(path, run_name="environment_program").get(CLASS)
    if not all(callable(getattr(made, name, None)) for name in ("reset", "step")):
        raise LookupError(f"{path} defines no class {CLASS} with reset(row) and step(message)")
    return made


if __name__ == "__main__":
    leave_the_network()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it cannot write files
    serve(lambda request, alive: (judge if "answers" in request else converse)(request, alive))
