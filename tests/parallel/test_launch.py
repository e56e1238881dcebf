"""What starts ranks: torch's agent on this machine, a script for Slurm, a Ray cluster."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from sheepop.checkpoint import RunDirectory
from sheepop.jobs.launch import RankProcess

from ..command_line import COMMAND, FORKING, Started, in_process
from .conftest import Together, rows

# Ranks that torch's agent starts are forks of it.
RANKS_FORKED = f"""{FORKING}
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
subprocess_handler.Popen = Forked
{COMMAND}
"""
# Ranks that other launchers start load all libraries anew: here only what training needs.
LEAN = ["training.sinks=[]", "training.sample_prompts=[]", "data.clean.stages=[]"]
STEPS = [*LEAN, "training.max_steps=30", "training.checkpoint_interval=5", "training.eval_interval=30"]


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(process: Started, condition: Callable[[], bool]) -> None:
    """Waits until `condition` holds, which it must before the process ends."""
    while not condition():
        assert process.poll() is None, process.poll()
        time.sleep(0.01)


def ranks_of(run: Path) -> list[int]:
    """The processes that train a run, whoever has started them."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            if words[1:4] == ["-m", "sheepop", "train"] and str(run) in words:
                found.append(int(file.parent.name))
    return found


def test_a_run_whose_rank_is_killed_goes_on_by_itself_and_ctrl_c_saves_it(together: Together, tmp_path: Path) -> None:
    run = tmp_path / "run"
    latest = run / "checkpoints" / "latest"
    options = together.options(run, "parallel.zero=1", *LEAN, "training.max_steps=2000", "training.eval_interval=500")
    process = together.launcher.start("launch", "--processes", "2", "--restarts", "1", *options, program=RANKS_FORKED)
    wait_until(process, latest.exists)
    first = set(children_of(process.pid))
    os.kill(max(first), signal.SIGKILL)
    wait_until(process, lambda: first.isdisjoint(children_of(process.pid)))
    reached = latest.stat().st_mtime_ns
    wait_until(process, lambda: latest.stat().st_mtime_ns != reached)
    for pid in [*children_of(process.pid), process.pid]:  # as a terminal does
        os.kill(pid, signal.SIGINT)
    ended = process.wait()
    assert ended.code == 128 + signal.SIGINT, ended
    assert "A rank was lost. All of them start again" in ended.err
    assert ended.err.count("everything is saved") == 1, ended.err
    steps = [row["step"] for row in rows(run) if row["split"] == "train"]
    assert steps == list(range(1, RunDirectory.open(run).pointer("latest") + 1))


