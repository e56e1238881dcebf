"""A server with replicas on two Ray nodes answers like a single process, even while replicas are lost."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sheepop.checkpoint.model_directory import load_model, save_model
from sheepop.generate import GenerationConfig, Generator
from sheepop.serve.config import ServerConfig

from ..command_line import free_port
from ..two_nodes import processes_of, two_nodes
from .conftest import WithTemplate, tiny

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("ray", "grpc_reflection")),
        reason="Ray Serve is not installed: pip install 'sheepop[cluster]'",
    ),
]

SECONDS = 300.0  # a busy machine starts two nodes and two replicas in two minutes
KEYS = [{"key": "key of all", "name": "all"}, {"key": "key of few", "name": "few", "requests_per_minute": 3}]


class OnRay:
    """``sheepop serve --engine ray`` with two replicas on the cluster."""

    def __init__(self, place: Path, address: str) -> None:
        port = free_port()
        (place / "keys.json").write_text(json.dumps(KEYS))
        command = [
            sys.executable,
            "-m",
            "sheepop",
            "serve",
            f"m={place / 'model'}",
            "--engine",
            "ray",
            "--replicas",
            "2",
        ]
        command += ["--port", str(port), "--device", "cpu", "--api-keys", str(place / "keys.json")]
        command += ["--set", "server.max_running=4", "--set", f"server.drain_seconds={SECONDS:g}"]
        self.process = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": address, "OMP_NUM_THREADS": "1"})
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"Authorization": "Bearer key of all"}, timeout=SECONDS
        )

    def wait_until_ready(self) -> None:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if self.client.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise TimeoutError(f"not ready; exit code {self.process.poll()}")

    def ask(self, prompt: str, **more: Any) -> httpx.Response:
        key = more.pop("key", "key of all")
        asked = {"model": "m", "prompt": prompt, "seed": 3, "max_tokens": 20, "min_tokens": 20, **more}
        return self.client.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}"})

    def text(self, prompt: str, **more: Any) -> str:
        return str(self.ask(prompt, **more).raise_for_status().json()["choices"][0]["text"])

    def ask_for_long_texts(self, pool: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
        """Sixteen requests, every second one streamed; the engines have them all, and both replicas are at work."""
        long = {"max_tokens": 240, "min_tokens": 240}
        asked = [pool.submit(self.ask, f"{n} once", stream=n % 2 == 0, **long) for n in range(16)]
        wait_for(lambda: sum(self.metric("sheepop_running_requests", "sheepop_waiting_requests").values()) == 16)
        wait_for(lambda: min(self.metric("sheepop_running_requests").values()) > 0)
        return asked

    def metric(self, *names: str) -> dict[str, float]:
        """The samples of metrics, added up for each number of a replica."""
        found: dict[str, float] = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(tuple(f"{name}{end}" for name in names for end in "{ ")):
                replica = line.partition('replica="')[2].partition('"')[0]
                found[replica] = found.get(replica, 0.0) + float(line.rpartition(" ")[2])
        return found


def save(place: Path, seed: int) -> dict[str, str]:
    """Saves the model of a seed, and returns the texts that it generates for some prompts in this process."""
    made = tiny("m", WithTemplate(), ServerConfig(), seed)
    made.close()
    save_model(place / "model", made.generator.model, made.tokenizer, {}, replace=True)
    found = load_model(place / "model")
    generator = Generator(found.model, found.tokenizer, end_ids=found.end_ids)
    settings = GenerationConfig(temperature=1.0, top_p=1.0, seed=3, max_new_tokens=20, min_new_tokens=20)
    return {prompt: generator.generate([prompt], settings)[0].text for prompt in PROMPTS}


PROMPTS = [f"{letter} once" for letter in "abcdefgh"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def expected(place: Path) -> dict[str, str]:
    return save(place, 4)


@pytest.fixture(scope="module")
def server(place: Path, expected: dict[str, str]) -> Iterator[OnRay]:
    with two_nodes() as cluster:
        server = OnRay(place, cluster.address)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.client.close()
            server.process.kill()
            server.process.wait()


def test_texts_are_those_of_one_process_whole_and_streamed(server: OnRay, expected: dict[str, str]) -> None:
    assert {prompt: server.text(prompt) for prompt in PROMPTS} == expected
    lines = server.ask(PROMPTS[0], stream=True).raise_for_status().text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    pieces = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-2]]
    assert "".join(pieces) == expected[PROMPTS[0]]


def test_requests_that_begin_alike_go_to_one_replica(server: OnRay) -> None:
    before = server.metric("sheepop_prompt_tokens_total")
    beginning = "x" * 200
    for number in range(6):
        server.text(beginning, seed=number)
    after = server.metric("sheepop_prompt_tokens_total")
    grown = [count - before.get(name, 0) for name, count in after.items()]
    assert [count for count in grown if count] == [1200], "a replica that had no request yet has no count"


def test_keys_and_refusals_are_those_of_one_server(server: OnRay) -> None:
    assert server.ask("x", key="no key").status_code == 401
    assert server.ask("x", suffix="y").json()["error"]["code"] == "unsupported_parameter"
    found = [server.ask(prompt, key="key of few") for prompt in PROMPTS[:4]]
    assert [answer.status_code for answer in found] == [200, 200, 200, 429], "whichever replicas they went to"
    assert 1 <= int(found[-1].headers["retry-after"]) <= 60
    assert server.client.get("/v1/nothing").json()["error"]["code"] == "not_found"


def test_who_leaves_is_not_written_to_any_longer(server: OnRay) -> None:
    before = sum(server.metric("sheepop_completion_tokens_total").values())
    asked = {"model": "m", "prompt": "a once", "max_tokens": 250, "min_tokens": 250, "n": 4, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=asked) as answer:
        next(answer.iter_lines())
    wait_for(lambda: sum(server.metric("sheepop_running_requests").values()) == 0)
    assert sum(server.metric("sheepop_completion_tokens_total").values()) - before < 1000


def test_models_are_loaded_anew_everywhere_and_open_requests_end_with_the_old(
    server: OnRay, place: Path, expected: dict[str, str]
) -> None:
    def long() -> dict[str, Any]:
        return {"max_tokens": 240, "min_tokens": 240, "stream": True}

    with ThreadPoolExecutor() as pool:
        opened = pool.submit(server.ask, PROMPTS[0], **long())
        new = save(place, 5)
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: {prompt: server.text(prompt) for prompt in PROMPTS} == new)
        old = [json.loads(line[6:]) for line in opened.result().text.split("\n\n") if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in old)[:20] == expected[PROMPTS[0]]
    save(place, 4)
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: {prompt: server.text(prompt) for prompt in PROMPTS} == expected)


def test_a_replica_that_is_killed_is_replaced_and_its_requests_are_refused(
    server: OnRay, expected: dict[str, str]
) -> None:
    with ThreadPoolExecutor(16) as pool:
        asked = server.ask_for_long_texts(pool)
        replica = next(process for process in processes_of() if "ServeReplica" in " ".join(process.cmdline()))
        replica.kill()
        outcomes = [outcome(answer) for answer in asked]
    assert set(outcomes) <= {"written", "replica_lost"}
    assert outcomes.count("replica_lost") >= 1
    assert outcomes.count("written") >= 1
    assert {prompt: server.text(prompt) for prompt in PROMPTS} == expected, "the other one has all requests now"
    wait_for(lambda: server.metric("sheepop_replicas") == {"": 2})


def test_what_is_open_is_finished_when_the_server_is_told_to_stop(server: OnRay) -> None:
    with ThreadPoolExecutor(16) as pool:
        asked = server.ask_for_long_texts(pool)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.client.get("/ready").status_code == 503)
        assert server.ask("b once").json()["error"]["code"] == "draining"
        assert [outcome(answer) for answer in asked] == ["written"] * 16
    assert server.process.wait(timeout=SECONDS) == 128 + signal.SIGTERM
    assert not [process for process in processes_of() if "ServeReplica" in " ".join(process.cmdline())]


def outcome(asked: Future[httpx.Response]) -> str:
    """``written``, or the code of the refusal, from the status or from the last event of a stream."""
    answer = asked.result(timeout=SECONDS)
    if answer.status_code == 503:
        assert answer.headers["retry-after"] == "1"
        return str(answer.json()["error"]["code"])
    assert answer.status_code == 200
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return "written" if len(answer.json()["choices"][0]["text"]) == 240 else "cut short"
    last = answer.text.strip().rpartition("\n\n")[2].removeprefix("data: ")
    return "written" if last == "[DONE]" else str(json.loads(last)["error"]["code"])


def wait_for(condition: Any) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)
