"""A live server on loopback, with a tiny network that writes letters."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from sheepop.checkpoint import LoadedModel
from sheepop.jobs.serve import WatchedRuns
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.serve.app import create_app
from sheepop.serve.config import ServerConfig
from sheepop.serve.registry import Registry
from sheepop.serve.served_model import ServedModel
from sheepop.serve.server import Server
from sheepop.tokenizer import CharTokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}{% for d in documents or () %}<{{ d.text }}>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {{ mood }}{% endif %}"
)


class WithTemplate(CharTokenizer):
    """A character tokenizer with a chat template."""

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "chat_template": TEMPLATE}


# The special settings of some networks, by name.
KINDS: dict[str, dict[str, Any]] = {
    "pairs": {"architecture": "encoder_decoder", "num_encoder_layers": 1},
    "experts": {"experts": {"count": 4, "per_token": 2}},
}


def tiny_network(seed: int = 4, **more: Any) -> Transformer:
    sizes = {"vocab_size": 128, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 256, "dropout": 0.0}
    model = build_model(ModelConfig(**sizes, position_encoding="rope", tie_weights=False, **more), seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, 0.3, generator=generator)
    return model


def tiny(name: str, tokenizer: CharTokenizer, config: ServerConfig, seed: int = 4) -> ServedModel:
    model = tiny_network(seed, **KINDS.get(name, {}))
    return ServedModel(name, LoadedModel(model, tokenizer, model.config, {}, Path(), ()), config)


class Live:
    """A server that runs in a thread of this process."""

    def __init__(
        self,
        config: ServerConfig,
        runs: Mapping[str, Path] | None = None,
        models: Sequence[str] = ("chat", "plain"),
        prompts: Sequence[str] = (),
        load: Callable[[str], ServedModel] | None = None,
    ) -> None:
        def load_tiny(name: str) -> ServedModel:
            return tiny(name, WithTemplate() if name == "chat" else CharTokenizer(), config)

        self.registry = Registry(load or load_tiny, models)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app(self.registry, config, runs=WatchedRuns(runs or {}), prompts=prompts)
        self.server = Server(app, self.registry, config)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


class ServerProcess:
    """``sheepop serve`` as a separate process; `trusted` is the certificate to verify it with.

    It is to be ready after so many `seconds`.
    """

    def __init__(
        self,
        models: Sequence[Path | str],
        log: Path,
        *options: str,
        trusted: ssl.SSLContext | None = None,
        seconds: float = 60,
    ) -> None:
        httpx = pytest.importorskip("httpx")
        port = free_port()
        self.url, self.log = f"{'https' if trusted else 'http'}://127.0.0.1:{port}", log
        command = [sys.executable, "-m", "sheepop", "serve", *map(str, models), "--port", str(port), *options]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file)

        def is_ready() -> bool:
            try:
                found: bool = httpx.get(f"{self.url}/ready", verify=trusted or True).status_code == 200
            except httpx.TransportError:
                assert self.process.poll() is None, log.read_text()
                return False
            return found

        try:
            wait_for(is_ready, seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> int:
        """Tells the process to stop; returns its exit code."""
        self.process.terminate()
        return self.process.wait(30)


@pytest.fixture(scope="package")
def live() -> Iterator[Live]:
    server = Live(ServerConfig(max_running=4, max_waiting=8, max_body_bytes=100_000, client_seconds=1.5))
    yield server
    server.close()
