"""A server whose model is split over two processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from sheepop.checkpoint import save_model
from sheepop.generate import GenerationConfig, Generator
from sheepop.tokenizer import CharTokenizer

from ..command_line import Launcher
from .conftest import ServerProcess, tiny_network

openai = pytest.importorskip("openai")


def test_a_model_in_two_processes_answers_as_one_in_one_does(launcher: Launcher, tmp_path: Path) -> None:
    model, place = tiny_network(), tmp_path / "tiny"
    save_model(place, model, CharTokenizer(), {})
    config = GenerationConfig(max_new_tokens=12, temperature=0.0)
    expected = Generator(model, CharTokenizer()).generate(["Once", "Twice"], config)
    options = ("--device", "cpu", "--dtype", "float32", "--tensor-parallel", "2")
    server = ServerProcess(launcher, [place], tmp_path / "log", *options)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        answer = client.completions.create(model="tiny", prompt=["Once", "Twice"], max_tokens=12, temperature=0)
        assert [choice.text for choice in answer.choices] == [completion.text for completion in expected]
        vector = client.embeddings.create(model="tiny", input="Once", encoding_format="float").data[0].embedding
        hidden_TD = model.hidden_states(torch.tensor([CharTokenizer().encode("Once")]))[0]
        mean = torch.nn.functional.normalize(hidden_TD.mean(0), dim=0)
        torch.testing.assert_close(torch.tensor(vector), mean.detach(), rtol=1e-4, atol=1e-5)
        scored = client.completions.create(model="tiny", prompt="Once", max_tokens=0, echo=True, logprobs=1, timeout=20)
        ids = torch.tensor([CharTokenizer().encode("Once")])
        logprobs = model(ids)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].detach()
        found = torch.tensor(scored.choices[0].logprobs.token_logprobs[1:])
        torch.testing.assert_close(found, logprobs, rtol=1e-4, atol=1e-4)
    finally:
        assert server.close() == 128 + signal.SIGTERM, server.log.read_text()
