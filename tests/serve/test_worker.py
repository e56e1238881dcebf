"""Requests that end early, arrive all at once, or fail: the others are not affected, and every one is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import torch

from sheepop.core.errors import SheepOpError
from sheepop.generate import GenerationConfig
from sheepop.generate.request import Request
from sheepop.generate.scheduler import QueueFullError
from sheepop.serve.config import ServerConfig
from sheepop.serve.served_model import ServedModel
from sheepop.serve.worker import EngineDeadError, EngineFaultError
from sheepop.tokenizer import CharTokenizer

from .conftest import tiny


@pytest.fixture
def model() -> Iterator[ServedModel]:
    served = tiny("m", CharTokenizer(), ServerConfig(max_running=3, max_waiting=4))
    yield served
    served.close()


def asked(model: ServedModel, seed: int, most: int = 30) -> Request:
    return model.request("Once", GenerationConfig(seed=seed, max_new_tokens=most, min_new_tokens=most))


async def written(model: ServedModel, request: Request, *, leave_after: int | None = None) -> str:
    text, count = "", 0
    async for updates in model.worker.write([request]):
        text += "".join(update.text for update in updates)
        count += 1
        if count == leave_after:
            break
    return text


async def begun(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits until a text is being written, and makes each step so slow that it is not soon finished."""
    step = model.worker._step

    def slower() -> None:
        time.sleep(0.01)
        step()

    monkeypatch.setattr(model.worker, "_step", slower)
    while not model.worker.scheduler.running:
        await asyncio.sleep(0.001)


def test_those_that_leave_free_their_place_and_change_no_other_text(model: ServedModel) -> None:
    async def crowd() -> list[str]:
        leaving = [written(model, asked(model, seed, 200), leave_after=3) for seed in (7, 8, 9)]
        staying = [written(model, asked(model, seed)) for seed in (1, 2)]
        return (await asyncio.gather(*leaving, *staying))[3:]

    async def alone() -> list[str]:
        return [await written(model, asked(model, seed)) for seed in (1, 2)]

    assert asyncio.run(crowd()) == asyncio.run(alone())
    manager = model.worker._engine.scheduler.manager
    asyncio.run(written(model, asked(model, 0, 1)))
    assert manager.num_free == manager.num_blocks


def test_more_than_fit_are_refused_and_the_rest_is_written(model: ServedModel) -> None:
    async def flood() -> list[str | BaseException]:
        requests = [asked(model, seed) for seed in range(30)]
        return await asyncio.gather(*(written(model, request) for request in requests), return_exceptions=True)

    found = asyncio.run(flood())
    texts = [text for text in found if isinstance(text, str)]
    refused = [error for error in found if isinstance(error, QueueFullError)]
    assert len(texts) + len(refused) == 30
    assert len(texts) >= 4
    assert all(len(text) == 30 for text in texts)


def test_a_fault_of_the_engine_ends_those_that_run_and_not_the_engine(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = model.worker._engine._runner
    working = runner.run

    def failing(*_: object) -> torch.Tensor:
        monkeypatch.setattr(runner, "run", working)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner, "run", failing)
    with pytest.raises(EngineFaultError, match="RuntimeError: out of memory"):
        asyncio.run(written(model, asked(model, 1)))
    assert len(asyncio.run(written(model, asked(model, 1)))) == 30


def test_a_worker_that_is_closed_tells_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    served = tiny("m", CharTokenizer(), ServerConfig(max_running=1))

    async def interrupted() -> None:
        task = asyncio.ensure_future(written(served, asked(served, 1, 240)))
        await begun(served, monkeypatch)
        await asyncio.to_thread(served.close)
        with pytest.raises(SheepOpError, match="shutting down"):
            await task

    asyncio.run(interrupted())


@pytest.mark.parametrize("name", ["engine.add", "scheduler.add", "scheduler.require_room"])
def test_a_fault_in_taking_a_request_ends_that_request(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    place, _, call = name.partition(".")
    owner = model.worker._engine if place == "engine" else model.worker.scheduler
    working = getattr(owner, call)
    bad = asked(model, 3)

    def failing(request: Request, *more: int) -> None:
        if request is bad:
            raise MemoryError("no room")
        working(request, *more)

    monkeypatch.setattr(owner, call, failing)

    async def crowd() -> list[str | BaseException]:
        requests = [asked(model, 1), bad, asked(model, 2)]
        return await asyncio.gather(*(written(model, request) for request in requests), return_exceptions=True)

    one, error, other = asyncio.run(crowd())
    assert isinstance(error, EngineFaultError)
    assert "MemoryError: no room" in str(error)
    assert isinstance(one, str) and isinstance(other, str) and len(one) == len(other) == 30
    assert model.worker.fault is None


@pytest.mark.parametrize("name", ["_run_inbox", "_step", "_take", "_notify"])
def test_a_thread_that_ends_tells_everyone(model: ServedModel, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async def crowd() -> list[str | BaseException]:
        running = [asyncio.ensure_future(written(model, asked(model, seed, 200))) for seed in (1, 2)]
        await begun(model, monkeypatch)

        def failing(*_: object) -> None:
            raise RuntimeError("a fault of the worker")

        monkeypatch.setattr(model.worker, name, failing)
        later = written(model, asked(model, 3))
        return await asyncio.wait_for(asyncio.gather(*running, later, return_exceptions=True), 30)

    found = asyncio.run(crowd())
    assert all(isinstance(error, EngineDeadError) for error in found), found
    assert "a fault of the worker" in str(model.worker.fault)
    with pytest.raises(EngineDeadError):
        asyncio.run(written(model, asked(model, 4)))
