"""Residual streams and attention weights of a trace are those that transformers gives for the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sheepop.checkpoint import load_model
from sheepop.interpret.trace import Trace
from sheepop.jobs.exchange import import_model
from sheepop.tokenizer import CharTokenizer

from .conftest import build

pytest.importorskip("transformers")


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama3", "mistral", "qwen3", "pythia"])
def test_hidden_states_and_attentions_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = build(family)
    theirs.save_pretrained(tmp_path / "theirs")
    CharTokenizer().save(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    ids = [7, 90, 31, 7, 88, 12, 100, 5, 7, 90]
    trace = Trace.of(load_model(tmp_path / "ours").model, CharTokenizer(), ids)
    theirs.eval().set_attn_implementation("eager")
    found = theirs(torch.tensor([ids]), output_hidden_states=True, output_attentions=True)
    assert len(found.hidden_states) == trace.num_layers + 1
    for layer, states in enumerate(found.hidden_states[:-1]):
        torch.testing.assert_close(trace.residuals[layer], states[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(trace.final, found.hidden_states[-1][0], atol=2e-5, rtol=1e-4)
    for layer, weights in enumerate(found.attentions):
        torch.testing.assert_close(trace[f"blocks.{layer}.attention.weights"], weights[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(trace["logits"], found.logits[0], atol=1e-4, rtol=1e-4)
