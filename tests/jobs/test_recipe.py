"""What the recipe chooses for the settings that are left open, and that it keeps those that are given."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import save_model
from sheepop.core.config import leaves
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.jobs import recipe
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.config_help import all_settings, render
from sheepop.jobs.recipe import EXPORTABLE, SIZES, Completed, choose_size, choose_tokenizer, complete, draft
from sheepop.model import ModelConfig, build_model
from sheepop.model.presets import PRESETS
from sheepop.model.sections import NgramConfig
from sheepop.tokenizer import CharTokenizer
from sheepop.train import TrainingConfig

Completer = Callable[..., Completed]
MINUTES = TrainingConfig(max_minutes=5)


@pytest.fixture
def completed(tmp_path: Path) -> Completer:
    """``completed(tree)`` on a machine of 50 GFLOP/s, with 100 kB of text unless the tree names other text."""
    file = tmp_path / "text.txt"
    file.write_text("sheep and wool\n" * 7000)

    def complete_on(given: Mapping[str, Any], **options: Any) -> Completed:
        return complete(
            draft({"data": {"paths": [str(file)]}, **given}, **options), lambda device: 50e9, Console.silent()
        )

    return complete_on


def test_a_model_that_only_runs_here_is_told_beforehand_unless_an_exportable_one_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("sheep and wool\n" * 7000)
    texts = []
    for model in ({}, EXPORTABLE):
        said = io.StringIO()
        given = {"data": {"paths": [str(file)]}, "model": dict(model)}
        found = complete(draft(given), lambda device: 0.4e9, Console(file=said)).config
        assert (found.model.own_parts == {}) == bool(model)
        texts.append(said.getvalue())
    line = (
        "Only SheepOp runs this model, for its n-gram embeddings and short convolutions: --exportable chooses one that"
    )
    assert [text.count(line) for text in texts] == [1, 0]
    assert "the 0.4 GFLOP/s that are free on this machine" in texts[0]


def test_more_arithmetic_and_more_minutes_give_larger_models() -> None:
    sizes = [choose_size(speed, MINUTES, 10**12) for speed in (1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e16)]
    assert [size.flops for size in sizes] == sorted(size.flops for size in sizes)
    assert sizes[0] == SIZES[0]
    assert sizes[-1] == SIZES[-1]
    assert choose_size(1e11, TrainingConfig(max_minutes=50), 10**12) == choose_size(1e12, MINUTES, 10**12)


def test_four_layers_begin_where_they_are_better_than_two() -> None:
    """By bench/results/minutes.md: worse after 1.6e13 operations in the loop, better after 3.5e13."""
    layers = {
        operations: choose_size(operations / 300, MINUTES, 10**12).num_layers
        for operations in (1e13, 1.6e13 / 0.85, 3.5e13 / 0.85)
    }
    assert MINUTES.max_minutes == 5
    assert list(layers.values()) == [2, 2, 4]


def test_sizes_that_were_measured_are_kept() -> None:
    rows = [(size.flops, size.d_model, size.num_layers, size.learning_rate) for size in SIZES if size.flops <= 1e14]
    assert rows == [
        (0.0, 64, 2, 2.0e-2), (1e12, 96, 2, 1.6e-2), (3e12, 128, 2, 1.6e-2), (3e13, 128, 4, 1.4e-2),
        (1e14, 192, 4, 1.2e-2),
    ]  # fmt: skip


def test_larger_sizes_grow_from_the_largest_measured_one_as_the_law_says() -> None:
    """The exponent is beta / (alpha + beta) of Besiroglu et al. 2024: 0.3658 / 0.7136.

    Neighbouring shapes differ by up to 1.73 times, so the nearest one is off by up to the root of that.
    """
    measured, *larger = (size for size in SIZES if size.flops >= 1e14)
    assert len(larger) == 13
    for size in larger:
        expected = (192 * 2048 + 12 * 4 * 192**2) * (size.flops / measured.flops) ** (0.3658 / 0.7136)
        assert size.weights + size.d_model * size.vocab_size == pytest.approx(expected, rel=0.32)
    rates = [size.learning_rate for size in (measured, *larger)]
    assert rates == sorted(rates, reverse=True)


def test_little_text_gets_a_small_model() -> None:
    assert choose_size(1e14, MINUTES, 0) == SIZES[0]
    for num_bytes in (10**5, 10**6, 10**7, 10**8):
        size = choose_size(1e14, MINUTES, num_bytes)
        assert size == SIZES[0] or size.weights <= num_bytes


def test_few_steps_tokens_or_epochs_give_a_small_model_and_no_minutes_mean_an_hour_at_most() -> None:
    for few in (TrainingConfig(max_steps=10), TrainingConfig(max_tokens=20_000), TrainingConfig(max_epochs=1e-9)):
        assert choose_size(1e14, few, 10**12) == SIZES[0]
    many = TrainingConfig(max_steps=10**9)
    assert choose_size(1e11, many, 10**12) == choose_size(1e11, TrainingConfig(max_minutes=60), 10**12)
    # 6 operations a weight and token: what a size costs is what it must be worth.
    for steps in (100, 1000, 10_000):
        size = choose_size(1e14, TrainingConfig(max_steps=steps), 10**12)
        weights = 12 * size.num_layers * size.d_model**2 + size.vocab_size * size.d_model
        assert size == SIZES[0] or size.flops <= 6 * weights * steps * size.batch_size * size.max_seq_len


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, {"algorithm": "char"}),
        (100_000, {"vocab_size": 512}),
        (900_000, {"vocab_size": 2048}),
        (10**8, {"vocab_size": 4096}),
    ],
)
def test_the_vocabulary_fits_the_text(num_bytes: int, expected: dict[str, object]) -> None:
    size = next(size for size in SIZES if size.vocab_size == 4096)
    assert choose_tokenizer(size, num_bytes) == expected


@pytest.mark.parametrize(("num_bytes", "rows"), [(0, 1024), (100_000, 2048), (1_000_000, 16_384), (10**9, 65_536)])
def test_tables_of_ngrams_fit_the_text(num_bytes: int, rows: int, completed: Completer) -> None:
    assert recipe._ngram_rows(num_bytes) == rows
    given = {"model": {"ngrams": {"orders": [2], "rows": 5}}}
    assert completed(given).config.model.ngrams == NgramConfig(orders=(2,), rows=5)
    assert completed({"model": {"ngrams": None}}).config.model.ngrams is None


def test_text_that_is_read_again_and_again_gets_no_tables_of_ngrams(completed: Completer) -> None:
    def tables(**budget: float) -> NgramConfig | None:
        return completed({"training": budget}).config.model.ngrams

    assert tables(max_epochs=1) is not None
    assert tables(max_epochs=4) is None
    # 105 kB of text are 35,000 tokens for the recipe. The smallest model spends 6 * (98,304 + 65,536) operations
    # on one, so that 50 GFLOP/s read the text in 0.69 seconds.
    assert tables(max_minutes=3.4 * 0.69 / 60) is not None
    assert tables(max_minutes=3.6 * 0.69 / 60) is None
    assert tables(max_minutes=5) is None


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.d_model}x{size.num_layers}")
def test_every_size_is_a_valid_configuration(
    size: recipe.Size, completed: Completer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "choose_size", lambda *given: size)
    config = completed({"training": {"max_minutes": 5}}).config
    assert (config.model.d_model, config.model.num_layers, config.model.max_seq_len) == (
        size.d_model,
        size.num_layers,
        size.max_seq_len,
    )
    assert (config.training.max_minutes, config.training.learning_rate) == (5, size.learning_rate)
    assert config.model.head_size % 2 == 0


GIVEN: list[dict[str, Any]] = [
    {"model": {"d_model": 48}},
    {"model": {"d_model": 36, "num_layers": 5}},
    {"model": {"num_heads": 3}},
    {"model": {"architecture": "encoder_decoder"}},
    {"model": {"norm": "layernorm", "norm_bias": True, "bias": True, "dropout": 0.2}},
    {"model": {"position_encoding": "learned", "max_seq_len": 40}},
    {"tokenizer": {"algorithm": "char"}},
    {"tokenizer": {"algorithm": "wordpiece", "vocab_size": 300}},
    {"model": {"vocab_size": 400}},
    {"training": {"optimizer": "adamw", "betas": [0.8, 0.9]}},
    {"training": {"optimizer": "schedule_free_adamw", "schedule": "constant"}},
    {"training": {"learning_rate": 1e-5, "max_epochs": 2}},
    {"training": {"min_learning_rate": 0.5}},
    {"training": {"micro_batch_size": 6}},
    {"model": {"preset": "gpt2"}, "training": {"precision": "fp32"}},
    {"model": {"preset": "llama-1m", "num_layers": 2}},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_keys_that_are_given_are_kept_and_fit_those_that_are_chosen(
    given: dict[str, Any], completed: Completer
) -> None:
    found = completed(given)
    config = dict(leaves(found.config.model_dump(mode="json")))
    asked = dict(leaves(given))
    assert {key: config[key] for key in asked} == asked
    assert not asked.keys() & found.chosen.keys()
    assert {key: config[key] for key in found.chosen} == found.chosen


@pytest.fixture
def long_text(tmp_path: Path) -> dict[str, Any]:
    """The settings of 2.1 MB of text."""
    (tmp_path / "long.txt").write_text("sheep and wool\n" * 140_000)
    return {"paths": [str(tmp_path / "long.txt")]}


def test_a_model_with_a_memory_reads_more_of_a_long_text_than_it_attends_to(
    completed: Completer, long_text: dict[str, Any]
) -> None:
    def rows(**given: Any) -> tuple[Any, ...]:
        found = completed({"data": long_text, "training": {"max_minutes": 5}, **given}).config
        training = found.training
        of_model = (found.model.max_seq_len, found.model.sliding_window)
        return (*of_model, found.data.max_length, training.eval_length, training.eval_stride)

    assert rows() == (1024, 128, 128, 1024, None)
    # A short text, given rows and a model that other programs run have whole rows that overlap.
    whole = (128, None, None, None, 64)
    assert rows(data={"paths": [long_text["paths"][0].replace("long", "text")]}) == whole
    assert rows(model=recipe.EXPORTABLE) == whole
    assert rows(model={"max_seq_len": 40}) == (40, None, None, None, 20)
    assert rows(data={**long_text, "max_length": 40}) == (40, None, 40, None, 20)
    assert rows(training={"max_minutes": 5, "eval_stride": 7}) == (128, None, None, None, 7)


def test_all_keys_that_are_chosen_are_known(completed: Completer, long_text: dict[str, Any]) -> None:
    given = {"training": {"max_minutes": 5}}
    found = {**completed(given).chosen, **completed({"data": long_text, **given}).chosen}
    whole = {".".join(key.split(".")[:2]) for key in found}
    assert whole | {"tokenizer.algorithm"} == recipe.chosen_keys()
    assert "if not set" not in render(all_settings("model.norm_eps"))
    assert "train and quickstart choose it" in render(all_settings("model.d_model"))


def test_a_preset_is_kept_whole_and_gets_the_rate_of_its_size(completed: Completer) -> None:
    small, large = (completed({"model": {"preset": name}}) for name in ("llama-1m", "gpt2"))
    assert not [key for key in small.chosen if key.startswith("model.")]
    assert all(getattr(large.config.model, key) == value for key, value in PRESETS["gpt2"].items())
    assert small.config.training.learning_rate > large.config.training.learning_rate


def test_another_optimizer_has_its_own_rate(completed: Completer) -> None:
    config = completed({"training": {"optimizer": "adamw"}}).config
    assert config.training.learning_rate == SheepOpConfig().training.learning_rate


def test_a_fork_keeps_model_and_tokenizer(completed: Completer, base: Path) -> None:
    found = completed({}, fork=base)
    assert {key.partition(".")[0] for key in found.chosen} == {"training"}


def test_rows_of_a_fork_are_not_as_long_as_a_published_context(completed: Completer, tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "d_model": 8, "num_layers": 1, "num_heads": 1, "position_encoding": "rope"}
    model = build_model(ModelConfig(**sizes, max_seq_len=32_768), seed=0)
    save_model(tmp_path / "published", model, CharTokenizer("abc"), {})
    assert completed({}, fork=tmp_path / "published").config.data.max_length == 2048
    given = {"data": {"paths": [str(tmp_path / "text.txt")], "max_length": 4096}}
    assert completed(given, fork=tmp_path / "published").config.data.max_length == 4096


def test_longer_rows_need_a_longer_context(completed: Completer, tmp_path: Path) -> None:
    given = {"data": {"paths": [str(tmp_path / "text.txt")], "max_length": 700}}
    assert completed(given).config.model.max_seq_len == 700


def unmeasurable(device: str) -> float:
    raise AssertionError(f"{device} was measured")


def test_nothing_is_measured_where_nothing_is_open(completed: Completer) -> None:
    whole = completed({"training": {"max_minutes": 2}}).config.model_dump(mode="json")
    again = complete(draft(whole), unmeasurable, Console.silent())
    assert again == Completed(again.config, {})
    assert again.config.model_dump(mode="json") == whole


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"training": {"learning_rat": 1}}, r"training\.learning_rat: unknown key"),
        ({"model": {"d_model": "wide"}}, r"model\.d_model = 'wide'"),
        ({"model": 3}, "model"),
        ({"model": {"preset": "gpt9"}}, "preset 'gpt9' is not known"),
        ({"tokenizer": {"vocab_size": -1}}, r"tokenizer\.vocab_size = -1"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_measured(
    given: dict[str, Any], message: str, completed: Completer
) -> None:
    with pytest.raises(ConfigError, match=message):
        complete(draft({"data": {"paths": ["."]}, **given}), unmeasurable, Console.silent())
