"""A short run by the command line that nothing disturbs, and processes like it that are disturbed at a chosen point."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from ..command_line import Ended, Launcher, Started, cold

SETTINGS = (
    "tokenizer.algorithm=char",
    "model.d_model=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.max_seq_len=32",
    "model.position_encoding=sinusoidal",
    "model.norm=layernorm",
    "model.activation=gelu",
    "model.bias=true",
    "model.dropout=0.1",
    "model.ngrams.rows=64",
    "model.short_convolution=3",
    "training.global_batch_size=4",
    "training.micro_batch_size=2",
    "training.max_steps=32",
    "training.precision=fp32",
    "training.log_interval=1",
    "training.checkpoint_interval=5",
    "training.eval_interval=8",
    "training.sample_interval=7",
    "training.sample_prompts=[Sheep]",
    "training.sample_tokens=8",
    "training.optimizer=muon",
)
TIMING = ("seconds", "tokens_per_second", "mfu", "memory_bytes", "busy_cores")

# Does something of its own the moment a function is called for the nth time, and then what the function does.
DISTURBED = """
import os, signal, sys, threading, time
from importlib import import_module
action, module, name, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
owner = import_module(module)
*path, leaf = name.split(".")
for part in path:
    owner = getattr(owner, part)
original, calls = getattr(owner, leaf), 0
def disturbed(*arguments, **options):
    global calls
    calls += 1
    if calls == count:
        exec(action)
    return original(*arguments, **options)
setattr(owner, leaf, disturbed)
sys.argv = ["sheepop", *sys.argv[5:]]
from sheepop.__main__ import main
main()
"""


@dataclass(frozen=True)
class Halted:
    """A process that stands still."""

    process: Started

    def go_on(self) -> tuple[int, str]:
        """Lets it go on to its end: the exit code and what it said."""
        self.process.send_signal(signal.SIGCONT)
        done = self.process.wait()
        return done.code, done.err


@dataclass(frozen=True)
class Reference:
    """The run that nothing disturbed, and commands for others that are to become equal to it."""

    text: Path
    path: Path
    launcher: Launcher
    settings: tuple[str, ...] = SETTINGS

    def made(self, text: Path, path: Path, *settings: str) -> Reference:
        """Another such run, on `text`, with `settings` in place of the usual ones where they differ."""
        made = Reference(text, path, self.launcher, (*SETTINGS, *settings))
        done = self.launcher.run(*made.options(path))
        assert done.code == 0, done.err
        return made

    def options(self, run: Path, *settings: str, data: Path | None = None, resume: bool = False) -> list[str]:
        """What ``sheepop`` is told for a run like this one."""
        places = ["--data", str(data or self.text), "--output", str(run), "--device", "cpu", "--quiet"]
        return ["train", *places, *self.settings, *settings, *(["--resume", "auto"] if resume else [])]

    def disturbed(self, action: str, module: str, name: str, count: int, options: list[str]) -> Started:
        """A process in which the statement `action` is executed at the call number `count` of a function."""
        return self.launcher.start(action, module, name, count, *options, program=DISTURBED)

    def killed(self, module: str, name: str, count: int, run: Path, *, resume: bool = False) -> str:
        """Begins a run, or goes on with it, and kills it at the call number `count` of a function; what was said."""
        options = self.options(run, resume=resume)
        done = self.disturbed("os.kill(os.getpid(), signal.SIGKILL)", module, name, count, options).wait()
        assert done.code == -signal.SIGKILL, done.err
        return done.err

    @contextmanager
    def halted(self, module: str, name: str, count: int, options: list[str]) -> Iterator[Halted]:
        """A process that stands still from the call number `count` of a function on, until it may go on."""
        # Sent to the thread that makes the call: it gets no further, where others might for a moment.
        stop = "signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)"
        process = self.disturbed(stop, module, name, count, options)
        try:
            process.wait_until_stopped()
            yield Halted(process)
        finally:
            process.kill()

    def resume(self, run: Path, **options: Any) -> str:
        """Goes on with a run to its end, at which it must be equal to this one; what was said on the way."""
        done = self.finished(self.options(run, resume=True, **options))
        assert done.code == 0, done.err
        self.require_equal(run)
        return done.err

    def finished(self, options: list[str]) -> Ended:
        """What became of ``sheepop`` with these `options`."""
        return self.launcher.run(*options)

    def require_equal(self, run: Path) -> None:
        """The run at `run` left the same bits as this one, the times aside."""
        assert rows(self.path / "metrics.jsonl") == rows(run / "metrics.jsonl")
        assert (self.path / "samples.jsonl").read_bytes() == (run / "samples.jsonl").read_bytes()
        assert names(self.path / "checkpoints") == names(run / "checkpoints")
        for name in ("latest", "best"):
            assert (self.path / "checkpoints" / name).read_text() == (run / "checkpoints" / name).read_text()
        last = (run / "checkpoints" / "latest").read_text().strip()
        for file in ("model.safetensors", "state/optimizer.safetensors"):
            first, second = (load_file(path / "checkpoints" / last / file) for path in (self.path, run))
            assert first.keys() == second.keys()
            for name, array in first.items():
                assert array.tobytes() == second[name].tobytes(), name


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def rows(file: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMING} for row in found]


@pytest.fixture(scope="session")
def reference(text_folder: Path, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A run by a process that loads its libraries itself, as all others then prove equal to; one for all workers."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    reference = Reference(text_folder, place / "reference", launcher)
    with (place / "reference.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (reference.path / "report.html").is_file():  # which is written last
            done = cold(*reference.options(reference.path))
            assert done.code == 0, done.err
    return reference


@pytest.fixture(scope="session")
def short_reference(reference: Reference, text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A run of few checkpoints, all of which but one are removed again."""
    settings = ("training.max_steps=12", "training.eval_interval=6", "training.keep_checkpoints=1")
    return reference.made(text_folder, tmp_path_factory.mktemp("short") / "run", *settings)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of eight megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)
