"""A live server on loopback, with a tiny network that writes letters."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from sheepop.serve.stock import Description, Source, Stock
from sheepop.tokenizer import CharTokenizer

from ..command_line import COMMAND, Launcher, free_port

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
    cache_bytes = None if config.cache_memory is None else int(config.cache_memory * 2**30)
    loaded = LoadedModel(model, tokenizer, model.config, {}, Path(), ())
    return ServedModel(name, loaded, config, cache_bytes=cache_bytes)


class Shelf(Stock):
    """Models that `load` makes; known of them are the bytes of their weights, and which have a chat template."""

    def __init__(
        self,
        load: Callable[[str], ServedModel],
        names: Sequence[str],
        config: ServerConfig,
        *,
        sizes: Mapping[str, int] | None = None,
        chats: Collection[str] = ("chat",),
    ) -> None:
        super().__init__({name: Path(name) for name in names}, {}, config)
        self._load, self._sizes, self._chats = load, dict(sizes or {}), chats
        self._made: dict[str, ServedModel] = {}

    def describe(self, source: Source, base: Description | None = None) -> Description:
        if base is not None:
            return super().describe(source, base)
        name, longest = source.path.name, self.config.max_model_len or 256
        return Description(self._sizes.get(name, 0), 0, longest, chats=name in self._chats, encodes=name == "pairs")

    def read(self, source: Source, base: ServedModel | None) -> LoadedModel:
        if base is not None:
            return super().read(source, base)
        made = self._made[source.path.name] = self._load(source.path.name)
        return made.loaded

    def serve(self, name: str, loaded: Any, base: ServedModel | None, cache_bytes: int) -> ServedModel:
        return self._made.pop(name) if base is None else super().serve(name, loaded, base, cache_bytes)


class Live:
    """A server that runs in a thread of this process."""

    def __init__(
        self,
        config: ServerConfig,
        runs: Mapping[str, Path] | None = None,
        models: Sequence[str] = ("chat", "plain"),
        prompts: Sequence[str] = (),
        stock: Stock | None = None,
        load: Callable[[str], ServedModel] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        def load_tiny(name: str) -> ServedModel:
            return tiny(name, WithTemplate() if name == "chat" else CharTokenizer(), config)

        self.registry = Registry(stock or Shelf(load or load_tiny, models, config), clock=clock)
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


def model_of(registry: Registry, name: str) -> ServedModel:
    """The model of this name, loaded if it is not."""
    model = asyncio.run(registry.entered(name))
    registry.leave(model)
    return model


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
        launcher: Launcher,
        models: Sequence[Path | str],
        log: Path,
        *options: str,
        trusted: ssl.SSLContext | None = None,
        seconds: float = 60,
    ) -> None:
        httpx = pytest.importorskip("httpx")
        port = free_port()
        self.url, self.log = f"{'https' if trusted else 'http'}://127.0.0.1:{port}", log
        logging = f"import os; os.dup2(os.open({str(log)!r}, os.O_WRONLY | os.O_CREAT), 2)"
        self.process = launcher.start("serve", *models, "--port", port, *options, program=f"{logging}; {COMMAND}")
        with httpx.Client(verify=trusted or False) as client:

            def is_ready() -> bool:
                try:
                    found: bool = client.get(f"{self.url}/ready").status_code == 200
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
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30).code


@pytest.fixture(scope="package")
def live() -> Iterator[Live]:
    server = Live(ServerConfig(max_running=4, max_waiting=8, max_body_bytes=100_000, client_seconds=3.0))
    yield server
    server.close()
