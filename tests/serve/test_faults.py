"""A fault at every call of an engine's thread: everyone is told, no block is lost, the next request is answered.

The calls are read from the source. A new one is tested by itself, and fails its test if no request here leads to it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import threading
from functools import cache, partial
from textwrap import dedent
from types import FunctionType
from typing import Any, cast

import httpx
import pytest

from sheepop.core.errors import RanksError
from sheepop.generate import GenerationConfig, engine
from sheepop.generate.beam_search import Beam
from sheepop.generate.blocks import BlockManager
from sheepop.generate.engine import Engine
from sheepop.generate.request import Candidate, Request
from sheepop.generate.runner import PagedRunner
from sheepop.generate.sampler import Choice, Sampled, Sampler
from sheepop.generate.scheduler import Scheduler
from sheepop.generate.speculation import LookupDrafter
from sheepop.serve.config import ServerConfig
from sheepop.serve.served_model import ServedModel
from sheepop.serve.worker import EngineDeadError, EngineFaultError, EngineWorker
from sheepop.tokenizer import CharTokenizer

from .conftest import Live, model_of, tiny, wait_for

PARTS = (Beam, BlockManager, Candidate, Choice, LookupDrafter, PagedRunner, Request, Sampled, Sampler, Scheduler)


APART = ("require", "prepare")  # methods that others call, before a request or before the thread begins


def used(*codes: Any) -> set[str]:
    """The names of all attributes in the source of classes and functions, but for what does not run in the thread."""
    trees = [ast.parse(dedent(inspect.getsource(code))).body[0] for code in codes]
    parts = [part for tree in trees for part in getattr(tree, "body", ()) if getattr(part, "name", "") not in APART]
    return {node.attr for part in parts for node in ast.walk(part) if isinstance(node, ast.Attribute)}


def calls(names: set[str], *parts: type) -> list[tuple[type, str]]:
    """The public methods and properties of `parts` with these names."""
    found = [(part, name) for part in parts for name in sorted(names) if not name.startswith("_")]
    return [(part, name) for part, name in found if isinstance(vars(part).get(name), FunctionType | property)]


CALLS = calls(used(EngineWorker), Engine) + calls(used(Engine, engine._accept, engine._rows, Scheduler), *PARTS)
IN_RECOVERY = {(Engine, "recover"), (Scheduler, "reset"), (BlockManager, "forget"), (LookupDrafter, "reset")}


class Fault:
    """Raises an error at call number `number` of the engine's thread, before or after its work."""

    def __init__(self, call: tuple[type, str], number: int, *, before: bool, error: Exception | None = None) -> None:
        self._owner, self._name = call
        self._left, self._before, self._error = number, before, error or RuntimeError("a fault")
        self.is_over = False
        self.waiting: list[Request] = []  # those of which nothing was read, while others ran

    def patch(self, monkeypatch: pytest.MonkeyPatch, scheduler: Scheduler) -> None:
        found = vars(self._owner)[self._name]
        work = found.fget if isinstance(found, property) else found

        def failing(*given: Any, **more: Any) -> Any:
            if self.is_over or not threading.current_thread().name.startswith("engine of"):
                return work(*given, **more)
            self._left -= 1
            if self._left:
                return work(*given, **more)
            self.is_over = True
            if not self._before:
                work(*given, **more)
            if scheduler.running:
                self.waiting = [request for request in cast(list[Request], scheduler.waiting) if request.is_new]
            raise self._error

        monkeypatch.setattr(self._owner, self._name, property(failing) if isinstance(found, property) else failing)


PLAIN = GenerationConfig(max_new_tokens=5, min_new_tokens=5, seed=7)
SEVERAL, BEAMS = PLAIN.replace(num_completions=2), GenerationConfig(num_beams=2, max_new_tokens=3, seed=7)
SLIDING = ("abcd" * 7 + "abc", PLAIN.replace(on_overflow="slide"))
# More than run at a time: several texts, beams, contexts that slide, stop strings.
ASKED = [
    *(("Once", SEVERAL), ("Twice", BEAMS), SLIDING, ("Twice a day", SEVERAL), SLIDING, ("Once a day", BEAMS)),
    *((text, PLAIN.replace(top_logprobs=2, stop=("never",))) for text in ("Once upon", "Twice upon", "At last")),
]


