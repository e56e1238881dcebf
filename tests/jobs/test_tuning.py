"""Runs of post-training: the life of every run, on examples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.checkpoint.weight_files import read_all_weights
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.recipe import complete
from sheepop.jobs.resume import find_resumable
from sheepop.jobs.train import TrainOutcome, run_training, train
from sheepop.tokenizer import chat_templates
from sheepop.train.metrics import read_json_lines

SETTINGS = (
    "device=cpu",
    "training.precision=fp32",
    "training.global_batch_size=4",
    "training.micro_batch_size=2",
    "training.learning_rate=0.01",
    "training.log_interval=1",
    "training.checkpoint_interval=2",
    "training.sample_interval=3",
    "training.sample_tokens=4",
    "training.schedule=constant",
    "training.warmup_steps=0",
    "training.eval_interval=2",
    "data.validation_fraction=0.2",
    "tuning.method=sft",
    "tuning.neftune_alpha=5",
)


@pytest.fixture(scope="module")
def base(configured: Callable[..., SheepOpConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen a little text."""
    settings = ("model.max_seq_len=64", "model.dropout=0", "training.max_steps=2")
    return run_training(configured(tmp_path_factory.mktemp("base") / "run", *settings)).run


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty questions about sheep, in letters that the model knows."""
    path = tmp_path_factory.mktemp("examples") / "chats.jsonl"
    said = [("number", f"{number}") for number in range(40)]
    rows = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in said]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tuned(base: Path, examples: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainOutcome:
    """Six steps without a break, with a report."""
    output = tmp_path_factory.mktemp("tuned") / "run"
    return train(config(examples, output, "training.max_steps=6"), fork=base)


def config(examples: Path, output: Path, *overrides: str) -> SheepOpConfig:
    return load_config(overrides=(*SETTINGS, f"data.paths={examples}", f"output_dir={output}", *overrides))


def rows_of(run: Path) -> list[dict[str, Any]]:
    timed = {"seconds", "tokens_per_second", "mfu"}
    rows, _ = read_json_lines(run / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in timed} for row in rows]


def test_a_tuned_run_is_a_run_like_any_other(tuned: TrainOutcome, base: Path) -> None:
    run = RunDirectory.open(tuned.run)
    assert run.steps()[-1] == 6
    page = run.report.read_text()
    assert "Examples read" in page and "sft" in page
    assert tuned.scores is not None
    losses = [row["loss"] for row in rows_of(tuned.run) if row["split"] == "validation"]
    assert losses[-1] < losses[0]
    assert tuned.try_out is not None
    assert tuned.try_out.endswith(f"chat {tuned.run}")
    samples, _ = read_json_lines(run.samples_file)
    assert {row["prompt"] for row in samples} == {"User:\nnumber\nAssistant:\n"}


def test_the_template_is_kept_with_the_model(tuned: TrainOutcome, base: Path) -> None:
    before, after = load_model(base), load_model(tuned.run)
    assert chat_templates(before.tokenizer) == {}
    assert "generation" in chat_templates(after.tokenizer)["default"]
    assert before.tokenizer.fingerprint() == after.tokenizer.fingerprint()


def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    tuned: TrainOutcome, base: Path, examples: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(examples.read_bytes())
    output = tmp_path / "run"
    run_training(config(moved, output, "training.max_steps=3"), fork=base)
    moved.unlink()  # a run keeps its examples
    stored = find_resumable(output)
    assert stored is not None
    run_training(load_config(overrides=["training.max_steps=6"], base=stored.record.asked), resume=True)
    whole, resumed = (read_all_weights(RunDirectory(place).checkpoint(6)) for place in (tuned.run, output))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_only_the_learnt_tokens_count(tuned: TrainOutcome) -> None:
    manifest = json.loads((RunDirectory(tuned.run).examples / "tokens" / "manifest.json").read_text())
    validation = [row for row in rows_of(tuned.run) if row["split"] == "validation"]
    assert validation and tuned.scores is not None
    # An answer is its digits and the end: two tokens below ten, and three from there on.
    held_out = manifest["examples"]["validation"]
    assert 2 * held_out <= tuned.scores.tokens <= 3 * held_out


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["data.documents=line"], "data.documents = 'line' is about running text and has no effect on examples"),
        (["data.clean.stages=[]"], "data.clean"),
        (["training.curriculum=easy_to_hard"], "training.curriculum = 'easy_to_hard' is about running text"),
        (["data.paths=[]"], "data.paths is empty"),
        (["data.max_length=4096"], "data.max_length = 4096 is more than the 64 tokens that the model reads"),
        (["training.sample_prompts=[" + "number" * 20 + "]"], "training.sample_prompts"),
        (["model.d_model=64"], r"model\.d_model is 16 there, not 64"),
    ],
)
def test_settings_without_an_effect_are_refused(
    base: Path, examples: Path, tmp_path: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_training(config(examples, tmp_path / "run", *overrides), fork=base)
    assert not (tmp_path / "run").exists()


def test_tuning_needs_a_model_and_its_settings_a_method(examples: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teaches a finished model\. Say which: sheepop tune sft MODEL"):
        run_training(config(examples, tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"neftune_alpha has no effect without tuning\.method"):
        load_config(overrides=["tuning.neftune_alpha=5"])


def test_the_recipe_takes_smaller_steps_with_larger_models(base: Path, examples: Path) -> None:
    given = {"tuning": {"method": "sft"}, "data": {"paths": [str(examples)]}}
    found = complete(given, lambda device: 1e9, Console.silent(), fork=base)
    assert found.chosen["training.max_epochs"] == 3
    assert found.config.training.optimizer == "adamw"
    assert found.chosen["training.learning_rate"] == found.config.training.learning_rate <= 1e-2
    kept = complete({**given, "training": {"max_steps": 5}}, lambda device: 1e9, Console.silent(), fork=base)
    assert kept.config.training.max_epochs is None
