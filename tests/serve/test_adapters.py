"""An adapter that is served with its base: a separate model over the same weights, also after a reload."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from sheepop.adapt.lora import adapted_layers, add_lora
from sheepop.adapt.lora_config import LoraConfig
from sheepop.checkpoint import load_model, save_model, with_adapters
from sheepop.checkpoint.changes import changes_of
from sheepop.checkpoint.model_form import AdaptedModel
from sheepop.core.files import atomic_directory
from sheepop.generate import GenerationConfig, Generator
from sheepop.serve.app import create_app
from sheepop.serve.config import ServerConfig
from sheepop.serve.registry import Registry
from sheepop.serve.server import Server
from sheepop.serve.stock import Stock
from sheepop.tokenizer import CharTokenizer

from .conftest import tiny_network

openai = pytest.importorskip("openai")


def test_base_and_adapter_answer_each_as_itself_over_the_same_weights(tmp_path: Path) -> None:
    model = tiny_network()
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    save_model(base, model, CharTokenizer(), {})
    add_lora(model, LoraConfig())
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            for weight in layer.changes.parameters():
                weight += 0.3 * torch.randn(weight.shape, generator=draws)
    with atomic_directory(tuned) as directory:
        AdaptedModel(base, model, LoraConfig()).write(directory, changes_of(model), CharTokenizer(), {})
    plain = load_model(base)
    config = GenerationConfig(max_new_tokens=16, temperature=0.0)
    expected = [
        Generator(found.model, found.tokenizer).generate(["Once"], config)[0].text
        for found in (plain, with_adapters(plain, [tuned]))
    ]
    assert expected[0] != expected[1]
    server_config = ServerConfig(max_running=2, max_waiting=4)
    stock = Stock({"base": base}, {"tuned": tuned}, server_config, "cpu")
    registry = Registry(stock)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(create_app(registry, server_config), registry, server_config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        with openai.OpenAI(base_url=url, api_key="nobody", max_retries=0) as client:
            for _ in range(2):
                assert [found.id for found in client.models.list()] == ["base", "tuned"]
                one, other = (registry.model(name).generator.model for name in ("base", "tuned"))
                theirs = {name: weight.data_ptr() for name, weight in other.named_parameters()}
                assert all(theirs[name] == weight.data_ptr() for name, weight in one.named_parameters())
                texts = [
                    client.completions.create(model=name, prompt="Once", max_tokens=16, temperature=0).choices[0].text
                    for name in ("base", "tuned")
                ]
                assert texts == expected
                registry.reload()
    finally:
        server.should_exit = True
        thread.join()
