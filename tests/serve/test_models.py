"""Several models under one budget of memory: loaded when used, kept, unloaded; each fault stays with its model."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from sheepop.checkpoint import save_model
from sheepop.core.errors import CheckpointError, ConfigError, UsageError
from sheepop.serve import stock
from sheepop.serve.config import ServerConfig, duration
from sheepop.serve.registry import Registry
from sheepop.serve.served_model import ServedModel
from sheepop.serve.stock import Source
from sheepop.tokenizer import CharTokenizer

from ..command_line import Launcher
from .conftest import Live, ServerProcess, Shelf, WithTemplate, model_of, tiny, tiny_network, wait_for

MIB, GIB = 2**20, 2**30
ASKED = {"prompt": "Once", "max_tokens": 4, "min_tokens": 4}


class Clock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Loads:
    """Makes tiny models, and notes their names; waits for `gate` if it is closed, and fails for those in `broken`."""

    def __init__(self, config: ServerConfig) -> None:
        self.config, self.names = config, list[str]()
        self.gate, self.broken = threading.Event(), set[str]()
        self.gate.set()

    def __call__(self, name: str) -> ServedModel:
        self.names.append(name)
        assert self.gate.wait(60)
        if name in self.broken:
            raise CheckpointError(f"{name} is damaged.")
        return tiny(name, WithTemplate(), self.config, seed=4 + len(name))


def begin(config: ServerConfig, sizes: dict[str, float], clock: Clock | None = None) -> tuple[Live, Loads]:
    """A server of models whose weights take so many GiB."""
    loads = Loads(config)
    in_bytes = {name: int(size * GIB) for name, size in sizes.items()}
    shelf = Shelf(loads, list(sizes), config, sizes=in_bytes, chats=list(sizes))
    return Live(config, stock=shelf, clock=clock or Clock()), loads


def ask(server: Live, model: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={"model": model, **ASKED, **more}, timeout=60)


def states(server: Live) -> dict[str, str]:
    return {each["id"]: each["state"] for each in httpx.get(f"{server.url}/v1/models").json()["data"]}


@pytest.fixture
def servers() -> Iterator[list[Live]]:
    running: list[Live] = []
    yield running
    for server in running:
        server.close()


def test_what_needs_the_memory_unloads_what_was_used_longest_ago(servers: list[Live]) -> None:
    # 4 + 4 + 4 are more than 12, so two are kept, each with a cache of (12 - 8) / 3.
    config = ServerConfig(memory_budget=12, aliases={"gpt-4o": "bb"})
    clock = Clock()
    server, loads = begin(config, {"a": 4, "bb": 4, "ccc": 4, "huge": 12.5}, clock)
    servers.append(server)
    assert loads.names == ["a"]
    assert states(server) == {
        "a": "loaded", "bb": "unloaded", "ccc": "unloaded", "huge": "unloaded", "gpt-4o": "unloaded"
    }  # fmt: skip
    answers = {}
    for number, name in enumerate(("a", "gpt-4o", "a", "ccc", "a", "bb")):
        clock.now += number
        answers[name] = ask(server, name).json()
    assert loads.names == ["a", "bb", "ccc", "bb"]  # ccc took the place of bb, and bb that of ccc
    assert {name for name, state in states(server).items() if state == "loaded"} == {"a", "bb", "gpt-4o"}
    assert answers["gpt-4o"]["model"] == "bb"
    card = httpx.get(f"{server.url}/v1/models/gpt-4o").json()
    assert (card["root"], card["size"], card["max_model_len"]) == ("bb", 4 * GIB, 256)
    ollama = httpx.get(f"{server.url}/api/ps").json()["models"]
    assert {each["name"] for each in ollama} == {"a", "bb"}
    tags = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert {each["name"]: each["size"] for each in tags}["huge"] == 12.5 * GIB
    refused = ask(server, "huge")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_too_large")
    assert "huge needs 12.5 GiB" in refused.text and "the memory budget is 12 GiB" in refused.text
    assert ask(server, "../a").status_code == 404


def test_a_model_in_use_is_unloaded_when_its_last_request_ends(servers: list[Live]) -> None:
    server, loads = begin(ServerConfig(memory_budget=6), {"a": 4, "bb": 4})
    servers.append(server)
    whole = ask(server, "a", max_tokens=200, min_tokens=200, temperature=0).json()["choices"][0]["text"]

    async def crowd() -> tuple[str, list[int]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {"model": "a", **ASKED, "max_tokens": 200, "min_tokens": 200, "temperature": 0}
            running = asyncio.ensure_future(client.post("/v1/completions", json=body))
            while server.registry.num_open == 0:
                await asyncio.sleep(0.001)
            others = [client.post("/v1/completions", json={"model": name, **ASKED}) for name in ("bb", "a", "bb", "a")]
            statuses = [answer.status_code for answer in await asyncio.gather(*others)]
            return (await running).json()["choices"][0]["text"], statuses

    assert asyncio.run(crowd()) == (whole, [200] * 4)
    assert loads.names[:2] == ["a", "bb"]
    wait_for(lambda: server.registry.num_open == 0)
    assert len(server.registry.models()) == 1


def test_a_model_stays_until_the_requests_it_was_loaded_for_have_opened_it(servers: list[Live]) -> None:
    """Also while the event loop is too busy to tell them that it is there, and another model wants its memory."""
    server, loads = begin(ServerConfig(memory_budget=6), {"a": 4, "bb": 4, "ccc": 4})
    servers.append(server)
    registry = server.registry

    async def crowd() -> None:
        entering = [asyncio.ensure_future(registry.entered(name)) for name in ("bb", "ccc")]
        await asyncio.sleep(0)  # both are in the queue of the thread that loads
        time.sleep(0.5)
        for each in entering:
            registry.leave(await each)

    asyncio.run(crowd())
    assert loads.names == ["a", "bb", "ccc"]


def test_a_model_that_is_let_go_is_not_unloaded_before_it_is_used(servers: list[Live]) -> None:
    server, loads = begin(ServerConfig(keep_alive="5m"), {"a": 1}, Clock())
    servers.append(server)
    registry = server.registry
    model = asyncio.run(registry.entered("a", 0))
    registry.tidy()
    assert registry.card("a").state == "loaded"
    registry.leave(model)
    wait_for(lambda: registry.card("a").state == "unloaded")
    assert loads.names == ["a"]


def test_an_idle_model_is_kept_as_long_as_it_was_said(servers: list[Live]) -> None:
    clock = Clock()
    server, loads = begin(ServerConfig(keep_alive="5m"), {"a": 1, "bb": 1}, clock)
    servers.append(server)
    registry = server.registry

    def is_loaded(name: str, after: float) -> bool:
        clock.now += after
        registry.tidy()
        return registry.card(name).state == "loaded"

    assert registry.card("a").seconds_left == 300
    assert is_loaded("a", 299) and ask(server, "a").status_code == 200
    assert is_loaded("a", 299) and not is_loaded("a", 1)
    generate = f"{server.url}/api/generate"
    body = {"model": "a:latest", "prompt": "Hi", "stream": False, "options": {"num_predict": 2}}
    assert httpx.post(generate, json={**body, "keep_alive": "1h30m"}, timeout=60).json()["done"]
    assert ask(server, "a").status_code == 200  # which says nothing, so that the earlier word stands
    assert registry.card("a").seconds_left == 5400
    (running,) = httpx.get(f"{server.url}/api/ps").json()["models"]
    assert running["name"] == "a" and running["expires_at"] > "2"
    assert httpx.post(generate, json={**body, "keep_alive": -1}, timeout=60).status_code == 200
    assert is_loaded("a", 1e9)
    assert httpx.post(generate, json={**body, "keep_alive": 0}, timeout=60).status_code == 200
    wait_for(lambda: registry.card("a").state == "unloaded")
    # Without a prompt a model is loaded, or unloaded; the next time it is kept as long as the server says.
    chat = f"{server.url}/api/chat"
    assert httpx.post(chat, json={"model": "a"}, timeout=60).json()["done_reason"] == "load"
    assert registry.card("a").seconds_left == 300
    assert httpx.post(chat, json={"model": "a", "keep_alive": 0}, timeout=60).json()["done_reason"] == "unload"
    wait_for(lambda: registry.card("a").state == "unloaded")
    assert loads.names == ["a"] * 3
    for given in ("soon", [5], {"a": 1}, "1" * 90_000 + "x"):
        wrong = httpx.post(generate, json={**body, "keep_alive": given})
        assert wrong.status_code == 400 and "keep_alive" in wrong.text


def test_requests_wait_for_a_model_in_its_queue_and_no_longer_one(servers: list[Live]) -> None:
    server, loads = begin(ServerConfig(max_running=1, max_waiting=2), {"a": 1, "bb": 1})
    servers.append(server)
    loads.gate.clear()

    async def crowd() -> tuple[list[int], set[str], int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            body = {"model": "bb", **ASKED}
            waiting = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(30)]
            over, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert (await client.get("/health")).status_code == 200
            assert (await client.post("/v1/completions", json={**body, "model": "a"})).status_code == 200
            loads.gate.set()
            answers = await asyncio.gather(*waiting)
            codes = {answer.json()["error"]["code"] for answer in answers if answer.status_code == 503}
            return sorted(answer.status_code for answer in answers), codes, len(over)

    statuses, codes, _ = asyncio.run(crowd())
    assert statuses == [200] * 3 + [503] * 27 and codes == {"overloaded"}
    assert loads.names == ["a", "bb"]


def test_a_client_that_leaves_while_a_model_loads_is_forgotten(servers: list[Live]) -> None:
    server, loads = begin(ServerConfig(), {"a": 1, "bb": 1})
    servers.append(server)
    loads.gate.clear()

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            asked = asyncio.ensure_future(client.post("/v1/completions", json={"model": "bb", **ASKED}, timeout=60))
            while not server.registry.num_open or server.registry.card("bb").state != "loading":
                await asyncio.sleep(0.01)
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked

    asyncio.run(leave())
    wait_for(lambda: server.registry.num_open == 0)
    assert server.registry.card("bb").state == "loading"
    loads.gate.set()
    assert ask(server, "bb").status_code == 200


def test_what_is_wrong_with_a_model_harms_no_other(servers: list[Live], monkeypatch: pytest.MonkeyPatch) -> None:
    server, loads = begin(ServerConfig(), {"a": 1, "bb": 1, "ccc": 1})
    servers.append(server)
    loads.broken.add("bb")
    refused = ask(server, "bb")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")
    assert "bb cannot be loaded: bb is damaged." in refused.text
    assert ask(server, "ccc").status_code == 200

    def failing(*_: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(model_of(server.registry, "ccc").worker, "_run_inbox", failing)
    assert "The engine of ccc has ended" in ask(server, "ccc").text
    assert ask(server, "a").status_code == 200
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503 and "ccc" in health.text
    loads.broken.clear()
    server.registry.reload()
    assert [ask(server, name).status_code for name in ("a", "bb", "ccc")] == [200] * 3
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_server_is_closed_while_a_model_loads() -> None:
    server, loads = begin(ServerConfig(drain_seconds=0), {"a": 1, "bb": 1})
    loads.gate.clear()
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.append(ask(server, "bb").status_code))
    asking.start()
    wait_for(lambda: loads.names == ["a", "bb"])

    def load_later() -> None:
        wait_for(lambda: server.server.should_exit)
        time.sleep(0.3)
        loads.gate.set()

    threading.Thread(target=load_later).start()
    server.close()
    asking.join()
    assert found == [503]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_cache_that_is_loaded_anew_has_the_memory_that_the_old_one_frees(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Of 4 MiB there is free what no model has that is not closed; on a GPU a cache takes its memory at once."""
    config, weights, made = ServerConfig(max_running=16), MIB // 2, list[tuple[ServedModel, int]]()

    def free(*_: object) -> int:
        return 4 * MIB - sum(weights + size for model, size in made if model.worker._thread.is_alive())

    class Memory(Shelf):
        def read(self, source: Source, base: ServedModel | None) -> Any:
            return SimpleNamespace(model=SimpleNamespace(device=torch.device(device)))

        def serve(self, name: str, loaded: Any, base: ServedModel | None, cache_bytes: int) -> ServedModel:
            assert device == "cpu" or free() >= weights + cache_bytes
            model = tiny(name, WithTemplate(), config.replace(cache_memory=cache_bytes / GIB))
            made.append((model, cache_bytes))
            return model

    monkeypatch.setattr(stock, "free_memory", free)
    registry = Registry(Memory(lambda _: pytest.fail("nothing else loads"), ["a"], config, sizes={"a": weights}))
    try:
        old = asyncio.run(registry.entered("a"))
        with ThreadPoolExecutor(1) as pool:
            reloading = pool.submit(registry.reload)
            if device == "cuda":
                with pytest.raises(TimeoutError):
                    reloading.result(0.2)  # a request still uses the old one
            else:
                reloading.result(60)
            assert len(made) == (1 if device == "cuda" else 2)
            registry.leave(old)
            reloading.result(60)
        blocks = [model.worker.scheduler.manager.num_blocks for model, _ in made]
        # (0.9 * 4 - 0.5) / 2 MiB, in blocks of 8 KiB; 16 whole contexts would have 256.
        assert blocks == [(198,)] * 2
    finally:
        registry.close()