def test_the_script_for_slurm_starts_torchrun_on_every_machine(
    together: Together, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, programs = tmp_path / "run", tmp_path / "programs"
    options = together.options(run, *LEAN, "training.max_steps=4")
    printed = in_process("launch", "--engine", "slurm", "--machines", "1", "-n", "2", "--print", *options)
    assert printed.code == 0, printed.err
    assert "#SBATCH --nodes=1\n" in printed.out
    assert "#SBATCH --signal=USR1@120\n" in printed.out
    programs.mkdir()
    # What Slurm would do of it with one machine.
    for name, text in {
        "scontrol": "echo 127.0.0.1",
        "srun": 'exec "$@"',
        "sbatch": "echo Submitted batch job 7",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    slurm = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1]", "OMP_NUM_THREADS": "1"}
    script = printed.out.replace(":29500", ":0")
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, env=slurm, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert RunDirectory.open(run).pointer("latest") == 4
    assert in_process("launch", "--engine", "slurm", "-n", "2", *options).out == "Submitted batch job 7\n"


@pytest.mark.system
def test_a_ray_cluster_runs_the_ranks_anew_when_one_is_killed(together: Together, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    run = tmp_path / "run"
    options = together.options(run, *STEPS, "parallel.zero=3")
    own = {**os.environ, "RAY_ADDRESS": "local"}  # not one that another test has started
    more = ("--engine", "ray", "-n", "2", "--restarts", "1")
    process = together.launcher.start("launch", *more, *options, environment=own)
    wait_until(process, (run / "checkpoints" / "latest").exists)
    os.kill(max(ranks_of(run)), signal.SIGKILL)
    ended = process.wait()
    assert ended.code == 0, ended.err
    assert [row["step"] for row in rows(run) if row["split"] == "train"] == list(range(1, 31))


def test_nobody_else_gets_the_port_where_ranks_on_ray_meet() -> None:
    pytest.importorskip("ray")
    first = RankProcess()
    address, port = first.place()
    with pytest.raises(OSError, match="in use"):
        socket.create_server((address, port))
    assert TCPStore(address, port, is_master=False).compare_set("word", "", "heard") == b"heard"


def test_the_commands_of_the_page_run_on_two_processes(
    together: Together, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "parallel.md"
    lines = re.findall(r"^sheepop (launch -n 2 .*|train --resume .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["launch", "train", "launch"]
    (tmp_path / "notes").mkdir()
    for file in sorted(together.text.iterdir()):
        (tmp_path / "notes" / file.name).write_text(file.read_text())
    # A smaller model than the recipe's, shorter samples, and nothing left to measure.
    small = ["model.d_model=32", "model.num_layers=2", "model.num_heads=2", "tokenizer.vocab_size=300"]
    small += ["training.precision=fp32", "training.micro_batch_size=4"]
    lines = [[*line.split(), "training.sample_tokens=4", *(small if "--data" in line else [])] for line in lines]
    *lines, ring = lines
    for line, steps in zip(lines, (10, 15), strict=True):
        ended = together.launcher.run(*line, program=RANKS_FORKED)
        assert ended.code == 0, ended.err
        assert RunDirectory.open(tmp_path / "runs" / "two").pointer("latest") == steps
        words = "2 ranks: 2 data; every copy whole. Each holds"
        assert (f"Layout: {words}" in ended.err) == (steps == 10)
        # Picture and words belong to the last start, which the second time is on one device.
        run = RunDirectory.open(tmp_path / "runs" / "two")
        assert (run.plots / "layout.png").exists() == (steps == 10)
        report = run.report.read_text(encoding="utf-8")
        assert (f"<p>{words}" in report) == ('alt="What each rank holds' in report) == (steps == 10)
    # Its ranks are started as the launcher says, in processes that have the libraries loaded.
    printed = shlex.split(in_process("launch", "--print", *ring[1:]).out)
    ends = together.run(2, printed[printed.index("sheepop") + 1 :])
    assert [end.code for end in ends] == [0, 0], ends
    assert "2 ranks: 2 context" in ends[0].err
    assert RunDirectory.open(tmp_path / "runs" / "ring").pointer("latest") == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x"], "sheepop generate runs in one process"),
        (["-n", "2", "eval", "judge", "x"], "sheepop eval judge runs in one process. Only train, and eval perplexity"),
        (["--restarts", "1", "eval", "tasks", "x"], "An evaluation has no checkpoint to restart from"),
        (["--machines", "2", "-n", "2", "train"], "--engine local uses only this machine"),
        (["train", "--device", "cpu"], "Give the number of processes: --processes N"),
        (["--engine", "slurm", "-n", "2", "train", "--device", "cpu"], "no sbatch"),
    ],
)
def test_what_cannot_be_launched_is_refused(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = in_process("launch", *arguments)
    assert ended.code == 2
    assert words in ended.err


def test_a_run_without_a_name_gets_one_that_all_ranks_know(tmp_path: Path) -> None:
    out = in_process("launch", "-n", "2", "--print", "train", "--data", "x", "--device", "cpu").out
    assert out.startswith("torchrun --standalone --nproc-per-node 2 --max-restarts 0 -m sheepop train --data x")
    assert " --output runs/" in out
    for words in (
        ["--output", "here"],
        ["--output=here"],
        ["-o", "here"],
        ["--resume", "runs/x"],
        ["output_dir=x"],
        ["--resume=x"],
    ):
        for device in (["--device", "cpu"], ["--device=cpu", "--device", "auto"], ["device=cpu"]):
            out = in_process("launch", "-n", "2", "--print", "train", *words, *device).out
            assert out and "--output runs/2" not in out
    (tmp_path / "run.yaml").write_text("output_dir: mine\n")
    for words in (["-oruns/mine"], ["--config", str(tmp_path / "run.yaml")], [f"--config={tmp_path / 'run.yaml'}"]):
        out = in_process("launch", "-n", "2", "--print", "train", *words, "--device", "cpu").out
        assert out and "--output" not in out, words
    out = in_process("launch", "-n", "2", "--print", "train", "--resume", "auto", "--device=cpu").out
    assert "--resume auto --device=cpu --output runs/2" in out
