"""Text from several processes, each with a part of the model, against text from one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.adapt.quantization import quantize
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.checkpoint import load_model
from sheepop.checkpoint.model_directory import save_model
from sheepop.core.errors import ConfigError, RanksError, UsageError
from sheepop.evaluate.likelihood import LikelihoodScorer
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.engine import Engine
from sheepop.generate.runner import PagedRunner
from sheepop.generate.split_model import Followers
from sheepop.model import Transformer
from sheepop.tokenizer import CharTokenizer

ToyModel = Callable[..., Transformer]
PROMPTS = ["The sheep", "a", "Over the fence it jumps and", "x y z"]
KINDS: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_kv_heads": 2, "position_encoding": "rope", "norm": "rmsnorm", "activation": "swiglu"},
    "all at once": {
        "position_encoding": "alibi",
        "bias": True,
        "qk_norm": "head",
        "attention_sinks": True,
        "short_convolution": 3,
        "ngrams": {"rows": 64},
        "sliding_window": 8,
        "sliding_layers": [0],
        "tie_weights": True,
        "head_bias": True,
        "vocab_size": 131,
    },
    "latents": {
        "position_encoding": "rope",
        "latent_attention": {"kv_rank": 6, "q_rank": 10, "rope_head_dim": 4},
        "value_head_dim": 6,
        "vocab_size": 131,
        "attention_sinks": True,
        "experts": {"count": 6, "groups": 3, "groups_per_token": 2, "scale": 2.0, "scores": "sigmoid"},
    },
    "experts": {
        "experts": {"count": 4, "per_token": 2, "shared": 1, "layers": [1]},
        "bias": True,
        "qk_norm": "own_head",
    },
}


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    found = Followers(2, "cpu")
    yield found
    found.close()


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_write_what_one_writes(
    kind: str,
    followers: Followers,
    toy_model: ToyModel,
    characters: CharTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_model(tmp_path / "model", toy_model(**KINDS[kind]), characters, {})
    generators = [
        Generator(loaded.model, characters)
        for loaded in (
            load_model(tmp_path / "model", "cpu", torch.float64),
            followers.load(tmp_path / "model", torch.float64),
        )
    ]
    settings = [
        {"temperature": 0.0},
        {"seed": 3, "num_completions": 2, "top_p": 0.9},
        {"temperature": 0.0, "guesses": 3},
        {"seed": 5, "cache_dtype": "int8"},
        {"num_beams": 3, "temperature": 0.0},
    ]
    for each in settings:
        config = GenerationConfig(max_new_tokens=24, **each)
        alone, split = (
            [(completion.text, completion.token_ids) for completion in generator.generate(PROMPTS, config)]
            for generator in generators
        )
        assert split == alone, each
        assert len({text for text, _ in alone}) > 1
    # The followers too get the tokens of the last step from the device.
    config = GenerationConfig(max_new_tokens=24, seed=3, top_p=0.9)
    expected = generators[0].generate(PROMPTS, config)
    monkeypatch.setattr(Engine, "build", partial(Engine.build, steps_ahead=1))
    generators[1].close()
    assert [each.token_ids for each in generators[1].generate(PROMPTS, config)] == [each.token_ids for each in expected]
    with pytest.raises(UsageError, match="batch_invariant does not work with a model that is split"):
        generators[1].generate(PROMPTS, GenerationConfig(batch_invariant=True))


def test_all_processes_prepare_passes_together(
    followers: Followers,
    toy_model: ToyModel,
    characters: CharTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A captured pass exchanges sums, so it needs every process; those that took part go on with other passes."""
    save_model(tmp_path / "model", toy_model(), characters, {})
    generator, kinds = Generator(followers.load(tmp_path / "model", torch.float64).model, characters), list[str]()
    send = Followers.together

    def noted(self: Followers, kind: Any, *about: Any) -> Any:
        kinds.append(kind.name)
        return send(self, kind, *about)

    monkeypatch.setattr(Followers, "together", noted)
    engine = generator.serving_engine(max_sequences=2, max_waiting=2)
    engine.prepare()
    request = generator.request("ab", GenerationConfig(max_new_tokens=6, min_new_tokens=6, temperature=0.0))
    engine.add(request)
    with torch.inference_mode():
        while not engine.is_idle:
            engine.step()
    assert kinds == ["PREPARE", "CAPTURE", *["READ"] * 6]
    expected = Generator(load_model(tmp_path / "model", "cpu", torch.float64).model, characters).generate(
        ["ab"], request.config
    )
    assert request.completions()[0].token_ids == expected[0].token_ids


