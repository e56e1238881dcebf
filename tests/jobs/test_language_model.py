"""The Python API as a program uses it: names, settings, and what a wrong one says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import sheepop
from sheepop.checkpoint import load_model, save_model
from sheepop.core.errors import ConfigError, TokenizerError, UsageError
from sheepop.generate import GenerationConfig, Generator
from sheepop.jobs.config import load_config
from sheepop.model import build_model
from sheepop.tokenizer import CharTokenizer
from sheepop.train import TrainingConfig

from ..running import train


@pytest.fixture(scope="module")
def run(tiny: tuple[str, ...], text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    places = {"data": {"paths": [str(text_folder)]}, "output_dir": str(tmp_path_factory.mktemp("lm") / "run")}
    return train(load_config(None, [*tiny, "training.max_steps=2"], options={**places, "device": "cpu"})).run


@pytest.fixture(scope="module")
def lm(run: Path) -> sheepop.LanguageModel:
    return sheepop.load(run, device="cpu")


def test_public_names_are_listed_and_nothing_else() -> None:
    functions = ["analyze", "best_of", "load", "load_tokenizer", "plan", "register", "train", "tune"]
    assert dir(sheepop) == ["LanguageModel", "__version__", *functions]


def test_a_loaded_model_needs_no_gradients(lm: sheepop.LanguageModel) -> None:
    assert not any(parameter.requires_grad for parameter in lm.model.parameters())


def test_a_tokenizer_has_a_length_and_can_be_called(lm: sheepop.LanguageModel) -> None:
    assert len(lm.tokenizer) == lm.tokenizer.vocab_size == lm.config.vocab_size
    assert lm.tokenizer("Sheep") == lm.tokenizer.encode("Sheep")


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"greedy": True, "max_new_tokens": 9}, {"temperature": 0.0, "max_new_tokens": 9}),
        ({"beams": 2, "max_new_tokens": 9}, {"num_beams": 2, "temperature": 0.0, "max_new_tokens": 9}),
        ({"window": True, "max_new_tokens": 40, "seed": 3}, {"on_overflow": "window", "max_new_tokens": 40, "seed": 3}),
        ({"seed": 3}, {"on_overflow": "slide", "seed": 3}),
        ({"stop": "e", "seed": 1}, {"stop": ("e",), "on_overflow": "slide", "seed": 1}),
    ],
)
def test_settings_have_the_names_of_the_command_line(run: Path, lm: sheepop.LanguageModel, asked, meant) -> None:
    loaded = load_model(run, "cpu")
    (expected,) = Generator(loaded.model, loaded.tokenizer).generate(["Sheep"], GenerationConfig(**meant))
    assert lm.generate("Sheep", **asked).text == expected.text


def test_a_text_of_no_given_length_does_not_end_where_the_context_does(lm: sheepop.LanguageModel) -> None:
    written = lm.generate("Sheep", seed=0)
    assert len(written.token_ids) == GenerationConfig().max_new_tokens > lm.config.max_seq_len
    assert written.num_dropped_prompt_tokens == 0
    with pytest.raises(UsageError, match="has room for"):
        lm.generate("Sheep " * 20, seed=0)


def test_what_is_wrong_is_said_in_our_words(lm: sheepop.LanguageModel) -> None:
    with pytest.raises(
        UsageError, match=r"There is no setting num_beams\. The settings are: max_new_tokens, min_new_tokens"
    ):
        lm.generate("Sheep", num_beams=2)
    with pytest.raises(ConfigError, match=r"^temperature = -1: "):
        lm.generate("Sheep", temperature=-1)
    with pytest.raises(ConfigError, match=r"^learning_rate = -1.0: ") as refusal:
        TrainingConfig(learning_rate=-1.0)
    assert isinstance(refusal.value, ValueError)
    with pytest.raises(ConfigError, match=r"layers\.0\.learning_rate = -1"):
        TrainingConfig(layers=[{"pattern": "*", "learning_rate": -1}])


def test_a_stream_has_the_text_of_generate(lm: sheepop.LanguageModel) -> None:
    stream = lm.stream("Sheep", seed=5, max_new_tokens=12)
    with pytest.raises(UsageError, match="still being written"):
        _ = stream.completion
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == stream.completion.text
    assert stream.completion == lm.generate("Sheep", seed=5, max_new_tokens=12)


def test_a_text_is_scored_token_by_token(lm: sheepop.LanguageModel) -> None:
    score = lm.score("Sheep eat")
    whole = lm.model(torch.tensor([lm.tokenizer.encode("Sheep eat")])).log_softmax(-1)[0]
    expected = [float(whole[place, token]) for place, token in enumerate(score.token_ids)]
    assert score.logprobs == pytest.approx(expected, abs=1e-5)
    assert "".join(score.pieces) == "heep eat"
    assert score.bits_per_byte == pytest.approx(-sum(expected) / math.log(2) / 8)


def test_a_conversation_needs_a_template(lm: sheepop.LanguageModel) -> None:
    with pytest.raises(TokenizerError, match="has no chat template"):
        lm.chat([{"role": "user", "content": "Hello"}])


def test_several_texts_come_from_a_batch(lm: sheepop.LanguageModel) -> None:
    with pytest.raises(UsageError, match=r"num_completions = 2\. lm\.generate_batch"):
        lm.generate("Sheep", num_completions=2)
    several = lm.generate_batch(["Sheep"], num_completions=3, seed=5, max_new_tokens=6)
    best = lm.generate("Sheep", best_of=3, seed=5, max_new_tokens=6)
    assert best == max(several, key=lambda text: sum(text.logprobs) / len(text.logprobs))


def test_a_draft_model_reads_what_the_model_reads(lm: sheepop.LanguageModel, run: Path, tmp_path: Path) -> None:
    with_draft = sheepop.load(run, device="cpu", draft_model=run)
    settings = {"seed": 5, "max_new_tokens": 12}
    assert with_draft.generate("Sheep", guesses=3, **settings).text == lm.generate("Sheep", **settings).text
    save_model(tmp_path / "shorter", build_model(lm.config.replace(max_seq_len=16), 0), lm.tokenizer, {})
    with pytest.raises(UsageError, match="has max_seq_len = 16, the model 32"):
        sheepop.load(run, device="cpu", draft_model=tmp_path / "shorter")
    save_model(tmp_path / "letters", build_model(lm.config.replace(vocab_size=129), 0), CharTokenizer("ä"), {})
    with pytest.raises(UsageError, match="has another tokenizer"):
        sheepop.load(run, device="cpu", draft_model=tmp_path / "letters")
