"""Operating a server of one process: keys and their limits, deadlines, TLS, reloaded models, objects as answers."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import load_model, save_model
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.jobs.config import load_config
from sheepop.jobs.serve import serve
from sheepop.serve.config import ServerConfig
from sheepop.serve.registry import Registry
from sheepop.tokenizer import CharTokenizer

from ..command_line import Launcher, in_process
from .conftest import Live, ServerProcess, Shelf, WithTemplate, model_of, tiny, tiny_network, wait_for
from .test_worker import asked, written

httpx = pytest.importorskip("httpx")
ASKED = {"model": "plain", "prompt": "Once", "max_tokens": 240, "min_tokens": 240}


def code(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_keys_have_limits_each(tmp_path: Path) -> None:
    keys = [
        {"key": "often-and-often", "name": "often", "requests_per_minute": 2},
        {"key": "one-at-a-time", "name": "single", "concurrent_requests": 1},
    ]
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    server = Live(ServerConfig(api_keys=str(tmp_path / "keys.json")))

    def ask(key: str, **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{server.url}/v1/completions", json={**ASKED, **more}, headers=headers, timeout=30)

    assert (
        code(ask("wrong-and-wrong"))
        == code(httpx.post(f"{server.url}/v1/completions", json=ASKED))
        == (
            401,
            "invalid_api_key",
        )
    )
    assert [ask("often-and-often", max_tokens=1, min_tokens=1).status_code for _ in range(2)] == [200, 200]
    third = ask("often-and-often")
    assert code(third) == (429, "rate_limit_exceeded") and 1 <= int(third.headers["retry-after"]) <= 60
    statuses: list[int] = []
    first = threading.Thread(target=lambda: statuses.append(ask("one-at-a-time", n=8).status_code))
    first.start()
    while server.registry.num_open == 0:
        time.sleep(0.001)
    second = ask("one-at-a-time", max_tokens=1, min_tokens=1)
    first.join()
    assert statuses == [200] and code(second) == (429, "rate_limit_exceeded") and second.headers["retry-after"] == "1"
    assert ask("one-at-a-time", max_tokens=1, min_tokens=1).status_code == 200
    server.close()


def test_a_conversation_is_known_only_to_the_key_that_had_it(tmp_path: Path) -> None:
    keys = [{"key": f"{name}-and-{name}", "name": name} for name in ("one", "other")]
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    server = Live(ServerConfig(api_keys=str(tmp_path / "keys.json")))

    def ask(name: str, **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {name}-and-{name}"}
        body = {"model": "chat", "input": "Hi", "max_output_tokens": 4, **more}
        return httpx.post(f"{server.url}/v1/responses", json=body, headers=headers, timeout=30)

    try:
        first = ask("one").json()["id"]
        assert ask("one", previous_response_id=first).status_code == 200
        assert code(ask("other", previous_response_id=first)) == (404, "previous_response_not_found")
        kept = ask("one", store=False).json()["id"]
        assert code(ask("one", previous_response_id=kept)) == (404, "previous_response_not_found")
    finally:
        server.close()


def test_what_takes_longer_than_the_deadline_is_ended() -> None:
    server = Live(ServerConfig(deadline_seconds=0.05))
    whole = httpx.post(f"{server.url}/v1/completions", json={**ASKED, "n": 8}, timeout=30)
    assert code(whole) == (504, "deadline_exceeded")
    stream = httpx.post(f"{server.url}/v1/completions", json={**ASKED, "n": 8, "stream": True}, timeout=30)
    last = stream.text.strip().rpartition("\n\n")[2].removeprefix("data: ")
    assert json.loads(last)["error"]["code"] == "deadline_exceeded"
    wait_for(lambda: server.registry.num_open == 0)
    wait_for(lambda: all(not model.worker.scheduler.running for model in server.registry.models()))
    server.close()


def test_an_answer_as_a_json_object_parses(live: Live) -> None:
    messages = [{"role": "user", "content": "Say something"}]
    asked = {"model": "chat", "messages": messages, "max_tokens": 200, "response_format": {"type": "json_object"}}
    whole = 0
    for seed in range(12):
        choice = httpx.post(f"{live.url}/v1/chat/completions", json={**asked, "seed": seed}, timeout=30).json()[
            "choices"
        ][0]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)
            whole += 1
    assert whole >= 6


def test_tokens_become_text_again(live: Live) -> None:
    text = "To be, or not\tto be?\n"
    tokens = httpx.post(f"{live.url}/tokenize", json={"model": "plain", "prompt": text}).json()["tokens"]
    assert tokens == CharTokenizer().encode(text)
    assert httpx.post(f"{live.url}/detokenize", json={"model": "plain", "tokens": tokens}).json()["prompt"] == text


def test_a_model_that_cannot_be_read_keeps_no_other_from_it(live: Live) -> None:
    """An open request finishes with the model that it began with."""
    broken: set[str] = set()
    config = ServerConfig()

    def load(name: str) -> Any:
        if name in broken:
            raise CheckpointError(f"{name} is damaged")
        return tiny(name, CharTokenizer(), config)

    registry = Registry(Shelf(load, ["first", "second"], config))
    before = {name: model_of(registry, name) for name in ("first", "second")}
    broken.add("first")
    used = asyncio.run(registry.entered("second"))
    with pytest.raises(CheckpointError, match="first stays as it was: first is damaged"):
        registry.reload()
    assert model_of(registry, "first") is before["first"] and model_of(registry, "second") is not before["second"]
    assert used is before["second"] and used.worker.fault is None
    assert len(asyncio.run(written(used, asked(used, 1)))) == 30
    assert registry.num_open == 1
    registry.leave(used)
    registry.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model") / "m"
    save_model(place, tiny_network(), WithTemplate(), {})
    return place


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    place = tmp_path_factory.mktemp("tls")
    paths = place / "cert.pem", place / "key.pem"
    made = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", *made.split(), "-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(command, check=True, capture_output=True)
    return paths


def test_a_process_serves_with_tls_and_reads_its_model_anew(
    launcher: Launcher, model: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """In a live server process, a stream that is open during a reload finishes with the old model."""
    place, trusted = Path(shutil.copytree(model, tmp_path / "m")), ssl.create_default_context(cafile=str(pair[0]))
    options = ("--set", f"server.certificate={pair[0]}", "--set", f"server.private_key={pair[1]}")
    server = ServerProcess(launcher, [place], tmp_path / "log", *options, trusted=trusted)
    with httpx.Client(verify=trusted, timeout=60) as client:
        url, process, greedy = server.url, server.process, {**ASKED, "model": "m", "temperature": 0}

        def write(**more: Any) -> str:
            return str(client.post(f"{url}/v1/completions", json={**greedy, **more}).json()["choices"][0]["text"])

        try:
            # A client that opens a connection and sends no TLS affects nobody.
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as silent:
                silent.sendall(b"\x16\x03")
                old = write()
            with client.stream(
                "POST", f"{url}/v1/completions", json={**ASKED, "model": "m", "temperature": 0, "stream": True}
            ) as open_one:
                lines = open_one.iter_lines()
                pieces = [next(lines)]
                save_model(place, tiny_network(9), load_model(model).tokenizer, {}, replace=True)
                process.send_signal(signal.SIGHUP)
                wait_for(lambda: write(max_tokens=20, min_tokens=20) != old[:20])
                pieces += lines
            events = [json.loads(line[6:]) for line in pieces if line.startswith("data: {")]
            assert "".join(event["choices"][0]["text"] for event in events) == old
            (place / "model.safetensors").unlink()
            process.send_signal(signal.SIGHUP)
            wait_for(lambda: "stays as it was" in (tmp_path / "log").read_text())
            assert len(write(max_tokens=20, min_tokens=20)) == 20
            assert "Traceback" not in (tmp_path / "log").read_text()
        finally:
            assert server.close() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("certificate", "key", "problem"),
    [
        ("cert.pem", None, "TLS needs both"),
        (None, "key.pem", "TLS needs both"),
        ("missing.pem", "key.pem", "there is no file .*missing.pem"),
        ("garbage.pem", "key.pem", "cannot be used"),
        ("cert.pem", "other.pem", "cannot be used"),
        ("cert.pem", "locked.pem", "cannot be used"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused(
    model: Path, pair: tuple[Path, Path], tmp_path: Path, certificate: str | None, key: str | None, problem: str
) -> None:
    for path in pair:
        shutil.copy(path, tmp_path)
    (tmp_path / "garbage.pem").write_text("nothing\n")
    genkey = ["openssl", "genpkey", "-algorithm", "RSA", "-out"]
    subprocess.run([*genkey, str(tmp_path / "other.pem")], check=True, capture_output=True)
    lock = ["openssl", "pkey", "-aes256", "-passout", "pass:secret", "-in", str(tmp_path / "key.pem"), "-out"]
    subprocess.run([*lock, str(tmp_path / "locked.pem")], check=True, capture_output=True)
    given = {"certificate": certificate, "private_key": key}
    settings = [f"server.{name}={tmp_path / file}" for name, file in given.items() if file is not None]
    with pytest.raises(ConfigError, match=problem):
        config = load_config(overrides=[*settings, "server.port=0"])
        serve({"m": model}, config, dtype=None, console=None)  # type: ignore[arg-type]  # it says nothing before


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("for_page", "screen", "opens"), [(True, ":0", 1), (True, "", 0), (False, ":0", 0)])
def test_a_server_for_the_page_opens_it_and_logs_no_requests(
    model: Path, monkeypatch: pytest.MonkeyPatch, for_page: bool, screen: str, opens: int
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("sheepop.jobs.serve.Server.run", lambda server, sockets: sockets[0].close())
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", screen)
    access, said = logging.getLogger("sheepop.access"), Terminal()
    access.setLevel(logging.INFO)
    config = load_config(overrides=["server.port=0", "server.ui=true"])
    serve({"m": model}, config, dtype=None, console=Console(file=said), for_page=for_page)
    wait_for(lambda: len(opened) == opens)
    assert all(address in said.getvalue() for address in opened)
    assert access.isEnabledFor(logging.INFO) is not for_page
    access.setLevel(logging.NOTSET)


def test_a_wrong_certificate_is_a_short_error(model: Path) -> None:
    done = in_process("serve", model, "--set", "server.certificate=/nowhere/cert.pem")
    assert done.code == 2 and "TLS needs both" in done.err and "Traceback" not in done.err
