"""A run that is killed, wherever it stands, goes on to the same bits as the run that was not."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

SETTINGS = (
    "tokenizer.algorithm=char",
    "model.d_model=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.max_seq_len=32",
    "training.global_batch_size=4",
    "training.micro_batch_size=2",
    "training.max_steps=40",
    "training.precision=fp32",
    "training.log_interval=1",
    "training.checkpoint_interval=5",
    "training.eval_interval=8",
    "training.sample_interval=7",
    "training.sample_prompts=[Sheep]",
    "training.sample_tokens=8",
    "training.optimizer=muon",
)
TIMING = ("seconds", "tokens_per_second", "mfu")

# Replaces one function by one that ends the process without a word, the moment it is called for the nth time.
KILLER = """
import os, signal, sys
from importlib import import_module
module, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
owner = import_module(module)
*path, leaf = name.split(".")
for part in path:
    owner = getattr(owner, part)
original, calls = getattr(owner, leaf), 0
def killing(*arguments, **options):
    global calls
    calls += 1
    if calls == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **options)
setattr(owner, leaf, killing)
sys.argv = ["sheepop", *sys.argv[4:]]
from sheepop.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"Sheep number {number} jumps over the fence.\n" * 5)
    return folder


def command(text: Path, run: Path, *, resume: bool = False) -> list[str]:
    options = ["train", "--data", str(text), "--output", str(run), "--device", "cpu", "--quiet", *SETTINGS]
    return options + (["--resume", "auto"] if resume else [])


