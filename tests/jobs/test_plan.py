"""A plan finds what would end a run, without starting it; and what it counts is what other code counts."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import sheepop
from sheepop.core.errors import SheepOpError
from sheepop.jobs import first_steps
from sheepop.jobs import preflight as look
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.plan import plan_a_run
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.task import corpus as corpus_task
from sheepop.plan.machine import MachineConfig, find_machine
from sheepop.plan.run_plan import RunPlan

from ..command_line import in_process
from ..running import train

Configured = Callable[..., SheepOpConfig]
Usage = namedtuple("Usage", "total used free")


def planned(config: SheepOpConfig, machine: MachineConfig | None = None, **request: object) -> RunPlan:
    return plan_a_run(RunRequest.exactly(config, **request), machine=machine, seconds=0.1)


@dataclass(frozen=True)
class Fault:
    """Settings with a fault, the check that finds it, and words that name it."""

    settings: Sequence[str]
    check: str
    words: str
    machine: str = "this"


# Which `train` finds only after it has read and tokenised all of its text, or never until it ends.
LATE = {
    "task that is not there": Fault(("evaluation.tasks=[quizz.jsonl]",), "evaluation", "quizz.jsonl"),
    "precision that the device lacks": Fault(("training.precision=fp8",), "precision", "Use bf16"),
    "model too small for the tokenizer": Fault(("model.vocab_size=5",), "tokenizer and model", "smaller than"),
    "rows longer than the context": Fault(("data.max_length=64",), "rows and batch", "model.max_seq_len"),
    "prompt longer than the context": Fault(
        (f"training.sample_prompts=[{'Sheep ' * 20}]",), "tokenizer and model", "sample_prompts"
    ),
    "early stopping without a validation": Fault(
        ("data.validation_fraction=0", "training.early_stopping=2"), "rows and batch", "no text is held out"
    ),
}
EARLY = {
    "layout that does not fit": Fault(("parallel.tensor=2",), "layout", "parallel.tensor = 2"),
    "rate that ends in infinity": Fault(("training.learning_rate=1e30",), "first steps", "learning_rate"),
    "batch that ranks cannot share": Fault(
        ("parallel.zero=1", "training.global_batch_size=12"), "batch", "multiple of 8", "h100x8"
    ),
    "layout that GPUs do not make": Fault(("parallel.tensor=3",), "layout", "a multiple of 3", "h100x8"),
    "precision that GPUs lack": Fault(("training.precision=fp8",), "precision", "8 x A100", "a100x8"),
}


@pytest.mark.parametrize("name", [*LATE, *EARLY])
def test_a_planted_fault_is_found(name: str, configured: Configured, tmp_path: Path) -> None:
    fault = {**LATE, **EARLY}[name]
    found = planned(configured(tmp_path / "run", *fault.settings), find_machine(fault.machine))
    assert found.ends
    assert [(each.check, fault.words in each.words) for each in found.findings if each.ends] == [(fault.check, True)]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", LATE)
def test_training_alone_reads_all_text_before_it_finds_the_fault(
    name: str, configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, original = [], corpus_task.open_corpus

    def noted(*arguments: object, **named: object) -> object:
        read.append(original(*arguments, **named))  # type: ignore[arg-type]
        return read[-1]

    monkeypatch.setattr(corpus_task, "open_corpus", noted)
    with pytest.raises(SheepOpError):
        train(configured(tmp_path / "run", *LATE[name].settings))
    assert len(read) == 1


def test_a_path_that_is_gone_and_an_output_that_cannot_be_are_found_together(
    configured: Configured, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    found = planned(configured(tmp_path / "file" / "run", data=tmp_path / "gone"))
    assert [each.check for each in found.findings] == ["output", "data"]
    assert "gone does not exist" in found.findings[1].words


def test_a_run_at_the_output_is_found(configured: Configured, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    config = configured(tmp_path / "run")
    assert [each.check for each in planned(config).findings if each.ends] == ["output"]
    assert planned(config, overwrite=True).findings == []


def test_a_damaged_corpus_is_found(configured: Configured, text_folder: Path, tmp_path: Path) -> None:
    assert in_process("data", "build", text_folder, "--output", tmp_path / "corpus", "--quiet").code == 0
    damaged = next((tmp_path / "corpus" / "tokens").glob("train-*.bin"))
    content = bytearray(damaged.read_bytes())
    content[7] ^= 1
    damaged.write_bytes(content)
    config = configured(tmp_path / "run", data=tmp_path / "corpus")
    config = config.replace(tokenizer={})
    found = planned(config)
    assert [each.check for each in found.findings] == ["data"]
    assert damaged.name in found.findings[0].words


def test_moments_that_do_not_fit_are_found_although_the_first_pass_fits(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path / "run", "model.d_model=256", "training.global_batch_size=1")
    memory = planned(config).memory
    assert memory is not None
    assert memory.moments == pytest.approx(2 * memory.weights, rel=0.01)
    monkeypatch.setattr(look, "available_memory", lambda: int(memory.tensors - memory.moments / 2))
    found = planned(config)
    assert [each.check for each in found.findings] == ["memory"]
    assert "the optimizer's moments" in found.findings[0].words
    assert found.course is None
    assert found.largest_rows is None
    assert found.disk is not None  # which is counted all the same


@pytest.mark.parametrize(
    ("settings", "kept"),
    [((), "training.keep_milestones=false"), (("training.max_steps=1000", "training.checkpoint_interval=1"), "1000")],
)
def test_checkpoints_that_fill_the_disk_are_found(
    settings: tuple[str, ...], kept: str, configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path / "run", "training.keep_checkpoints=1000", *settings)
    disk = planned(config).disk
    assert disk is not None
    assert disk.fits
    free = int(disk.needed - disk.checkpoint / 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10 * free, 9 * free, free))
    found = planned(config)
    assert [each.check for each in found.findings] == ["disk"]
    assert f"hold {disk.checkpoints - 1:,} checkpoints" in found.findings[0].words
    assert kept in found.findings[0].words


def test_the_most_checkpoints_and_their_size_are_those_of_a_run(configured: Configured, tmp_path: Path) -> None:
    config = configured(tmp_path / "run", "model.d_model=64", "training.max_steps=8", "training.checkpoint_interval=1")
    disk = planned(config).disk
    assert disk is not None
    train(config)
    kept = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(kept) <= disk.checkpoints <= len(kept) + 2
    size = sum(file.stat().st_size for file in kept[-1].rglob("*.safetensors"))
    assert disk.checkpoint == pytest.approx(size, rel=0.1)


def test_a_sound_run_has_no_finding_and_its_counts_are_its_own(configured: Configured, tmp_path: Path) -> None:
    warmup = "training.batch_size_warmup=[[16,1]]"
    found = planned(configured(tmp_path / "run", "model.d_model=64", "training.max_steps=32", warmup))
    assert found.findings == []
    assert found.course is not None
    assert found.memory is not None
    assert found.course.steps == 32
    assert found.tensors == pytest.approx(found.memory.tensors, rel=0.1)
    assert found.process is not None and found.process > found.memory.program
    # 1 row of 32 tokens in half of the steps and 4 in the others, so 80 tokens on average. The timed steps are from all
    # parts of the run. Documents of another length may leave the last label out.
    assert 65 < found.course.tokens < 90
    assert all(found.course.besides[part] > 0 for part in ("preparation", "validations", "score", "checkpoints"))
    assert found.largest_rows == 4
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def wide(configured: Configured, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose activations are larger than the ids of its tokens."""
    settings = ("model.max_seq_len=64", "model.dropout=0", "model.d_model=64", "training.max_steps=1")
    return train(configured(tmp_path_factory.mktemp("wide") / "run", *settings)).run


