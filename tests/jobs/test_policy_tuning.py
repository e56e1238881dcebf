"""Runs that learn from rewards of what they write: PPO and GRPO."""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sheepop.checkpoint import RunDirectory, load_model, save_model
from sheepop.checkpoint.weight_files import read_all_weights
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError, OutputError, TrainingError
from sheepop.core.json_lines import read_json_lines
from sheepop.jobs.best_of import best_of
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.run.open import find_resumable, task_of
from sheepop.jobs.run.record import view_run_config
from sheepop.jobs.run.train import TrainOutcome
from sheepop.jobs.task.distillation import DistillTask
from sheepop.jobs.task.examples import ExampleTask
from sheepop.jobs.task.rewards import PolicyTask
from sheepop.model import ModelConfig, build_model
from sheepop.posttrain.config import CodeConfig, JudgeConfig
from sheepop.posttrain.policy import RewardScores
from sheepop.tokenizer import TokenizerConfig, train_tokenizer

from ..judge_server import judge_server
from ..running import train

SETTINGS = (
    "device=cpu",
    "training.precision=fp32",
    "training.global_batch_size=8",
    "training.micro_batch_size=4",
    "training.learning_rate=0.01",
    "training.log_interval=1",
    "training.checkpoint_interval=1",
    "training.schedule=constant",
    "training.warmup_steps=0",
    "training.eval_interval=4",
    "training.max_steps=8",
    "training.sample_prompts=[]",
    "data.validation_fraction=0.2",
)