def sheepop(arguments: list[str], *before: str) -> subprocess.CompletedProcess[str]:
    program = ["-c", KILLER, *before] if before else ["-m", "sheepop"]
    return subprocess.run(
        [sys.executable, *program, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def unbroken(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("unbroken") / "run"
    done = sheepop(command(text, run))
    assert done.returncode == 0, done.stderr
    return run


def rows(file: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMING} for row in found]


def assert_equal_runs(one: Path, other: Path) -> None:
    assert rows(one / "metrics.jsonl") == rows(other / "metrics.jsonl")
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    for name in ("latest", "best"):
        assert (one / "checkpoints" / name).read_text() == (other / "checkpoints" / name).read_text()
    for file in ("model.safetensors", "state/optimizer.safetensors"):
        first, second = (load_file(run / "checkpoints" / "step-00000040" / file) for run in (one, other))
        assert first.keys() == second.keys()
        for name, array in first.items():
            assert array.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize(
    ("module", "name", "count"),
    [
        ("torch.autograd", "backward", 2 * 26 + 1),  # between the two micro-batches of step 27
        ("sheepop.train.optimizers.muon", "Muon.step", 13),  # in the update of step 13
        ("sheepop.train.loop", "Trainer._validated", 3),  # before the third validation
        ("sheepop.core.files", "write_checksums", 5),  # in a checkpoint that is almost written
        ("sheepop.checkpoint.run_directory", "RunDirectory._point", 6),  # between a checkpoint and its pointer
        ("sheepop.checkpoint.run_directory", "remove_tree", 2),  # while old checkpoints are removed
        ("sheepop.train.metrics", "JsonLines.append", 30),  # before a line of the log
    ],
)
def test_killed_in_the_middle_of_anything(
    text: Path, unbroken: Path, tmp_path: Path, module: str, name: str, count: int
) -> None:
    run = tmp_path / "run"
    killed = sheepop(command(text, run), module, name, str(count))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = sheepop(command(text, run, resume=True))
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_runs(unbroken, run)


def test_killed_before_the_first_step_a_run_starts_again(text: Path, unbroken: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed = sheepop(command(text, run), "sheepop.jobs.train", "_start", "1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = sheepop(command(text, run, resume=True))
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_runs(unbroken, run)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_interrupted_after_twenty_steps(
    text: Path, unbroken: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "sheepop", *command(text, run)], stderr=subprocess.PIPE, text=True
    )
    log = run / "metrics.jsonl"
    while process.poll() is None and not (log.is_file() and '"step": 20,' in log.read_text()):
        pass
    process.send_signal(number)
    _, messages = process.communicate(timeout=120)
    assert process.returncode == code, messages
    assert "everything is saved" in messages
    assert "Traceback" not in messages
    resumed = sheepop(command(text, run, resume=True))
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_runs(unbroken, run)


# Replaces the functions that make changes durable by ones that end the process before or after the nth call of any.
AT_THE_DISK = """
import os, signal, sys
count, is_after = int(sys.argv[1]), sys.argv[2] == "after"
calls = 0
def killing(original):
    def call(*arguments, **options):
        global calls
        calls += 1
        mine = calls
        if mine == count and not is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if mine == count and is_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call
for name in ("rename", "replace", "fsync"):
    setattr(os, name, killing(getattr(os, name)))
sys.argv = ["sheepop", *sys.argv[3:]]
from sheepop.cli.main import main
try:
    main()
finally:
    if count == 0:
        print(calls)
"""


@pytest.fixture(scope="module")
def durable_changes(text: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many renames and flushes to the disk a whole run makes."""
    run = tmp_path_factory.mktemp("counted") / "run"
    program = [sys.executable, "-c", AT_THE_DISK, "0", "before", *command(text, run)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=True)
    return int(done.stdout.split()[-1])


def assert_killed_at_the_disk_it_goes_on(text: Path, unbroken: Path, run: Path, count: int, when: str) -> None:
    program = [sys.executable, "-c", AT_THE_DISK, str(count), when, *command(text, run)]
    killed = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = sheepop(command(text, run, resume=True))
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_runs(unbroken, run)


@pytest.mark.parametrize(("share", "when"), [(0.35, "before"), (0.6, "after"), (0.85, "before")])
def test_killed_in_a_rename_or_a_flush(
    text: Path, unbroken: Path, durable_changes: int, tmp_path: Path, share: float, when: str
) -> None:
    count = round(share * durable_changes)
    assert_killed_at_the_disk_it_goes_on(text, unbroken, tmp_path / "run", count, when)


@pytest.mark.campaign
def test_killed_in_every_rename_and_flush(text: Path, unbroken: Path, durable_changes: int, tmp_path: Path) -> None:
    for count in range(1, durable_changes + 1):
        for when in ("before", "after"):
            run = tmp_path / f"run-{count}-{when}"
            assert_killed_at_the_disk_it_goes_on(text, unbroken, run, count, when)
            shutil.rmtree(run)


def kill_somewhere(text: Path, unbroken: Path, run: Path, seconds: float) -> bool:
    """Kills a run after so many seconds and resumes it to the end; false when it had ended before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sheepop", *command(text, run)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    was_killed = process.returncode == -signal.SIGKILL
    resumed = sheepop(command(text, run, resume=True))
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_runs(unbroken, run)
    return was_killed


@pytest.fixture(scope="module")
def lifetime(text: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds that a whole run takes."""
    run = tmp_path_factory.mktemp("timed") / "run"
    started = time.monotonic()
    assert sheepop(command(text, run)).returncode == 0
    return time.monotonic() - started


@pytest.mark.parametrize("share", [0.55, 0.75])
def test_killed_at_some_instant(text: Path, unbroken: Path, lifetime: float, tmp_path: Path, share: float) -> None:
    kill_somewhere(text, unbroken, tmp_path / "run", share * lifetime)


@pytest.mark.campaign
def test_killed_at_a_hundred_instants(text: Path, unbroken: Path, lifetime: float, tmp_path: Path) -> None:
    draw, kills = random.Random(3), 0
    for attempt in range(200):
        run = tmp_path / f"run-{attempt}"
        kills += kill_somewhere(text, unbroken, run, draw.uniform(0.1, lifetime))
        shutil.rmtree(run)
        if kills == 100:
            return
    raise AssertionError(f"only {kills} of 200 runs were killed before they ended")


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_latest_checkpoint_costs_only_the_work_since_the_one_before(
    text: Path, unbroken: Path, tmp_path: Path, damage: str
) -> None:
    run = tmp_path / "run"
    killed = sheepop(command(text, run), "sheepop.train.loop", "Trainer._gradients", "29")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip() / "model.safetensors"
    content = bytearray(latest.read_bytes())
    content[len(content) // 2] ^= 16
    latest.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    resumed = sheepop(command(text, run, resume=True))
    assert resumed.returncode == 0, resumed.stderr
    assert "model.safetensors is damaged" in resumed.stderr
    assert_equal_runs(unbroken, run)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    records = [{"source": f"double {number}", "target": str(2 * number)} for number in range(60)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


PAIRS = (
    "model.architecture=encoder_decoder",
    "model.num_layers=1",
    "training.label_smoothing=0.1",
    "training.sample_prompts=[double 7]",
)


def test_killed_while_it_learns_pairs(pairs: Path, tmp_path: Path) -> None:
    """Sources, targets and their order come again as they were: all that is remembered of them is the step."""
    unbroken, run = tmp_path / "unbroken", tmp_path / "run"
    done = sheepop([*command(pairs, unbroken), *PAIRS])
    assert done.returncode == 0, done.stderr
    killed = sheepop([*command(pairs, run), *PAIRS], "torch.autograd", "backward", str(2 * 26 + 1))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*"))[-1] == "step-00000025"
    resumed = sheepop([*command(pairs, run, resume=True), *PAIRS])
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_runs(unbroken, run)
