"""The settings of requests: what a request leaves out has the model's own setting, else that of OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from sheepop.checkpoint import save_model
from sheepop.serve.answers import chat_config, completion_config
from sheepop.serve.chat_request import ChatRequest
from sheepop.serve.config import ServerConfig
from sheepop.serve.protocol import ApiError, CompletionRequest
from sheepop.serve.stock import Stock
from sheepop.tokenizer import CharTokenizer

from .conftest import Live, model_of, tiny_network

QWEN = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields})


def test_what_a_request_leaves_out_is_the_models_own():
    config = chat_config(chat(), 50, QWEN)
    assert (config.temperature, config.top_k, config.top_p, config.max_new_tokens) == (0.6, 20, 0.95, 50)
    config = chat_config(chat(temperature=1.0, top_k=3, seed=4), 50, QWEN)
    assert (config.temperature, config.top_k, config.top_p, config.seed) == (1.0, 3, 0.95, 4)
    config = completion_config(CompletionRequest(model="m", prompt="a", temperature=0.0), QWEN)
    assert config.greedy and config.top_k is None


def test_a_model_without_settings_has_those_of_the_api():
    config = chat_config(chat(), 50, {})
    assert (config.temperature, config.top_k, config.top_p) == (1.0, None, 1.0)


def test_sampling_from_a_greedy_model_needs_a_temperature():
    assert chat_config(chat(), 50, {"temperature": 0.0}).greedy
    with pytest.raises(ApiError, match=r"top_p = 0\.5 needs sampling"):
        chat_config(chat(top_p=0.5), 50, {"temperature": 0.0})
    assert chat_config(chat(top_p=0.5, temperature=0.7), 50, {"temperature": 0.0}).top_p == 0.5


def test_a_served_model_knows_its_settings(tmp_path: Path):
    stated = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    save_model(tmp_path / "m", tiny_network(), CharTokenizer(), {}, generation=stated)
    config = ServerConfig()
    live = Live(config, stock=Stock({"m": tmp_path / "m"}, {}, config, "cpu"))
    try:
        assert model_of(live.registry, "m").generator.defaults == QWEN
        assert httpx.get(f"{live.url}/v1/models").json()["data"][0]["default_sampling_params"] == QWEN
    finally:
        live.close()