def build(guesses: int = 0) -> ServedModel:
    """An engine that guesses, or starts steps ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "build", partial(Engine.build, steps_ahead=1))
        return tiny("m", CharTokenizer(), ServerConfig(max_running=5, max_waiting=9, max_model_len=32, guesses=guesses))


async def written(model: ServedModel, request: Request, *, leave_after: int = 0) -> list[tuple[int, ...]]:
    """The tokens of the texts; those up to so many events of a client that leaves."""
    count = 0
    async for _ in model.worker.write([request]):
        count += 1
        if count == leave_after:
            break
    return [tuple(candidate.token_ids) for candidate in request.candidates]


async def crowd(model: ServedModel, requests: list[Request]) -> list[Any]:
    """The texts or errors of all requests at a time, while others leave."""
    leaving = [written(model, model.request("Never", PLAIN), leave_after=count) for count in (1, 1, 2)]
    texts = [written(model, request) for request in requests]
    return (await asyncio.wait_for(asyncio.gather(*texts, *leaving, return_exceptions=True), 60))[: len(requests)]


def ask(model: ServedModel, searches: bool = True) -> tuple[list[Request], list[Any]]:
    requests = [model.request(prompt, config) for prompt, config in ASKED if config.num_beams == 1 or searches]
    return requests, asyncio.run(crowd(model, requests))


@cache
def expected(searches: bool) -> list[Any]:
    model = build()
    try:
        return ask(model, searches)[1]
    finally:
        model.close()


@pytest.mark.parametrize(("number", "before"), [(1, True), (2, False)], ids=["before", "after"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0].__name__}.{call[1]}")
def test_everyone_is_told_and_no_block_is_lost(
    call: tuple[type, str], number: int, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = call[0] is not LookupDrafter  # without guesses
    right, model = expected(searches), build(0 if searches else 2)
    faults = [Fault(call, number, before=before)]
    if call in IN_RECOVERY:  # from other faults
        faults = [Fault(call, 1, before=before), Fault((PagedRunner, "run"), 4, before=before)]
    try:
        for fault in faults:
            fault.patch(monkeypatch, model.worker.scheduler)
        requests, found = ask(model, searches)
        assert faults[0].is_over, "no request here leads to this call"
        failed = [each for each, result in zip(requests, found, strict=True) if isinstance(result, EngineFaultError)]
        done = [(result, of) for result, of in zip(found, right, strict=True) if not isinstance(result, Exception)]
        assert len(failed) + len(done) == len(requests)
        assert all(result == of for result, of in done)
        if model.worker.fault is not None:
            with pytest.raises(EngineDeadError, match="a fault"):
                asyncio.run(written(model, model.request("Once", PLAIN)))
        else:
            assert len([request for request in fault.waiting if request in failed]) <= 1  # the one at fault
            manager = model.worker.scheduler.manager
            # The thread may not have heard yet that a client has left.
            wait_for(lambda: manager.num_free == manager.num_blocks)
            assert asyncio.run(written(model, model.request(*ASKED[-1]))) == right[-1]
    finally:
        model.close()


@pytest.mark.parametrize(
    ("call", "error", "is_dead"),
    [
        ((Engine, "step"), MemoryError("a fault"), False),
        ((Engine, "is_idle"), RuntimeError("a fault"), True),
        ((PagedRunner, "run"), RanksError("a fault"), True),
    ],
)
def test_health_is_that_of_the_engine(
    call: tuple[type, str], error: Exception, is_dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Live(ServerConfig(), models=["m"])
    try:
        fault, model = Fault(call, 3, before=True, error=error), model_of(server.registry, "m")
        fault.patch(monkeypatch, model.worker.scheduler)
        wait_for(lambda: fault.is_over or post(server).status_code != 200)
        for path in ("/health", "/ready"):
            answer = httpx.get(f"{server.url}{path}")
            assert answer.status_code == (503 if is_dead else 200)
            assert ("a fault" in answer.text) == is_dead
        assert post(server).status_code == (503 if is_dead else 200)
    finally:
        server.close()


def post(server: Live) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"model": "m", "prompt": "Once", "max_tokens": 8})