def test_steps_of_an_adapter_and_of_rollouts_are_planned(wide: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Sheep {n}", "completion": "jumps"}) + "\n" for n in range(12))
    )
    (tmp_path / "check.py").write_text("def reward(prompt, answer, **fields):\n    return float(len(answer))\n")
    shared = ("--data", tmp_path / "chats.jsonl", "--device", "cpu", "--seconds", "0.1", "--json")
    sizes = ("training.global_batch_size=4", "training.max_steps=2", "training.precision=fp32")
    lora = in_process("plan", wide, "--method", "sft", *shared, *sizes, "tuning.lora.rank=2")
    assert lora.code == 0, lora.out
    found = json.loads(lora.out)
    assert found["memory"]["moments"] < found["memory"]["weights"] / 2  # those of the adapter only
    assert found["measured_tensors"] == pytest.approx(found["memory"]["tensors"], rel=0.1)
    settings = (
        f"tuning.grpo.reward={tmp_path / 'check.py'}",
        "tuning.grpo.group_size=2",
        "tuning.grpo.max_new_tokens=8",
    )
    rewarded = in_process("plan", wide, "--method", "grpo", *shared, *sizes, *settings)
    assert rewarded.code == 0, rewarded.out
    found = json.loads(rewarded.out)
    assert found["time"]["steps"] == 2
    assert found["memory"]["cache"] > 0
    assert found["measured_tensors"] == pytest.approx(found["memory"]["tensors"], rel=0.1)
    (tmp_path / "check.py").write_text("def score(prompt, answer):\n    return 1.0\n")
    rewarded = in_process("plan", wide, "--method", "grpo", *shared, *sizes, *settings)
    assert rewarded.code == 1
    assert "reward" in json.loads(rewarded.out)["findings"][0]["words"]


