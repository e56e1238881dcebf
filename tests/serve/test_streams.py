"""Streams of every kind beside requests that keep the event loop busy: their parts add up to the whole answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sheepop.serve.config import ServerConfig

from .conftest import Live, model_of

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "Hi"}]
KINDS: dict[str, dict[str, Any]] = {
    "text": {"model": "plain", "prompt": ["Once", "Twice"], "n": 2},
    "logprobs": {"model": "plain", "prompt": "Once", "logprobs": 2, "echo": True},
    "chat": {"model": "chat", "messages": MESSAGES, "logprobs": True, "top_logprobs": 1},
    "tools": {"model": "chat", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "logprobs": True},
}


@pytest.fixture(scope="module")
def busy() -> Iterator[Live]:
    server = Live(ServerConfig(max_running=32, max_waiting=256))
    yield server
    server.close()


def path_of(asked: dict[str, Any]) -> str:
    return "/v1/completions" if "prompt" in asked else "/v1/chat/completions"


async def whole(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await client.post(path_of(asked), json=asked)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return [plain(choice) for choice in found]


def plain(choice: dict[str, Any]) -> dict[str, Any]:
    """What a choice says; ids of calls are drawn."""
    message = choice.get("message", {})
    calls = [call["function"] for call in message.get("tool_calls", ())]
    text = choice["text"] if "text" in choice else message["content"] or ""
    return {"text": text, "calls": calls, "logprobs": choice["logprobs"], "reason": choice["finish_reason"]}


async def streamed(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of each choice, added up; fails if anything follows the end of a choice."""
    found: dict[int, dict[str, Any]] = {}
    async with client.stream("POST", path_of(asked), json={**asked, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert lines[-1] == "[DONE]", lines[-1]
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "calls": [], "logprobs": None, "reason": None})
            assert one["reason"] is None, "something follows the end"
            delta = choice.get("delta", {})
            one["text"] += choice["text"] if "text" in choice else delta.get("content") or ""
            one["reason"] = choice["finish_reason"]
            for call in delta.get("tool_calls", ()):
                assert call["index"] == len(one["calls"])
                one["calls"].append(call["function"])
            for name, values in (choice["logprobs"] or {}).items():
                one["logprobs"] = one["logprobs"] or {}
                one["logprobs"][name] = values and (one["logprobs"].get(name) or []) + values
    return [found[index] for index in sorted(found)]


def assert_same(one: Any, other: Any) -> None:
    """Compares answers; numbers may differ by the rounding of another batch."""
    if isinstance(one, float) and isinstance(other, float):
        assert one == pytest.approx(other, abs=1e-3)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for name in one:
            assert_same(one[name], other[name])
    else:
        assert one == other


def test_the_parts_of_streams_add_up_while_the_loop_is_busy(busy: Live) -> None:
    asked = [
        {**KINDS[kind], "max_tokens": 12 + seed, "seed": seed, "temperature": 0.9}
        for kind in KINDS
        for seed in range(16)
    ]

    worker = model_of(busy.registry, "plain").worker

    async def hold() -> None:
        """Keeps the server's own loop busy, so that the engine runs ahead of the streams."""
        while not worker._listeners:
            await asyncio.sleep(0.001)
        loop = next(iter(worker._listeners.values())).loop
        for _ in range(60):
            loop.call_soon_threadsafe(time.sleep, 0.03)
            await asyncio.sleep(0.04)

    async def all_of_them() -> None:
        async with httpx.AsyncClient(
            base_url=busy.url, timeout=60, limits=httpx.Limits(max_connections=None)
        ) as client:
            expected = await asyncio.gather(*(whole(client, each) for each in asked))
            holding = asyncio.ensure_future(hold())
            found = await asyncio.gather(*(streamed(client, each) for each in asked))
            holding.cancel()
            for one, other in zip(expected, found, strict=True):
                assert_same(one, other)

    asyncio.run(all_of_them())


def test_the_work_for_the_log_probabilities_of_a_stream_grows_with_its_tokens(
    busy: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the tokens that are looked up: twice as many for twice the text."""
    tokenizer, counts = model_of(busy.registry, "plain").tokenizer, list[int]()
    look_up = tokenizer.token_bytes

    def counted(token_id: int) -> bytes:
        counts[-1] += 1
        return look_up(token_id)

    monkeypatch.setattr(tokenizer, "token_bytes", counted)

    async def both() -> None:
        async with httpx.AsyncClient(base_url=busy.url, timeout=60) as client:
            for length in (40, 80):
                counts.append(0)
                asked = {"model": "plain", "prompt": "Once", "logprobs": 2, "max_tokens": length, "min_tokens": length}
                (choice,) = await streamed(client, asked)
                assert len(choice["logprobs"]["tokens"]) == length

    asyncio.run(both())
    assert counts[0] >= 40
    assert counts[1] <= 2.1 * counts[0]