@pytest.mark.parametrize(
    ("budget", "sizes", "cache"),
    [
        (10, [4], 3),  # (10 - 4) / 2
        (12, [3, 1], 8 / 3),  # both are kept
        (16, [6, 6, 6], 4 / 3),  # two of them
        (10, [8, 1], 1),  # one alone takes more than three quarters
        (10, [11, 4], 3),  # the first never fits
    ],
)
def test_models_share_what_their_weights_leave(budget: float, sizes: Sequence[float], cache: float) -> None:
    shelf = Shelf(Loads(ServerConfig()), [], ServerConfig(memory_budget=budget))
    assert shelf.cache_bytes([int(size * GIB) for size in sizes]) == pytest.approx(cache * GIB, abs=1)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (90, 90), (1.5, 1.5), (0, 0), ("0", 0), ("3600", 3600), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400),
        ("300ms", 0.3), ("1h2m3.5s", 3723.5), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf), ("+2s", 2),
    ],
)  # fmt: skip
def test_durations_are_those_of_ollama(given: float | str, seconds: float) -> None:
    assert duration(given) == pytest.approx(seconds)


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", "1h30", "1d", "nan", float("nan")])
def test_what_is_no_duration_is_refused(given: float | str) -> None:
    with pytest.raises(ConfigError, match=r"keep_alive|duration"):
        ServerConfig(keep_alive=given)


