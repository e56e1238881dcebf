"""Runs over several ranks: the same course as in one process, whatever happens to a rank."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sheepop
from sheepop.checkpoint import RunDirectory, load_model, save_model
from sheepop.checkpoint.weight_files import read_all_weights
from sheepop.jobs.analyze_run import RunAnalysisRequest, analyze_run, noise_of, sharpness_of
from sheepop.jobs.coordinates import CoordinatesRequest, check_coordinates
from sheepop.model import build_model

from ..command_line import COMMAND, Ended, Started
from ..faults.conftest import DISTURBED
from .conftest import ENDS, Together, rows

_SMALL = ["tokenizer.algorithm=char", "data.clean.stages=[]"]


def require_same_course(one: Path, other: Path) -> None:
    """The same global batches; losses and norms within rounding; the same weights in the end."""
    first, second = rows(one), rows(other)
    assert [(row["step"], row["split"], row.get("batch_hash")) for row in first] == [
        (row["step"], row["split"], row.get("batch_hash")) for row in second
    ]
    for a, b in zip(first, second, strict=True):
        compared = {"loss", "grad_norm", "margin", "reward", "length", "divergence", "value_loss", "objective"}
        for key in compared & a.keys():
            assert b[key] == pytest.approx(a[key], rel=2e-4), (a["step"], key)
    ours, theirs = (read_all_weights(last_checkpoint(run)) for run in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def last_checkpoint(run: Path) -> Path:
    directory = RunDirectory.open(run)
    return directory.checkpoint(directory.steps()[-1])


def await_step(ranks: Sequence[Started], run: Path, step: int) -> None:
    """Waits until the ranks, just started, have taken that step."""
    file = run / "metrics.jsonl"
    before = file.stat().st_mtime_ns if file.exists() else 0
    while (
        not file.exists()
        or file.stat().st_mtime_ns == before
        or max((row["step"] for row in rows(run)), default=0) < step
    ):
        assert all(rank.poll() is None for rank in ranks), [rank.poll() for rank in ranks]
        time.sleep(0.005)


def one_error(ends: ENDS) -> str:
    """The words of the one rank that spoke."""
    assert all(end.code != 0 for end in ends), ends
    spoken = [end.err for end in ends if end.err]
    assert len(spoken) == 1, ends
    return spoken[0]


def test_a_run_goes_from_one_layout_to_another_past_a_checkpoint_that_lacks_a_file(
    together: Together, alone: Path, tmp_path: Path
) -> None:
    run, lost = tmp_path / "run", "optimizer-00002-of-00002.safetensors"
    for size, layout in [(2, ["parallel.zero=3"]), (4, ["parallel.zero=1", "parallel.shard=2"])]:
        if size == 4:
            (last_checkpoint(run) / "state" / lost).unlink()
        ends = together.run(size, [*together.options(run, "training.max_steps=8", *layout), "--resume", "auto"])
        assert [end.code for end in ends] == [0] * size, ends
        assert [bool(end.out) for end in ends] == [False] * size
        assert [lost in end.err for end in ends] == [size == 4, *[False] * (size - 1)]
        assert not any(end.err for end in ends[1:])
        checkpoint = last_checkpoint(run)
        assert len(list(checkpoint.glob("model-*-of-*.safetensors"))) == size
        assert len(list((checkpoint / "state").glob("optimizer-*.safetensors"))) == size
        assert load_model(checkpoint).provenance["step"] == 8
    done = together.alone([*together.options(run), "--resume", "auto"])
    assert "parallel.shard = 2 does not divide 1" in done.err
    done = together.alone([*together.options(run, "parallel.shard=null"), "--resume", "auto"])
    assert done.code == 0, done.err
    assert not list(last_checkpoint(run).glob("model-*"))
    last = rows(alone)[-1]
    assert [row for row in rows(run) if row["split"] == "score"][-1]["loss"] == pytest.approx(last["loss"], rel=2e-4)
    require_same_course(alone, run)


def test_a_run_goes_on_after_a_kill_from_the_last_checkpoint_and_after_a_signal_from_where_it_stopped(
    together: Together, alone: Path, tmp_path: Path
) -> None:
    run, chosen = tmp_path / "run", random.Random(20)
    options = [*together.options(run, "parallel.zero=2"), "--resume", "auto"]
    ranks = together.start(2, options)
    await_step(ranks, run, chosen.randrange(2, 6))
    ranks[0].kill()
    require_loss(ranks[1].wait())
    options = [*together.options(run, "parallel.zero=3"), "--resume", "auto"]
    ranks = together.start(2, options)
    await_step(ranks, run, chosen.randrange(7, 11))
    ranks[1].send_signal(signal.SIGTERM)
    ends = [rank.wait() for rank in ranks]
    assert [end.code for end in ends] == [128 + signal.SIGTERM] * 2, ends
    assert sum("everything is saved" in end.err for end in ends) == 1
    saved = RunDirectory.open(run).pointer("latest")
    assert saved == max(row["step"] for row in rows(run))
    ends = together.run(2, options)
    assert [end.code for end in ends] == [0, 0], ends
    require_same_course(alone, run)


def require_loss(other: Ended) -> None:
    """A rank ended because another one was killed, and said so."""
    assert other.code != 0
    assert "other ranks were lost" in other.err or "Another rank" in other.err


def test_a_pipeline_is_killed_and_goes_on_in_another_order(together: Together, alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = together.start(2, together.options(run, "parallel.pipeline=2", "training.verify_interval=3"))
    await_step(ranks, run, 5)
    ranks[1].kill()
    ranks[1].wait()
    require_loss(ranks[0].wait())
    order = ["parallel.pipeline=2", "parallel.schedule=gpipe", "parallel.zero=1"]
    ends = together.run(2, ["train", "--resume", str(run), "--device", "cpu", "--quiet", *order])
    assert [end.code for end in ends] == [0, 0], ends
    require_same_course(alone, run)
    require_same_analyses(alone, run)


def require_same_analyses(one: Path, other: Path) -> None:
    """One process measures the same at the last checkpoint of both, on however many ranks they were trained."""
    requests = [RunAnalysisRequest(run, device="cpu") for run in (one, other)]
    # A run of ranks may have smaller micro-batches, of which the rows are taken.
    first, second = (analyze_run(each, "sharpness", lambda run: sharpness_of(run, rows=1)) for each in requests)
    assert second.sharpness.share == pytest.approx(first.sharpness.share, rel=1e-2)
    assert second.response.losses[0] == pytest.approx(first.response.losses[0], rel=2e-4)
    noise = [analyze_run(each, "noise", lambda run: noise_of(run, batches=2)).scale.rows for each in requests]
    assert noise[1] == pytest.approx(noise[0], rel=1e-2)
    networks = [CoordinatesRequest(run, (8, 16, 32), 1, options={"device": "cpu"}) for run in (one, other)]
    checked = [check_coordinates(each) for each in networks]
    assert checked[1].places == checked[0].places and checked[1].sizes.isfinite().all()  # of other rows


def test_what_does_not_fit_is_said_once(together: Together, tmp_path: Path) -> None:
    cases = [
        (["parallel.data=4"], "parallel.data = 4 asks for 4 processes, and there are 2"),
        (["training.global_batch_size=9"], "9 rows of a step .* cannot be shared evenly by 2 data ranks"),
        (["training.micro_batch_size=8"], "makes 1 micro-batches of .*, which 2 data ranks cannot share evenly"),
        (["model.num_heads=5"], "num_heads"),
        (["parallel.tensor=2", "model.max_seq_len=33"], "Rows of 33 tokens .* cannot be shared evenly"),
        (["parallel.context=2", "parallel.context_method=ring"], "data.packing = true joins several"),
        (["parallel.pipeline=2", "parallel.schedule=interleaved"], "num_layers = 2 are too few for 4 stages"),
    ]
    started = [
        together.start(2, together.options(tmp_path / str(number), *settings))
        for number, (settings, _) in enumerate(cases)
    ]
    for (_, words), ranks in zip(cases, started, strict=True):
        ends = [rank.wait() for rank in ranks]
        assert re.search(words, one_error(ends)), ends
    assert not list(tmp_path.iterdir())


def test_ranks_that_were_given_different_settings_do_not_start(together: Together, tmp_path: Path) -> None:
    options = together.options(tmp_path / "run")
    ends = together.run(2, options, rank_1=[*options, "seed=1"])
    said = one_error(ends)
    assert "Rank 1 of 2" in said
    assert "settings given here are not those of the first rank" in said


def test_ranks_of_other_code_do_not_start(together: Together, tmp_path: Path) -> None:
    package = tmp_path / "sheepop"
    shutil.copytree(Path(sheepop.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    changed, measured = package / "core" / "facts.py", package / "parallel" / "ranks.py"
    changed.write_text(f"{changed.read_text()}# otherwise\n")
    program = f"import sheepop.parallel.ranks as ranks; ranks.__file__ = {str(measured)!r}; {COMMAND}"
    said = one_error(together.run(2, together.options(tmp_path / "run"), program_1=program))
    assert "Rank 1 of 2" in said and "The files of SheepOp here are not those of the first rank" in said
    assert not (tmp_path / "run").exists()


def test_ranks_with_other_data_do_not_start(together: Together, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("one", "other")]
    for number, place in enumerate(places):
        text = place / "text"
        text.mkdir(parents=True)
        for file in range(30):
            (text / f"{file}.txt").write_text(f"Sheep {file} of flock {number} are here.\n" * 9)
        built = together.alone(["data", "build", str(text), "--output", str(place / "corpus"), "--quiet", *_SMALL])
        assert built.code == 0, built.err
    options = replace(together, text=Path("corpus")).options(tmp_path / "run")
    programs = {f"program_{n}": f"import os; os.chdir({str(place)!r}); {COMMAND}" for n, place in enumerate(places)}
    said = one_error(together.run(2, options, **programs))
    assert re.search(r"Rank 1 of 2.*The data in .*corpus is not what this run was started with", said), said


_POLICY = ["training.micro_batch_size=2", "training.warmup_steps=0", "training.schedule=constant"]
_METHODS = {
    "sft": ["tuning.lora={}"],
    "full sft": ["data.packing=false"],
    "dpo": [],
    "dpo with lora": ["tuning.lora={}"],
    "reward": [],
    # Groups of equal rewards are left out, so that some ranks have micro-batches without an answer.
    "grpo": [
        "tuning.grpo.max_new_tokens=5",
        "tuning.grpo.group_size=2",
        "tuning.grpo.epochs=2",
        "tuning.grpo.equal_groups=leave_out",
        *_POLICY,
    ],
    "ppo": ["tuning.ppo.max_new_tokens=5", "tuning.ppo.minibatches=2", "tuning.ppo.value_model=separate", *_POLICY],
    "distill": ["tuning.distill.max_new_tokens=5", *_POLICY],
    "ppo with lora": ["tuning.ppo.max_new_tokens=5", "tuning.ppo.minibatches=2", "tuning.lora={}", *_POLICY],
}
_TENSOR, _CONTEXT, _PIPELINE, _PIECES = (
    "parallel.tensor=2",
    "parallel.context=2",
    "parallel.pipeline=2",
    "parallel.zero=3",
)
_TUNED = [("sft", _PIPELINE), ("dpo", _TENSOR), ("grpo", _PIECES), ("ppo", _TENSOR)]
_TUNED_TOO = [
    *(("sft", layout) for layout in (_PIECES, _TENSOR, _CONTEXT)),
    *(("full sft", layout) for layout in (_PIECES, _TENSOR, _CONTEXT, _PIPELINE)),
    *(("dpo", layout) for layout in (_PIECES, _PIPELINE)),
    *(("dpo with lora", layout) for layout in (_TENSOR, _PIPELINE)),
    *(("reward", layout) for layout in (_PIECES, _TENSOR, _PIPELINE)),
    ("grpo", _TENSOR),
    ("ppo", _PIECES),
    *(("distill", layout) for layout in (_PIECES, _TENSOR)),
    *(("ppo with lora", layout) for layout in (_PIECES, _TENSOR)),
]


def other_model(like: Path, place: Path) -> Path:
    """A model with the same tokenizer and other weights."""
    loaded = load_model(like)
    save_model(place / "teacher", build_model(loaded.config, seed=9), loaded.tokenizer, {})
    return place / "teacher"


@pytest.mark.parametrize(
    ("name", "layout"), [*_TUNED, *(pytest.param(*each, marks=pytest.mark.campaign) for each in _TUNED_TOO)]
)
def test_two_ranks_tune_as_one_process_does(
    together: Together, alone: Path, tmp_path: Path, name: str, layout: str
) -> None:
    method = next(word for word in ("sft", "dpo", "reward", "grpo", "ppo", "distill") if word in name)
    examples: list[dict[str, Any]] = []
    for number in range(40):
        asked, answer = {"role": "user", "content": "Sheep"}, {"role": "assistant", "content": f"{number}"}
        pair = {"prompt": f"Sheep{number}", "chosen": f"number {number}", "rejected": "fence"}
        examples.append({"messages": [asked, answer]} if method == "sft" else pair)
    data, judge = tmp_path / "rows.jsonl", tmp_path / "judge.py"
    data.write_text("".join(json.dumps(each) + "\n" for each in examples))
    judge.write_text("def reward(prompt, completion, **fields):\n    return completion.count('e') / 5\n")
    settings = [f"tuning.method={method}", *_METHODS[name]]
    settings += [f"tuning.{method}.reward={judge}"] if method in ("ppo", "grpo") else []
    settings += [f"tuning.distill.teacher={other_model(alone, tmp_path)}"] if method == "distill" else []
    more = [*settings, "training.max_steps=4", "training.eval_interval=2", "training.global_batch_size=8"]
    common = ["train", "--fork", str(alone), "--data", str(data), "--device", "cpu", "--quiet", *more]
    common += ["training.precision=fp32", "training.log_interval=1", "data.validation_fraction=0.2"]
    one, two = tmp_path / "one", tmp_path / "two"
    done = together.alone([*common, "--output", str(one)])
    assert done.code == 0, done.err
    ends = together.run(2, [*common, "--output", str(two), layout])
    assert [end.code for end in ends] == [0, 0], ends
    for a, b in zip(rows(one), rows(two), strict=True):
        assert (a["step"], a["split"]) == (b["step"], b["split"])
        for key in {
            "loss",
            "grad_norm",
            "margin",
            "reward",
            "length",
            "divergence",
            "value_loss",
            "objective",
        } & a.keys():
            assert b[key] == pytest.approx(a[key], rel=2e-4, abs=1e-6), (a["step"], key)
    assert load_model(two).provenance["step"] == load_model(one).provenance["step"]


def test_ranks_that_hang_write_down_where_they_stand(together: Together, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = [*together.options(run, "parallel.patience=4", "parallel.zero=3")]
    sleeps = ["time.sleep(60)", "sheepop.train.step", "StepRunner.update", "4", *options]
    ranks = together.start(2, options, program_1=DISTURBED, rank_1=sleeps)
    ends = [rank.wait() for rank in ranks]
    assert [end.code for end in ends] == [1, 1]
    assert sum(end.err.count("Step 4 has taken more than 4 seconds") for end in ends) == 1, ends
    stacks = [(run / "stacks" / f"rank-{rank:05}.txt").read_text() for rank in range(2)]
    assert "in disturbed" in stacks[1]
    assert "in take" in stacks[0] or "in gradients" in stacks[0] or "in update" in stacks[0] or "greatest" in stacks[0]


def test_a_port_that_another_program_uses_is_named(together: Together, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        (rank, *others) = together.start(2, together.options(tmp_path / "run"), port=port)
        try:
            ended = rank.wait()
        finally:
            for other in others:
                other.kill()
    assert ended.code == 2
    assert f"127.0.0.1:{port}" in ended.err
    assert "no other program uses the port" in ended.err