@pytest.mark.parametrize("tied", [False, True])
def test_two_processes_write_from_integers_what_one_writes(
    tied: bool, followers: Followers, toy_model: ToyModel, characters: CharTokenizer, tmp_path: Path
) -> None:
    model = toy_model(vocab_size=131, tie_weights=tied, head_bias=True)
    save_model(tmp_path / "model", quantize(model, "int8"), characters, {})
    alone, split = load_model(tmp_path / "model", "cpu", None), followers.load(tmp_path / "model", None)
    assert isinstance(split.model.lm_head.weight, StoredWeight)
    assert split.model.lm_head.weight.shape == (66, 32)
    config = GenerationConfig(max_new_tokens=24, temperature=0.0)
    found, expected = (
        [completion.token_ids for completion in Generator(each.model, characters).generate(PROMPTS, config)]
        for each in (split, alone)
    )
    assert found == expected


def test_two_processes_find_the_likelihoods_that_one_finds(
    followers: Followers, toy_model: ToyModel, characters: CharTokenizer, tmp_path: Path
) -> None:
    save_model(tmp_path / "model", toy_model(**KINDS["all at once"]), characters, {})
    alone = load_model(tmp_path / "model", "cpu", torch.float64)
    split = followers.load(tmp_path / "model", torch.float64)
    texts = [(characters.encode(text[:cut]), characters.encode(text[cut:])) for text in PROMPTS for cut in (1, 3, 5)]
    texts = [(context, continuation) for context, continuation in texts if context and continuation]
    found, expected = (
        LikelihoodScorer(Generator(loaded.model, characters), tokens_per_pass=20).score(texts)
        for loaded in (split, alone)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-6)
        assert ours.is_likeliest == theirs.is_likeliest


def test_a_model_that_cannot_be_split_is_refused_and_the_next_one_is_read(
    followers: Followers, toy_model: ToyModel, characters: CharTokenizer, tmp_path: Path
) -> None:
    save_model(tmp_path / "odd", toy_model(num_kv_heads=1), characters, {})
    with pytest.raises(ConfigError, match=r"2 does not divide model\.num_kv_heads = 1"):
        followers.load(tmp_path / "odd", None)
    save_model(tmp_path / "even", toy_model(), characters, {})
    loaded = followers.load(tmp_path / "even", None)
    with pytest.raises(UsageError, match="already"):
        Followers(2, "cpu")
    assert Generator(loaded.model, characters).generate(["a"], GenerationConfig(max_new_tokens=4))[0].text


def test_a_process_that_is_lost_is_named(
    followers: Followers, toy_model: ToyModel, characters: CharTokenizer, tmp_path: Path
) -> None:
    save_model(tmp_path / "model", toy_model(), characters, {})
    generator = Generator(followers.load(tmp_path / "model", None).model, characters)
    os.kill(followers.processes[0].pid, signal.SIGKILL)
    followers.processes[0].wait()
    with pytest.raises(RanksError, match="A process with a part of the model was lost"):
        generator.generate(["a"], GenerationConfig(max_new_tokens=4))


def test_a_pass_that_fails_in_the_leading_process_ends_the_followers(
    followers: Followers,
    toy_model: ToyModel,
    characters: CharTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followers.close()
    save_model(tmp_path / "model", toy_model(), characters, {})
    others = Followers(2, "cpu")
    generator = Generator(others.load(tmp_path / "model", None).model, characters)

    def failing(*_: object) -> torch.Tensor:
        raise MemoryError("no room for the scores")

    with monkeypatch.context() as patch, pytest.raises(RanksError, match="MemoryError: no room for the scores"):
        patch.setattr(PagedRunner, "read", failing)
        generator.generate(["a"], GenerationConfig(max_new_tokens=4))
    assert all(process.poll() is not None for process in others.processes)
    with pytest.raises(RanksError, match="have ended"):
        generator.generate(["a"], GenerationConfig(max_new_tokens=4))