def test_a_step_on_pairs_reads_both_answers(wide: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Sheep {n}", "chosen": "jumps over", "rejected": "sleeps all night"} for n in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ("training.global_batch_size=4", "training.micro_batch_size=4", "training.max_steps=2")
    shared = ("--data", tmp_path / "pairs.jsonl", "--device", "cpu", "--seconds", "0.1", "--json")
    done = in_process("plan", wide, "--method", "dpo", *shared, *sizes, "training.precision=fp32")
    assert done.code == 0, done.out
    found = json.loads(done.out)
    # Logits are counted as if every token were learnt, which prompts are not.
    assert 0.85 < found["measured_tensors"] / found["memory"]["tensors"] < 1.02


def test_examples_that_are_all_too_long_are_found(base: Path, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": "Sheep " * 50, "completion": "jump"}) + "\n")
    done = in_process("plan", base, "--method", "sft", "--data", tmp_path / "chats.jsonl", "--device", "cpu", "--json")
    assert done.code == 1
    assert [each["check"] for each in json.loads(done.out)["findings"]] == ["data"]


def test_eight_gpus_of_which_one_would_do_share_the_rows(configured: Configured, tmp_path: Path) -> None:
    config = configured(tmp_path / "run", "model.vocab_size=64", "training.global_batch_size=8")
    found = planned(config, find_machine("h100x8"))
    assert not found.ends
    assert found.course is not None
    # Every layout of one node whose ranks share the network: tensor ranks divide the two heads.
    assert {laid.plan.layout.config.tensor for laid in found.layouts} <= {1, 2}
    assert all(laid.rows * laid.micro_batches * laid.plan.layout.num_data == 8 for laid in found.layouts)
    times = [laid.seconds.middle for laid in found.layouts]
    assert times == sorted(times)


def test_a_network_that_fits_no_gpu_is_said(configured: Configured, tmp_path: Path) -> None:
    machine = find_machine("h100x8")
    assert machine is not None
    config = configured(tmp_path / "run", "model.vocab_size=64", "training.global_batch_size=8")
    found = planned(config, machine.replace(memory_gb=1e-5))
    assert [each.check for each in found.findings] == ["memory"]
    assert found.course is None


def test_the_function_and_the_command_plan_alike(text_folder: Path, tmp_path: Path) -> None:
    sizes = {"model.vocab_size": 64, "model.d_model": 16, "model.num_layers": 1, "model.num_heads": 2}
    settings = {**sizes, "training.global_batch_size": 8, "model.max_seq_len": 32, "training.max_steps": 3}
    (tmp_path / "machine.yaml").write_text(
        "{name: two cards, devices: 2, memory_gb: 8, teraflops: 10, link_gb_per_second: 5, network_gb_per_second: 1}"
    )
    how = {"machine": str(tmp_path / "machine.yaml"), "budget": "1e12flops", "price": 2.0}
    found = sheepop.plan(text_folder, settings=settings, quiet=True, **how)
    options = [part for name, value in how.items() for part in (f"--{name}", value)]
    overrides = [f"{key}={value}" for key, value in settings.items()]
    done = in_process("plan", "--data", text_folder, *options, "--json", *overrides)
    assert done.code == 0, done.err
    assert json.loads(done.out) == json.loads(json.dumps(found.to_dict()))


def test_a_page_and_words_say_the_same(configured: Configured, tmp_path: Path) -> None:
    config = configured(tmp_path / "run", "model.vocab_size=64", "training.global_batch_size=8")
    found = planned(config, find_machine("a100x8"))
    words, page = "\n".join(found.lines()), found.page().to_html()
    assert "Plan for 8 x A100" in words
    assert "12.80 USD" in words
    assert "12.80 USD" in page
    assert found.layouts[0].plan.layout.words in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "0h"), "above 0"),
        (("--budget", "50usd"), "--price USD"),
        (("--machine", "h1000x8"), "Did you mean h100x8?"),
        (("--output", "plan.pdf"), ".html"),
        (("--method", "sft"), "sheepop plan MODEL --method sft"),
        (("training.lerning_rate=1",), "training.learning_rate"),
    ],
)
def test_what_makes_no_plan_is_refused(arguments: tuple[str, ...], said: str, text_folder: Path) -> None:
    done = in_process("plan", "--data", text_folder, *arguments)
    assert done.code == 2
    assert said in done.err


def test_a_large_text_is_read_in_part(
    configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_folder: Path
) -> None:
    whole = sum(file.stat().st_size for file in text_folder.iterdir())
    monkeypatch.setattr(look, "sampled", lambda paths, place: original(paths, place, whole // 3))
    from sheepop.plan.sample import sampled as original

    config = configured(tmp_path / "run", "training.max_steps=null", "training.max_epochs=2")
    found = planned(config)
    assert not found.ends
    assert any("% of the text was read" in words for words in found.assumed)
    monkeypatch.undo()
    outcome = train(config)
    assert found.course is not None
    assert found.course.steps == pytest.approx(outcome.steps, rel=0.2)


def test_work_that_is_repeated_has_the_mean_of_its_later_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: of 5, 1, 3 and 2 seconds the fourth would begin after the ninth; the first takes 3 more than a later."""
    now, each = 0.0, iter((5.0, 1.0, 3.0, 2.0))

    def work() -> None:
        nonlocal now
        now += next(each)

    monkeypatch.setattr(first_steps.time, "perf_counter", lambda: now)
    assert first_steps.first_and_later(work, 9.0) == (2.0, 3.0)
    assert first_steps.first_and_later(work, 2.0) == (2.0, 0.0)
    assert first_steps.first_and_later(None, 9.0) == (0.0, 0.0)
