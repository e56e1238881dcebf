"""Overload, clients that disconnect, and SIGTERM in the middle: every request is answered or refused."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from sheepop.checkpoint import save_model
from sheepop.tokenizer import CharTokenizer

from ..command_line import Launcher, Started, free_port
from .conftest import tiny_network

SETTINGS = ("server.max_running=8", "server.max_waiting=24", "server.drain_seconds=60")


async def until_ready(client: httpx.AsyncClient, process: Started) -> None:
    while True:
        assert (ended := process.poll()) is None, ended
        try:
            if (await client.get("/ready")).status_code == 200:
                return
        except httpx.TransportError:
            await asyncio.sleep(0.05)


async def outcome(client: httpx.AsyncClient, kind: str, seed: int) -> str:
    """The result of a request: done, refused, left by its client, or not accepted at all; anything else fails."""
    count = 10 + seed % 60
    asked: dict[str, Any] = {"model": "m", "prompt": f"Once {seed % 7}", "max_tokens": count, "min_tokens": count}
    try:
        if kind == "cancel":
            try:
                await asyncio.wait_for(client.post("/v1/completions", json=asked), random.Random(seed).random() / 5)
            except TimeoutError:
                return "left"
            return "done"
        if kind == "whole":
            answer = await client.post("/v1/completions", json={**asked, "n": 1 + seed % 3})
            if answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] == count * (1 + seed % 3)
                return "done"
            return refused(answer)
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=asked) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return refused(answer)
            events = []
            async for line in answer.aiter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                if kind == "leave" and len(events) > seed % 9:
                    return "left"
        assert events[-1] == "[DONE]", events[-1]
        assert json.loads(events[-2])["usage"]["completion_tokens"] == count
        return "done"
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError):
        assert kind == "leave" or "events" not in locals(), "a stream was cut"
        return "not let in"


def refused(answer: httpx.Response) -> str:
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] in ("overloaded", "draining")
    return str(answer.json()["error"]["code"])


async def crowd(client: httpx.AsyncClient, size: int, seconds: float, seed: int) -> Counter[str]:
    drawn = random.Random(seed)

    async def one(number: int) -> str:
        await asyncio.sleep(drawn.random() * seconds)
        return await outcome(client, drawn.choice(["whole", "stream", "stream", "leave", "cancel"]), number)

    return Counter(await asyncio.gather(*(one(number) for number in range(size))))


def test_every_request_is_answered_or_refused(tmp_path: Path, launcher: Launcher) -> None:
    save_model(tmp_path / "m", tiny_network(), CharTokenizer(), {})
    port = free_port()
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    process = launcher.start("serve", tmp_path / "m", "--port", port, "--device", "cpu", *settings)

    async def load() -> int:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=120) as client:
            await until_ready(client, process)
            found = await crowd(client, 200, 1.0, seed=1)
            assert found.total() == 200
            assert found["not let in"] == 0
            assert found["done"] >= 32, found
            assert found["overloaded"] > 0, found
            assert found["left"] > 0, found
            await idle(client)
            second = asyncio.ensure_future(crowd(client, 120, 1.5, seed=2))
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            found = await second
            assert found.total() == 120
            assert found["done"] > 0, found
            assert found["draining"] + found["not let in"] > 0, found
            return 200 + 120 - found["not let in"]

    try:
        let_in = asyncio.run(load())
        ended = process.wait(60)
    finally:
        process.kill()
    assert ended.code in (0, 143), ended
    assert "Traceback" not in ended.err
    lines = [json.loads(line) for line in ended.err.splitlines() if line.startswith("{")]
    assert "Once" not in ended.err
    assert {line["status"] for line in lines} <= {200, 499, 503, 0}
    # Whatever came in was told of it: what its client calls not let in is not in the log.
    assert sum(line["method"] == "POST" for line in lines) <= let_in


async def idle(client: httpx.AsyncClient) -> None:
    """Waits until no request is open; then every request was counted once."""
    while True:
        text = (await client.get("/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        if float(values['sheepop_running_requests{model="m"}']) == float(values["sheepop_open_connections"]) - 1 == 0:
            break
        await asyncio.sleep(0.05)
    counted = [float(value) for name, value in values.items() if name.startswith('sheepop_requests_total{path="/v1')]
    # A client that left at once may not have sent anything.
    assert 150 <= sum(counted) <= 200
    assert float(values['sheepop_waiting_requests{model="m"}']) == 0
    assert float(values['sheepop_cache_use{model="m"}']) == 0


def test_a_port_that_is_taken_is_said(tmp_path: Path, launcher: Launcher) -> None:
    save_model(tmp_path / "m", tiny_network(), CharTokenizer(), {})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        ended = launcher.run("serve", tmp_path / "m", "--port", port, "--device", "cpu")
    assert ended.code == 2
    assert f"Cannot listen on 127.0.0.1:{port}" in ended.err
