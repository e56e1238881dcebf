"""Rounded inputs of products: who asks for them gets them, and nobody else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sheepop
from sheepop.adapt.quantization import quantize
from sheepop.checkpoint import save_model
from sheepop.core import native
from sheepop.core.errors import UsageError
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.arithmetic import computing, rounds_inputs
from sheepop.jobs.generate import Loader
from sheepop.model import Transformer
from sheepop.serve.config import ServerConfig
from sheepop.serve.served_model import ServedModel
from sheepop.tokenizer import CharTokenizer

from ..command_line import in_process

Build = Callable[..., Transformer]
PROMPTS = ["It was a dark", "and stormy"]
GREEDY = GenerationConfig(temperature=0, max_new_tokens=12, min_new_tokens=12)
ROUNDED = GREEDY.replace(activations="rounded")


@pytest.fixture(scope="module")
def model(toy_model: Build) -> Transformer:
    """A network with int4 weights, whose inputs the kernels of this processor can round."""
    found = quantize(toy_model(d_model=64, d_ff=128, max_seq_len=64), "int4")
    if not rounds_inputs(computing(found, activations="rounded")):
        pytest.skip("this processor has no faster kernels with rounded inputs")
    return found


@pytest.fixture(scope="module")
def saved(model: Transformer, characters: CharTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The network on disk."""
    directory = tmp_path_factory.mktemp("models") / "int4"
    save_model(directory, model, characters, {})
    return directory


def logprobs(network: Transformer, prompt: str, token_ids: list[int]) -> list[float]:
    """The log-probabilities of tokens after a prompt, from one pass of a network."""
    read = CharTokenizer().encode(prompt)
    with torch.inference_mode():
        rows = network(torch.tensor([[*read, *token_ids]]))[0].float().log_softmax(-1)
    return [float(rows[len(read) - 1 + place, token]) for place, token in enumerate(token_ids)]


def test_a_request_chooses_and_the_kept_engine_is_another(model: Transformer, characters: CharTokenizer) -> None:
    """Texts have the likelihoods of the network with rounded inputs, of the exact one, and of the first again."""
    generator, found = Generator(model, characters), []
    for config in (ROUNDED, GREEDY, ROUNDED, ROUNDED.replace(batch_invariant=True)):
        network = computing(model, activations=config.activations)
        assert rounds_inputs(network) == (config.activations == "rounded")
        completions = generator.generate(PROMPTS, config)
        found.append([completion.logprobs for completion in completions])
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert completion.logprobs == pytest.approx(logprobs(network, prompt, completion.token_ids), abs=2e-2)
    assert found[0] == found[2] != found[1]
    assert not rounds_inputs(model)


def test_scores_show_what_rounding_costs(model: Transformer, saved: Path) -> None:
    """From Python and from the command line; the scores of rounded inputs are not recorded with the model."""
    language_model, text = sheepop.load(saved, device="cpu"), " ".join(PROMPTS)
    scores = [language_model.score(text, activations=kind) for kind in ("exact", "rounded")]
    for kind, score in zip(("exact", "rounded"), scores, strict=True):
        done = in_process("score", saved, text, "--activations", kind, "--device", "cpu", "--json")
        assert json.loads(done.out)["loss"] == pytest.approx(score.loss, abs=1e-6)
        network = computing(model, activations=kind)
        assert score.logprobs == pytest.approx(logprobs(network, text[:1], score.token_ids), abs=2e-2)
    assert 0 < abs(scores[0].loss - scores[1].loss) < 0.1


def test_perplexity_of_rounded_inputs_is_not_recorded_with_the_model(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(PROMPTS * 3))
    options = ("--data", tmp_path / "text.txt", "--device", "cpu", "--no-compressors", "--quiet", "--json")
    before, found = (saved / "provenance.json").read_bytes(), []
    for kind in ("rounded", "exact"):
        done = in_process("eval", "perplexity", saved, *options, "--activations", kind, "-o", tmp_path / kind)
        assert done.code == 0, done.err
        assert ((saved / "provenance.json").read_bytes() == before) == (kind == "rounded")
        found.append(json.loads(done.out)["models"])
    assert found[0] != found[1]


def test_commands_pass_the_choice_on(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    generate = Generator.generate

    def watched(self: Generator, prompts: Any, config: Any = None, **options: Any) -> Any:
        seen.append(config.activations)
        return generate(self, prompts, config, **options)

    monkeypatch.setattr(Generator, "generate", watched)
    options = ("--max-new-tokens", "3", "--device", "cpu", "--quiet")
    for chosen in ((), ("--activations", "rounded")):
        assert in_process("generate", saved, "-p", "It", *options, *chosen).code == 0
    assert seen == ["exact", "rounded"]
    assert in_process("chat", "http://localhost:1", "--activations", "rounded").code == 2
    measured = in_process("bench", "generate", saved, "--seconds", "0.1", "--activations", "rounded", "--json")
    assert json.loads(measured.out)["activations"] == "rounded"


def test_a_server_computes_everything_as_it_is_told(saved: Path) -> None:
    for kind in ("exact", "rounded"):
        served = ServedModel("int4", Loader(device="cpu")(saved), ServerConfig(activations=kind))
        try:
            assert rounds_inputs(served.generator.model) == (kind == "rounded")
        finally:
            served.close()


def test_where_it_changes_nothing_a_warning_says_so(toy_model: Build, caplog: pytest.LogCaptureFixture) -> None:
    model = toy_model().double()
    native.say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "sheepop.native"):
        assert computing(model, activations="rounded") is model
    assert "activations = rounded has no effect here" in caplog.text


def test_a_split_model_cannot_round() -> None:
    with pytest.raises(UsageError, match="--activations and --tensor-parallel cannot be combined"):
        Loader(activations="rounded", tensor_parallel=2)
