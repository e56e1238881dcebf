"""Runs that learn from preferences: the DPO family and reward models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.checkpoint.weight_files import read_all_weights
from sheepop.core.errors import CheckpointError, ConfigError, DataError, UsageError
from sheepop.core.json_lines import read_json_lines
from sheepop.generate import Generator
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.data import show_step
from sheepop.jobs.exchange import export_model
from sheepop.jobs.run.open import find_resumable
from sheepop.jobs.run.record import RunRecord, repeat_command
from sheepop.jobs.run.train import TrainOutcome
from sheepop.language_model import LanguageModel
from sheepop.posttrain.preference import PreferenceScores, answer_rewards

from ..running import train, train_given

SETTINGS = (
    "device=cpu",
    "training.precision=fp32",
    "training.global_batch_size=4",
    "training.micro_batch_size=2",
    "training.learning_rate=0.01",
    "training.log_interval=1",
    "training.checkpoint_interval=2",
    "training.schedule=constant",
    "training.warmup_steps=0",
    "training.eval_interval=2",
    "training.max_steps=6",
    "training.sample_tokens=4",
    "data.validation_fraction=0.2",
)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty questions whose better answer is the number itself."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"prompt": f"number {n} ", "chosen": f"{n}", "rejected": f"sheep {39 - n}"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty answers, every third of which is wanted."""
    path = tmp_path_factory.mktemp("judged") / "judged.jsonl"
    rows = [
        {"prompt": f"number {n} ", "completion": "fence" if n % 3 else f"{n}", "label": n % 3 == 0} for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(method: str, data: Path, output: Path, *overrides: str) -> SheepOpConfig:
    places = (f"tuning.method={method}", f"data.paths={data}", f"output_dir={output}")
    return load_config(overrides=(*SETTINGS, *places, *overrides))


def rows_of(run: Path, split: str) -> list[dict[str, Any]]:
    rows, _ = read_json_lines(run / "metrics.jsonl")
    return [row for row in rows if row["split"] == split]


@pytest.fixture(scope="module")
def preferred(base: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainOutcome:
    return train(config("dpo", pairs, tmp_path_factory.mktemp("dpo") / "run"), fork=base)


@pytest.fixture(scope="module")
def judge(base: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainOutcome:
    return train(config("reward", pairs, tmp_path_factory.mktemp("reward") / "run"), fork=base)


def test_the_first_step_of_dpo_gives_the_logarithm_of_two(preferred: TrainOutcome) -> None:
    first = rows_of(preferred.run, "train")[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert (first["margin"], first["reward_chosen"], first["reward_rejected"]) == pytest.approx((0, 0, 0), abs=1e-6)


def test_what_is_said_to_repeat_a_run_names_its_verb_and_its_model(preferred: TrainOutcome, base: Path) -> None:
    said = repeat_command(preferred.run, RunRecord.read(RunDirectory.open(preferred.run)))
    model = load_model(base).directory.resolve()
    config, again = preferred.run / "config.yaml", f"{preferred.run}-again"
    assert said.endswith(f"sheepop tune dpo {model} --config {config} --output {again}")


def test_the_right_order_is_learnt_and_shown(preferred: TrainOutcome) -> None:
    assert isinstance(preferred.scores, PreferenceScores)
    assert preferred.scores.accuracy == 1.0 and preferred.scores.loss < 0.5
    page = RunDirectory.open(preferred.run).report.read_text()
    assert "Held-out pairs in the right order" in page and "100.0%" in page


def test_references_are_the_log_probabilities_of_the_model_that_the_run_began_with(
    preferred: TrainOutcome, base: Path, pairs: Path
) -> None:
    assert_references_are_of(base, preferred.run, pairs)


def test_the_reference_may_be_another_model(preferred: TrainOutcome, base: Path, pairs: Path, tmp_path: Path) -> None:
    given = config("dpo", pairs, tmp_path / "run", f"tuning.reference={preferred.run}", "training.max_steps=1")
    run = train(given, fork=base).run
    assert_references_are_of(preferred.run, run, pairs)
    assert rows_of(run, "train")[0]["loss"] > math.log(2) + 0.1, "it prefers the chosen answers less than that one does"


def test_a_reference_that_is_not_asked_is_refused(
    preferred: TrainOutcome, base: Path, pairs: Path, tmp_path: Path
) -> None:
    given = config("dpo", pairs, tmp_path / "run", f"tuning.reference={preferred.run}", "tuning.dpo.loss_type=simpo")
    with pytest.raises(ConfigError, match=r"tuning\.reference has no effect on tune dpo with these settings"):
        train(given, fork=base)


def assert_references_are_of(reference: Path, run: Path, pairs: Path) -> None:
    found = load_file(RunDirectory.open(run).examples / "reference_log_probabilities.safetensors")
    loaded = load_model(reference)
    tokenizer, model = loaded.tokenizer, loaded.model.double()
    expected = set()
    for line in pairs.read_text().splitlines():
        row = json.loads(line)
        both = []
        for answer in (row["chosen"], row["rejected"]):
            prompt = [*tokenizer.prefix_ids, *tokenizer.encode(row["prompt"])]
            ids = [*prompt, *tokenizer.encode(answer), tokenizer.eos_id]
            with torch.no_grad():
                log_p = model(torch.tensor([ids]))[0].log_softmax(-1)
            both.append(round(sum(float(log_p[t - 1, ids[t]]) for t in range(len(prompt), len(ids))), 3))
        expected.add(tuple(both))
    rounded = {tuple(round(float(value), 3) for value in pair) for split in found.values() for pair in split}
    assert len(rounded) == 40
    for pair in rounded:
        assert any(pair == pytest.approx(other, abs=2e-3) for other in expected)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("dpo", ()),
        ("dpo", ("tuning.lora.rank=2",)),
        ("reward", ()),
        ("reward", ("tuning.lora.rank=2",)),
        ("dpo", ("tuning.dpo.loss_type=orpo",)),
    ],
    ids=["dpo", "dpo-lora", "reward", "reward-lora", "orpo"],
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    base: Path, pairs: Path, tmp_path: Path, method: str, more: tuple[str, ...]
) -> None:
    whole, output = tmp_path / "whole", tmp_path / "run"
    train(config(method, pairs, whole, *more), fork=base)
    train(config(method, pairs, output, *more, "training.max_steps=3"), fork=base)
    stored = find_resumable(output)
    assert stored is not None
    train(load_config(overrides=["training.max_steps=6"], base=stored.record.requested), resume=True)
    for step in (4, 6):
        one, other = (RunDirectory(place).checkpoint(step) for place in (whole, output))
        files = sorted(path.name for path in one.glob("*.safetensors"))
        assert files == sorted(path.name for path in other.glob("*.safetensors"))
        for name in files:
            assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_how_a_step_is_cut_makes_no_difference(base: Path, pairs: Path, tmp_path: Path) -> None:
    losses = []
    for size in (1, 4):
        given = config("dpo", pairs, tmp_path / f"run{size}", f"training.micro_batch_size={size}")
        losses.append([row["loss"] for row in rows_of(train(given, fork=base).run, "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("loss", ["robust", "hinge", "ipo", "simpo", "orpo"])
def test_every_loss_learns_the_order(base: Path, pairs: Path, tmp_path: Path, loss: str) -> None:
    given = config("dpo", pairs, tmp_path / "run", f"tuning.dpo.loss_type={loss}", "training.max_steps=8")
    scores = train(given, fork=base).scores
    assert isinstance(scores, PreferenceScores)
    assert scores.accuracy >= 0.9 and scores.margin > 0


def test_kto_learns_from_answers_that_are_judged_one_by_one(base: Path, judged: Path, tmp_path: Path) -> None:
    given = config("dpo", judged, tmp_path / "run", "tuning.dpo.loss_type=kto", "training.max_steps=12")
    outcome = train(given, fork=base)
    assert isinstance(outcome.scores, PreferenceScores)
    first = rows_of(outcome.run, "train")[0]
    assert first["loss"] == pytest.approx(0.5, abs=1e-6)  # 1 - sigmoid(0) for every answer
    assert outcome.scores.margin > 0.05


def test_a_reward_model_judges_at_the_last_token(judge: TrainOutcome) -> None:
    assert isinstance(judge.scores, PreferenceScores)
    assert judge.scores.accuracy == 1.0
    assert judge.scores.calibration_error is not None
    assert rows_of(judge.run, "train")[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)  # its head begins at 0
    loaded = load_model(judge.run)
    model, head = loaded.model.double(), read_all_weights(loaded.directory)["reward_head.weight"].double()
    end, texts = loaded.tokenizer.eos_id, ("number 3 3", "number 3 sheep 36", "x")
    rows = [[*loaded.tokenizer.encode(text), end] for text in texts]
    found = answer_rewards(model, rows, batch_size=2, pad_id=loaded.tokenizer.filler_id)
    with torch.no_grad():
        expected = [float(model.hidden_states(torch.tensor([row]))[0, -1] @ head[0]) for row in rows]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert found[0] > found[1]
    lm = LanguageModel(load_model(judge.run).model, loaded.tokenizer, loaded.config)
    assert lm.rewards("number 3 ", ["3", "sheep 36"]) == pytest.approx(found[:2].tolist(), rel=1e-5)


def test_a_reward_model_writes_nothing_and_is_not_exported(judge: TrainOutcome, pairs: Path, tmp_path: Path) -> None:
    loaded = load_model(judge.run)
    with pytest.raises(UsageError, match="A reward model judges answers and writes none"):
        Generator(loaded.model, loaded.tokenizer)
    with pytest.raises(CheckpointError, match="is a reward model, which none of SheepOp's export formats"):
        export_model(judge.run, tmp_path / "exported")
    with pytest.raises(ConfigError, match="is a reward model, which judges answers"):
        train(config("dpo", pairs, tmp_path / "run"), fork=judge.run)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["model.dropout=0.2"], r"model\.dropout is not for tune dpo"),
        (["tuning.lora.dropout=0.1"], r"tuning\.lora\.dropout is not for tune dpo"),
        (["tuning.reward.center_rewards_coefficient=1"], "reward has no effect with method dpo; it works with reward"),
        (["tuning.dpo.margin=1"], "margin works with loss_type simpo, not sigmoid"),
        (
            ["tuning.dpo.label_smoothing=0.1", "tuning.dpo.loss_type=ipo"],
            "label_smoothing works with loss_type sigmoid",
        ),
        (["data.packing=false"], r"data\.packing = False has no effect on tune dpo"),
        (["training.z_loss=0.1"], r"training\.z_loss = 0\.1 has no effect on tune dpo"),
        (["training.label_smoothing=0.1"], r"training\.label_smoothing = 0\.1 has no effect on tune dpo"),
        (["tuning.neftune_noise_alpha=5"], "neftune_noise_alpha has no effect with method dpo"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    base: Path, pairs: Path, tmp_path: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        train(config("dpo", pairs, tmp_path / "run", *overrides), fork=base)
    assert not (tmp_path / "run").exists()


def test_one_bad_pair_among_many_is_named(base: Path, pairs: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    lines = pairs.read_text().splitlines() * 50
    lines[1234] = json.dumps({"prompt": "number 3 ", "chosen": "3", "rejected": "3"})
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"1 of 2,000 lines[^$]*line 1,235: rejected: is the same as chosen"):
        train(config("dpo", path, tmp_path / "run"), fork=base)
    assert not (tmp_path / "run").exists()


def test_a_damaged_reference_is_named(base: Path, pairs: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    train(config("dpo", pairs, output, "training.max_steps=2"), fork=base)
    file = RunDirectory.open(output).examples / "reference_log_probabilities.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    stored = find_resumable(output)
    assert stored is not None
    with pytest.raises(DataError, match=r"reference_log_probabilities\.safetensors is damaged"):
        train(load_config(overrides=["training.max_steps=6"], base=stored.record.requested), resume=True)
    file.unlink()  # as the error says
    again = train(load_config(overrides=["training.max_steps=6"], base=stored.record.requested), resume=True)
    assert again.steps == 6


def test_dropout_that_is_given_is_refused_also_at_its_default(base: Path, pairs: Path, tmp_path: Path) -> None:
    places = ("tuning.method=dpo", f"data.paths={pairs}", f"output_dir={tmp_path / 'run'}")
    for given in ("model.dropout=0.1", "model.dropout=0.2"):
        with pytest.raises(ConfigError, match=r"model\.dropout is not for tune dpo"):
            train_given([*SETTINGS, *places, given], fork=base)
    run = train_given([*SETTINGS, *places, "model.dropout=0", "training.max_steps=1"], fork=base).run
    assert load_model(run).config.dropout == 0


def test_a_step_of_a_tuned_run_says_which_examples_it_read(preferred: TrainOutcome, pairs: Path) -> None:
    lines = [json.loads(line) for line in pairs.read_text().splitlines()]
    answers = {row["prompt"] + row[name] for row in lines for name in ("chosen", "rejected")}
    rows = list(show_step(preferred.run, 2))
    assert [row for row, _ in rows] == [0, 0, 1, 1, 2, 2, 3, 3], "two answers to each of four prompts"
    tokenizer = load_model(preferred.run).tokenizer
    for _, origin in rows:
        assert len(tokenizer.encode(origin.text, allow_special=True)) + 1 == origin.stop - origin.start, (
            "and the end of the text"
        )
        assert any(answer in origin.text for answer in answers)
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        assert chosen[1].document + 1 == rejected[1].document and "sheep" in rejected[1].text
