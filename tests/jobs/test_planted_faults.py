"""Faults planted into training runs are found and named, and healthy runs give no alarm."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import sheepop
from sheepop.checkpoint import save_model
from sheepop.core.json_lines import read_json_lines
from sheepop.interpret.control.advice import BATCH, HEADS, LAYER, RATE, Advice, advice_of, noise_scale_of
from sheepop.jobs.analyze_run import RunAnalysisRequest, analyze_run, sharpness_of
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.model import build_model

from ..running import train

pytestmark = pytest.mark.campaign

WORDS = (
    *("the", "and", "with", "that", "this", "have", "from", "their", "there", "which", "when", "about", "after"),
    *("before", "little", "morning", "garden", "river"),
)
USUAL = (
    *("model.d_model=32", "model.num_layers=2", "model.dropout=0", "model.position_encoding=rope"),
    *("model.norm=rmsnorm", "training.max_steps=120", "training.global_batch_size=64", "training.learning_rate=3e-3"),
    *("training.sinks=[]", "training.eval_interval=120", "training.checkpoint_interval=120"),
    *("analysis.quantities=[sharpness,noise,layers]", "analysis.interval=10"),
)
Trained = Callable[..., tuple[Path, list[Advice]]]


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("prose"), random.Random(0)
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(" ".join(draw.choice(WORDS) for _ in range(600)) + "\n")
    return folder


@pytest.fixture(scope="module")
def trained(configured: Callable[..., SheepOpConfig], prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    def run(*settings: str, fork: Path | None = None) -> tuple[Path, list[Advice]]:
        place = tmp_path_factory.mktemp("runs") / "run"
        path = train(configured(place, *USUAL, *settings, data=prose), fork=fork).run
        return path, advice_of(read_json_lines(path / "metrics.jsonl").rows)

    return run


HEALTHY: Sequence[tuple[str, ...]] = (
    (),
    ("training.learning_rate=1e-3",),
    ("training.learning_rate=6e-3",),
    ("training.schedule=constant",),
    ("training.optimizer=muon", "training.learning_rate=1e-3"),
    *(("training.optimizer=muon", "training.learning_rate=3e-2", f"seed={seed}") for seed in range(3)),
    ("training.optimizer=sgd", "training.learning_rate=0.1", "training.weight_decay=0"),
    ("training.optimizer=adam", "training.weight_decay=0"),
    ("model.norm=layernorm", "model.activation=gelu"),
    ("model.num_layers=1", "model.activation=swiglu", "model.bias=false"),
    ("seed=7", "model.dropout=0.1"),
)


@pytest.mark.parametrize("settings", HEALTHY, ids=lambda settings: " ".join(settings) or "usual")
def test_healthy_runs_give_no_alarm(trained: Trained, settings: tuple[str, ...]) -> None:
    assert trained(*settings)[1] == []


SGD = ("training.optimizer=sgd", "training.momentum=0", "training.weight_decay=0", "training.max_grad_norm=null")


def test_a_rate_1_3_times_too_high_is_named_at_once(trained: Trained) -> None:
    """A run of plain descent, then its continuation at shares of the rate that its last checkpoint bears."""
    path, _ = trained(*SGD, "training.learning_rate=0.2", "training.schedule=constant")
    found = analyze_run(RunAnalysisRequest(path, device="cpu"), "sharpness", lambda run: sharpness_of(run, rows=64))
    limit = found.rate / found.sharpness.share
    short = (*SGD, "training.schedule=constant", "training.warmup_steps=0", "training.max_steps=6", "analysis.rows=64")
    often = (*short, "analysis.interval=1", "training.eval_interval=6", "training.checkpoint_interval=6")
    _, wrong = trained(*often, f"training.learning_rate={1.3 * limit}", fork=path)
    assert wrong and wrong[0].cause in (RATE, LAYER) and wrong[0].step <= 3
    assert trained(*often, f"training.learning_rate={0.5 * limit}", fork=path)[1] == []


@pytest.mark.parametrize("seed", range(3))
def test_a_rate_of_muon_far_too_high_is_named(trained: Trained, seed: int) -> None:
    """It is 33 times the healthy one, and the loss ends above 1 nat per character instead of near 0.55."""
    settings = ("training.optimizer=muon", "training.learning_rate=1", f"seed={seed}")
    path, advice = trained(*settings)
    held_out = [row["loss"] for row in read_json_lines(path / "metrics.jsonl").rows if row["split"] == "validation"]
    assert held_out[-1] > 1
    assert advice[0].cause in (RATE, LAYER) and advice[0].step <= 30
    assert 1 / 32 <= advice[0].changes["training.learning_rate"] <= 1 / 8


def test_a_dead_head_is_named(trained: Trained, tmp_path: Path) -> None:
    """Its values and its part of the output are 0, so that no gradient revives it."""
    lm = sheepop.load(trained("training.max_steps=10")[0], device="cpu")
    attention = lm.model.layers[1].attention
    assert attention is not None
    with torch.no_grad():
        attention.v_proj.weight[16:] = 0
        attention.v_proj.bias[16:] = 0
        attention.o_proj.weight[:, 16:] = 0
    save_model(tmp_path / "model", lm.model, lm.tokenizer, {})
    (found,) = trained("training.max_steps=20", fork=tmp_path / "model")[1]
    assert found.cause == HEADS and "blocks.1.attention head 1" in found.words


@pytest.mark.parametrize("matrix", ["blocks.1.feed_forward.down_proj.weight", "blocks.0.attention.v_proj.weight"])
def test_a_matrix_that_begins_eight_times_as_long_is_named(trained: Trained, tmp_path: Path, matrix: str) -> None:
    lm = sheepop.load(trained("training.max_steps=1")[0], device="cpu")
    model = build_model(lm.model.config, 1)
    with torch.no_grad():
        model.get_parameter(matrix).mul_(8)
    save_model(tmp_path / "model", model, lm.tokenizer, {})
    (found,) = trained("training.max_steps=20", fork=tmp_path / "model")[1]
    assert found.cause == LAYER and found.words.startswith(f"{matrix} is ") and found.step == 10


def test_a_batch_far_too_small_is_named(trained: Trained) -> None:
    """Rows of eight characters have much noise, and eight of them take hardly longer than two."""
    steps = ("training.schedule=constant", "training.max_steps=240", "training.eval_interval=240")
    noisy = (*steps, "model.max_seq_len=8", "analysis.quantities=[noise]", "analysis.interval=5")
    path, advice = trained(*noisy)
    assert advice == []
    scale = noise_scale_of([row for row in read_json_lines(path / "metrics.jsonl").rows if row["split"] == "analysis"])
    assert scale is not None and scale.rows > 24
    (found,) = trained(*noisy, "training.global_batch_size=2")[1]
    assert found.cause == BATCH and found.changes["training.global_batch_size"] in (4, 8)


def test_the_recipe_of_a_diverging_run_names_its_cause_long_before_the_loss_shows_it(
    prose: Path, tmp_path: Path
) -> None:
    """The loss shows it once the mean of twenty steps is a tenth above its lowest."""
    places = ("device=cpu", f"data.paths={prose}", f"output_dir={tmp_path / 'run'}", "training.sinks=[]")
    config = load_config(Path(__file__).parents[2] / "recipes" / "diverging.yaml", places)
    rows = read_json_lines(train(config).run / "metrics.jsonl").rows
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    means = [sum(losses[end - 20 : end]) / 20 for end in range(20, len(losses) + 1)]
    shown = next(20 + place for place, mean in enumerate(means) if mean > 1.1 * min(means[: place + 1]))
    analysed = [row for row in rows if row["split"] == "analysis"]
    named = next(
        row["step"]
        for count, row in enumerate(analysed, 1)
        if any(advice.cause in (RATE, LAYER) for advice in advice_of(analysed[:count]))
    )
    assert named + 50 <= shown