PPO = ("tuning.ppo.max_new_tokens=6", "tuning.ppo.epochs=2", "tuning.ppo.minibatches=2")
GRPO = ("tuning.grpo.max_new_tokens=6", "tuning.grpo.group_size=4", "tuning.grpo.epochs=2")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"number {n} ", "wanted": string.ascii_lowercase} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The share of wanted letters in an answer."""
    path = tmp_path_factory.mktemp("judge") / "judge.py"
    path.write_text(
        "def reward(prompt, completion, wanted, **fields):\n"
        "    return sum(letter in wanted for letter in completion) / max(1, len(completion))\n"
    )
    return path


def config(method: str, data: Path, reward: Path, output: Path, *overrides: str) -> SheepOpConfig:
    places = (
        f"tuning.method={method}",
        f"tuning.{method}.reward={reward}",
        f"data.paths={data}",
        f"output_dir={output}",
        *{"ppo": PPO, "grpo": GRPO}[method],
    )
    return load_config(overrides=(*SETTINGS, *places, *overrides))


def rows_of(run: Path, split: str) -> list[dict[str, Any]]:
    rows, _ = read_json_lines(run / "metrics.jsonl")
    timed = {
        "seconds",
        "tokens_per_second",
        "mfu",
        "memory_bytes",
        "busy_cores",
        "rollout_seconds",
        "preparation_seconds",
    }
    return [{key: value for key, value in row.items() if key not in timed} for row in rows if row["split"] == split]


@pytest.fixture(scope="module")
def improved(base: Path, prompts: Path, judge: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainOutcome:
    output = tmp_path_factory.mktemp("grpo") / "run"
    return train(
        config("grpo", prompts, judge, output, "training.max_steps=16", "training.global_batch_size=32"), fork=base
    )


def test_grpo_raises_the_reward(improved: TrainOutcome) -> None:
    assert isinstance(improved.scores, RewardScores)
    rewards = [row["reward"] for row in rows_of(improved.run, "train")]
    assert sum(rewards[-4:]) > sum(rewards[:4])
    validations = [row["reward"] for row in rows_of(improved.run, "validation")]
    assert validations[-1] > validations[0]
    page = RunDirectory.open(improved.run).report.read_text()
    assert "Reward on held-out prompts" in page and "on prompts to learn from" in page


def test_answers_are_logged_with_their_rewards_and_advantages(improved: TrainOutcome, judge: Path) -> None:
    run = RunDirectory.open(improved.run)
    rows = [row for row in read_json_lines(run.samples_file)[0] if "rewards" in row]
    assert [row["step"] for row in rows] == [step for step in range(1, 17) for _ in range(8)]
    means = [row["reward"] for row in rows_of(improved.run, "train")]
    for row in rows:
        worth = sum(letter in string.ascii_lowercase for letter in row["text"]) / max(1, len(row["text"]))
        assert row["reward"] == row["rewards"][str(judge)] == pytest.approx(worth)
        assert row["prompt"].startswith("number ") and math.isfinite(row["advantage"])
    above = [row for row in rows if row["reward"] > means[row["step"] - 1]]
    assert sum(row["advantage"] > 0 for row in above) > 0.7 * len(above)
    assert f"step 16, reward {rows[-1]['reward']:.4g}, advantage {rows[-1]['advantage']:.4g}" in run.report.read_text()


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_the_first_ratio_of_a_rollout_is_one(
    base: Path, prompts: Path, judge: Path, tmp_path: Path, method: str
) -> None:
    rows = rows_of(train(config(method, prompts, judge, tmp_path / "run"), fork=base).run, "train")
    steps = {"ppo": 4, "grpo": 2}[method]
    for number, row in enumerate(rows):
        if number % steps == 0:
            assert (row["divergence_from_old"], row["clipped"]) == (0.0, 0.0), "to the bit"
        else:
            assert row["divergence_from_old"] > 0
    assert rows[0]["divergence"] == pytest.approx(0, abs=1e-4)  # the policy is its reference
    assert rows[-1]["divergence"] != 0
    assert len({row["reward"] for row in rows[:steps]}) == 1, "one rollout"


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("ppo", ()),
        ("ppo", ("tuning.ppo.value_model=separate", "tuning.ppo.kl_target=1")),
        ("ppo", ("tuning.lora.rank=2",)),
        ("grpo", ("tuning.lora.rank=2", "tuning.grpo.equal_groups=draw_again")),
        ("grpo", ()),
    ],
    ids=["ppo", "ppo-apart", "ppo-lora", "grpo-lora", "grpo"],
)
def test_a_run_that_was_stopped_in_a_rollout_goes_on_bit_for_bit(
    base: Path, prompts: Path, judge: Path, tmp_path: Path, method: str, more: tuple[str, ...]
) -> None:
    whole, output = tmp_path / "whole", tmp_path / "run"
    train(config(method, prompts, judge, whole, *more), fork=base)
    train(config(method, prompts, judge, output, *more, "training.max_steps=3"), fork=base)
    stored = find_resumable(output)
    assert stored is not None
    train(load_config(overrides=["training.max_steps=8"], base=stored.record.requested), resume=True)
    one, other = (RunDirectory(place).checkpoint(8) for place in (whole, output))
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert files == sorted(path.name for path in other.glob("*.safetensors"))
    assert ("values.safetensors" in files) == (method == "ppo")
    for name in (*files, "state/source.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert rows_of(whole, "train") == rows_of(output, "train")
    assert (whole / "samples.jsonl").read_bytes() == (output / "samples.jsonl").read_bytes()


def test_a_run_that_was_stored_before_keys_were_renamed_goes_on(
    base: Path, prompts: Path, judge: Path, tmp_path: Path
) -> None:
    path = train(config("grpo", prompts, judge, tmp_path / "run", "training.max_steps=1"), fork=base).run
    run, before = RunDirectory(path), find_resumable(path)
    assert before is not None
    text = run.config_file.read_text().split("\n", 1)[1].replace("loss_type: grpo", "mean_over: answers")
    run.config_file.write_text(text.replace("kl_coef", "divergence_weight").replace("gae_lambda", "decay"))
    record = run.record_file.read_text().replace('"loss_type": "grpo"', '"mean_over": "answers"')
    run.record_file.write_text(record.replace("kl_coef", "divergence_weight").replace("gae_lambda", "decay"))
    assert find_resumable(path) == before
    train(load_config(overrides=["training.max_steps=2"], base=before.record.requested), resume=True)
    assert len(rows_of(path, "train")) == 2


def test_a_policy_is_a_model_like_any_other(base: Path, prompts: Path, judge: Path, tmp_path: Path) -> None:
    given = config("ppo", prompts, judge, tmp_path / "run", "tuning.ppo.value_model=separate")
    outcome = train(given, fork=base)
    loaded = load_model(outcome.run)
    assert not [name for name in read_all_weights(loaded.directory) if name.startswith("value")]
    before = read_all_weights(load_model(base).directory)
    after = read_all_weights(loaded.directory)
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_another_model_may_be_the_reference(
    base: Path, improved: TrainOutcome, prompts: Path, judge: Path, tmp_path: Path
) -> None:
    def first(name: str, *more: str) -> dict[str, Any]:
        given = config("ppo", prompts, judge, tmp_path / name, "training.max_steps=1", *more)
        return rows_of(train(given, fork=base).run, "train")[0]

    own = first("own")
    assert first("the-same", f"tuning.reference={base}") == own
    assert own["divergence"] == pytest.approx(0, abs=1e-4)
    assert first("other", f"tuning.reference={improved.run}", "tuning.lora.rank=2")["divergence"] > 0.1


@pytest.fixture(scope="module")
def taught(base: Path, improved: TrainOutcome, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainOutcome:
    """The base model after it has learnt from the improved one, on answers of its own."""
    return train(distilled(improved.run, prompts, tmp_path_factory.mktemp("distill") / "run"), fork=base)


def distilled(teacher: Path, prompts: Path, output: Path, *overrides: str) -> SheepOpConfig:
    places = ("tuning.method=distill", f"tuning.distill.teacher={teacher}", f"data.paths={prompts}")
    own = ("tuning.distill.max_new_tokens=6", "tuning.distill.beta=1", f"output_dir={output}")
    return load_config(overrides=(*SETTINGS, *places, *own, *overrides))


def test_a_model_comes_near_its_teacher_on_its_own_answers(taught: TrainOutcome) -> None:
    assert isinstance(taught.scores, RewardScores) and taught.scores.reward is None
    validations = [row["loss"] for row in rows_of(taught.run, "validation")]
    assert validations[-1] < 0.5 * validations[0]
    train_rows = rows_of(taught.run, "train")
    assert train_rows[-1]["divergence_from_teacher"] == pytest.approx(train_rows[-1]["objective"], rel=1e-5)
    assert "reward" not in train_rows[0]
    assert "Divergence from the teacher on held-out prompts" in RunDirectory.open(taught.run).report.read_text()
    samples = read_json_lines(taught.run / "samples.jsonl")[0]
    assert len(samples) == 8 * 8 and samples[0].keys() == {"step", "prompt", "text"}


def test_the_score_of_distillation_is_the_divergence_on_sampled_answers(
    taught: TrainOutcome, improved: TrainOutcome
) -> None:
    """KL(model, teacher) on answers to held-out prompts, token by token in float64."""
    task = task_of(view_run_config(RunDirectory.open(taught.run)), RunDirectory.open(taught.run), Console.silent())
    assert isinstance(task, DistillTask)
    model, teacher = (load_model(place).model for place in (taught.run, improved.run))
    held_out = task.held_out()
    assert held_out is not None
    written, total, count = task.held_out_answers(model, held_out), 0.0, 0
    for answer, transcript in zip(written.answers, written.transcripts, strict=True):
        ids, ((prompt, _),) = torch.tensor([answer.token_ids]), transcript.spans
        with torch.no_grad():
            q, p = (each(ids)[0, prompt - 1 : -1].double().log_softmax(-1) for each in (model, teacher))
        total += float((q.exp() * (q - p)).sum())
        count += len(q)
    assert task.score(model, held_out, "cpu").loss == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["tuning.distill.teacher=null"], "There is no teacher. Give one with the same tokenizer"),
        (["tuning.grpo.group_size=4"], "grpo has no effect with method distill"),
        (["tuning.reference=runs/x"], "reference has no effect with method distill"),
        (["tuning.distill.max_new_tokens=64"], "max_new_tokens = 64 leaves no room for a prompt"),
    ],
)
def test_settings_that_distillation_cannot_have_are_refused(
    base: Path, prompts: Path, tmp_path: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        train(distilled(base, prompts, tmp_path / "run", *overrides), fork=base)


def test_a_teacher_with_another_tokenizer_is_refused(base: Path, prompts: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 300, "d_model": 16, "num_layers": 1, "num_heads": 2, "max_seq_len": 64}
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=270), ["number of letters"] * 9, console=Console.silent())
    save_model(tmp_path / "other", build_model(ModelConfig(**sizes), seed=1), tokenizer, {})
    with pytest.raises(ConfigError, match=r"tuning.distill.teacher: .*other has another tokenizer, so its prob"):
        train(distilled(tmp_path / "other", prompts, tmp_path / "run"), fork=base)


def test_the_reference_stays_as_it_is(base: Path, prompts: Path, judge: Path, tmp_path: Path) -> None:
    run = RunDirectory.open(train(config("grpo", prompts, judge, tmp_path / "run"), fork=base).run)
    before, kept = read_all_weights(load_model(base).directory), read_all_weights(run.base)
    assert all(torch.equal(before[name], kept[name]) for name in before)


@pytest.mark.parametrize(
    ("ceiling", "words"),
    [
        ("kl_ceiling=1e-6", "nats from the reference in an answer, more than kl_ceiling = 1e-06"),
        ("length_ceiling=2", "tokens in an answer, more than length_ceiling = 2"),
    ],
)
def test_a_policy_that_goes_too_far_is_stopped_with_everything_saved(
    base: Path, prompts: Path, judge: Path, tmp_path: Path, ceiling: str, words: str
) -> None:
    output = tmp_path / "run"
    with pytest.raises(TrainingError, match=words):
        train(config("grpo", prompts, judge, output, f"tuning.grpo.{ceiling}"), fork=base)
    assert RunDirectory.open(output).latest_good(lambda words: None) is not None


def test_a_reward_that_fails_in_the_middle_leaves_everything_saved(
    base: Path, prompts: Path, judge: Path, tmp_path: Path
) -> None:
    working, judge, output = judge, tmp_path / "judge.py", tmp_path / "run"
    judge.write_text(
        "calls = 0\n"
        "def reward(prompt, completion, wanted, **fields):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return sum(c in wanted for c in completion) / max(1, len(completion)) if calls <= 20 else float('nan')\n"
    )
    with pytest.raises(TrainingError, match="gave nan for the answer"):
        train(config("grpo", prompts, judge, output, "data.validation_fraction=0"), fork=base)
    assert RunDirectory.open(output).steps()[-1] == 4  # two rollouts of eight answers, two steps from each
    judge.write_text(working.read_text())
    stored = find_resumable(output)
    assert stored is not None
    train(load_config(base=stored.record.requested), resume=True)
    given = config("grpo", prompts, working, tmp_path / "whole", "data.validation_fraction=0")
    whole = train(given, fork=base)
    one, other = (read_all_weights(RunDirectory(place).checkpoint(8)) for place in (output, whole.run))
    assert all(torch.equal(one[name], other[name]) for name in one), "the rollout is done again with the same prompts"


def test_batches_of_rollouts_are_hashed(base: Path, prompts: Path, judge: Path, tmp_path: Path) -> None:
    def hashes(name: str) -> list[str]:
        given = config("grpo", prompts, judge, tmp_path / name, "training.log_batch_hash=true", "training.max_steps=4")
        return [row["batch_hash"] for row in rows_of(train(given, fork=base).run, "train")]

    first = hashes("first")
    assert first == hashes("again")
    assert len(set(first)) == 4, "two rollouts, in another order in each of two epochs"


def test_groups_that_are_all_equal_teach_nothing(base: Path, prompts: Path, tmp_path: Path) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("def reward(prompt, completion, **fields):\n    return 1.0\n")
    more = ("tuning.grpo.equal_groups=draw_again", "tuning.grpo.kl_coef=0", "training.weight_decay=0")
    run = train(config("grpo", prompts, judge, tmp_path / "run", *more), fork=base).run
    assert {row["left_out"] for row in rows_of(run, "train")} == {1.0}
    before, after = (read_all_weights(load_model(place).directory) for place in (base, run))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("method", "overrides", "problem"),
    [
        ("grpo", ["tuning.grpo.reward=null"], "Nothing judges the answers. Give --reward"),
        ("grpo", ["tuning.grpo.reward=nowhere"], "nowhere does not exist, so it cannot judge answers"),
        ("grpo", ["tuning.grpo.group_size=3"], "= 8 answers, which is no multiple of the 3 answers"),
        ("ppo", ["tuning.ppo.max_new_tokens=64"], "max_new_tokens = 64 leaves no room for a prompt in 64 tokens"),
        ("ppo", ["tuning.long_examples=cut"], "A prompt without its end is another prompt"),
        ("ppo", ["training.batch_size_warmup=[[2,4]]"], "batch_size_warmup is not for rollouts"),
        ("ppo", ["model.dropout=0.3"], "model.dropout is not for tune ppo"),
        ("ppo", ["tuning.grpo.group_size=4"], "grpo has no effect with method ppo"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    base: Path, prompts: Path, judge: Path, tmp_path: Path, method: str, overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        train(config(method, prompts, judge, tmp_path / "run", *overrides), fork=base)
    assert not (tmp_path / "run").exists()


def test_prompts_that_are_too_long_are_counted(base: Path, judge: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "number " * (1 + 8 * (n % 2)), "wanted": "e"} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="10 examples of 20 have more than 58 tokens; the longest has 63"):
        train(config("grpo", path, judge, tmp_path / "run"), fork=base)


def test_a_reward_must_be_a_reward_model_of_the_same_tokenizer(base: Path, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no reward model\. Make one with: sheepop tune reward"):
        train(config("ppo", prompts, base, tmp_path / "run"), fork=base)


def test_the_best_of_several_answers_become_examples(base: Path, prompts: Path, judge: Path, tmp_path: Path) -> None:
    def made(name: str, **more: Any) -> list[dict[str, Any]]:
        found = best_of(
            base,
            [prompts],
            tmp_path / name,
            reward=str(judge),
            count=4,
            max_new_tokens=40,
            console=Console.silent(),
            **more,
        )
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert (found.prompts, found.written + found.left_out, found.written) == (40, 40, len(rows))
        return rows

    def worth(text: str) -> float:
        return sum(letter in string.ascii_lowercase for letter in text) / max(1, len(text))

    best = made("best.jsonl")
    assert all(row["reward"] == pytest.approx(worth(row["completion"])) for row in best)
    pairs = made("pairs.jsonl", pairs=True)
    assert all(row["margin"] == pytest.approx(worth(row["chosen"]) - worth(row["rejected"])) for row in pairs)
    assert all(row["margin"] > 0 for row in pairs)
    with pytest.raises(OutputError, match=r"best\.jsonl already exists"):
        made("best.jsonl")
    assert made("best.jsonl", overwrite=True) == best, "the same seed, the same answers"
    assert all(row["reward"] >= 0.8 for row in made("good.jsonl", least=0.8))


def test_one_prompt_and_one_example_are_counted_as_one() -> None:
    train, held_out = SimpleNamespace(num_groups=1, num_tokens=1, num_supervised=1), SimpleNamespace(num_groups=1)
    data: Any = SimpleNamespace(store=SimpleNamespace(train=train, validation=held_out))
    assert PolicyTask.describe(data) == "1 prompt; 1 held out"
    assert ExampleTask.describe(data) == "1 example of 1 token, 1 of them supervised; 1 example held out"


def test_best_of_takes_the_rewards_judge_and_code(base: Path, prompts: Path, tmp_path: Path) -> None:
    some = tmp_path / "prompts.jsonl"
    some.write_text("".join(prompts.read_text().splitlines(keepends=True)[:2]))
    options: dict[str, Any] = {"count": 2, "max_new_tokens": 8}
    with judge_server(lambda question: "[[4]]") as (url, asked, _):
        found = best_of(base, [some], tmp_path / "a.jsonl", reward="judge", judge=JudgeConfig(by=url), **options)
    assert (found.prompts, found.reward) == (2, pytest.approx(1 / 3)) and 0 < len(asked) <= 4
    some.write_text(json.dumps({"prompt": "x", "tests": "assert 1"}) + "\n")
    found = best_of(base, [some], tmp_path / "b.jsonl", reward="code", code=CodeConfig(seconds=1), **options)
    assert (found.prompts, found.reward) == (1, 0.0), "no answer is a program"
    with pytest.raises(ConfigError, match=r"tuning\.judge\.by"):
        best_of(base, [some], tmp_path / "c.jsonl", reward="judge", **options)