@pytest.mark.parametrize("aliases", [{"x": "nobody"}, {"a": "a"}])
def test_an_alias_is_a_new_name_of_a_model(aliases: dict[str, str]) -> None:
    config = ServerConfig(aliases=aliases)
    with pytest.raises(UsageError, match="must be a new name of one of the models a"):
        Registry(Shelf(Loads(config), ["a"], config))


def test_a_process_serves_two_models_where_one_fits(launcher: Launcher, tmp_path: Path) -> None:
    for name, seed in (("one", 4), ("two", 9)):
        save_model(tmp_path / name, tiny_network(seed), CharTokenizer(), {})
    size = (tmp_path / "one" / "model.safetensors").stat().st_size
    options = ("--memory-budget", str(1.6 * size / GIB), "--keep-alive", "1h", "--alias", "gpt=two", "--device", "cpu")
    server = ServerProcess(launcher, [tmp_path / "one", tmp_path / "two"], tmp_path / "log", *options)
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for name, loaded in (("one", "one"), ("gpt", "two"), ("one", "one")):
                answer = client.post("/v1/completions", json={"model": name, **ASKED})
                assert answer.status_code == 200, answer.text
                cards = client.get("/v1/models").json()["data"]
                assert [each["id"] for each in cards if each["state"] == "loaded" and each["root"] == each["id"]] == [
                    loaded
                ]
    finally:
        server.close()
    assert "two was unloaded to make room for one" in (tmp_path / "log").read_text()
