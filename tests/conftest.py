"""Settings of the whole suite: one computing thread per test process, no way out to the network; a tiny run."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from . import unflushed  # noqa: F401
from .command_line import Launcher

# Toy models gain nothing from threads, and test processes that run side by side would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Collection keeps all that it makes, so that no collection of garbage needs to walk through it.
gc.disable()
# Where Triton is installed and there is no GPU, its interpreter runs kernels; it asks when it is first loaded.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The processes of one test run share what they measure of the machine and import, and leave the user's own cache alone.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _MEASUREMENTS = tempfile.TemporaryDirectory(prefix="sheepop-measurements-")
    os.environ["SHEEPOP_MEASUREMENTS"] = str(Path(_MEASUREMENTS.name) / "measurements.json")
    os.environ["SHEEPOP_MODELS"] = str(Path(_MEASUREMENTS.name) / "models")

# A shell ignores Ctrl-C for what it runs in the background, and whatever that starts; the tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test that fails because the machine is busy says nothing about the code.
# Where CI is set, as it is on the machines that judge a change, every run draws the same examples.
settings.register_profile("sheepop", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("sheepop")


def pytest_xdist_auto_num_workers() -> int:
    """One test process more than there are cores: many tests wait, for a disk or for a process of theirs."""
    return (os.cpu_count() or 1) + 1


# Files and folders whose tests take longest. Named first on pytest's command line, they would be sorted by name again.
_LONGEST = (
    "tests/parallel/test_launch.py",
    "tests/parallel/test_sharding.py",
    *(f"tests/{folder}/" for folder in ("parallel", "faults", "e2e", "jobs", "train", "serve", "generate", "parity")),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, so that no test process is left alone with one of them at the end."""
    ranks = {place: rank for rank, place in enumerate(_LONGEST)}
    items.sort(key=lambda item: min((ranks[p] for p in _LONGEST if item.nodeid.startswith(p)), default=len(ranks)))


def pytest_collection_finish() -> None:
    """Thousands of tests stay until the end: no collection of garbage needs to walk through them again."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # as often as Python does by itself, it takes a tenth of the time of many tests
    gc.enable()


@pytest.fixture(scope="session")
def tiny() -> tuple[str, ...]:
    """Settings of a model that trains in a second; none that the recipe would choose is left open."""
    return (
        "tokenizer.algorithm=char",
        "model.position_encoding=sinusoidal",
        "model.norm=layernorm",
        "model.activation=gelu",
        "model.bias=true",
        "model.dropout=0.1",
        "model.ngrams=null",
        "model.short_convolution=null",
        "model.d_model=16",
        "model.num_layers=1",
        "model.num_heads=2",
        "model.max_seq_len=32",
        "training.optimizer=adamw",
        "training.global_batch_size=4",
        "training.max_steps=6",
        "training.precision=fp32",
        "training.sample_prompts=[]",
    )


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty small text files."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(f"Sheep number {number} jumps over the fence.\n" * 4)
    return folder


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher(Path(os.environ["SHEEPOP_MEASUREMENTS"]).with_name("launcher"))
    yield launcher
    launcher.close()


@pytest.fixture
def disk_order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed, by its name, and every rename, in the order in which they happen."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("the names of open files are read from /proc")
    events: list[str] = []
    fsync = os.fsync

    def record_fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    def recording(move: Callable[..., Any]) -> Callable[..., Any]:
        def record(source: Any, target: Any, **options: Any) -> Any:
            events.append(f"{Path(source).name} -> {Path(target).name}")
            return move(source, target, **options)

        return record

    monkeypatch.setattr(os, "fsync", record_fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, recording(getattr(os, name)))
    return events
