"""The same build on two Ray nodes, and when one of them is killed in the middle: the same bytes as on one machine."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from sheepop.core.console import Console
from sheepop.core.errors import TokenizerError
from sheepop.data.pipeline.engine import RayEngine, run_pass

from ...command_line import Launcher
from ...two_nodes import NODE, two_nodes

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'sheepop[cluster]'"
    ),
]

NOT_COMPARED = {"build.json", "report.html", "checksums.json"}  # they hold times, or the hashes of files that do
WORDS = [a + b for a in ("sheep", "stone", "river", "lamp", "field", "wind") for b in ("", "s", "fold", "side", "ward")]
SECONDS = 200
PARTS = 3


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parts of little text: each is filled up by white space. Some documents are equal or nearly so."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(7)
    first = ""
    for number in range(PARTS):
        place = folder / str(number)
        place.mkdir()
        sentences = [" ".join(draw.choices(WORDS, k=12)).capitalize() + "." for _ in range(400)]
        content = "\n".join(sentences) + f"\nWrite to shepherd{number}@sheep-farm.org about it.\n"
        first = first or content
        (place / "a.txt").write_text(content)
        (place / "b.txt").write_text(first.replace("Sheep", "Goat", 1) if number % 2 else first)
        for line, sentence in enumerate(sentences[:20]):
            (place / f"c{line}.txt").write_text(sentence)
        (place / "d.txt").write_text(" " * (1_900_000 - sum(file.stat().st_size for file in place.iterdir())))
    (folder / "broken.txt").write_bytes(b"\0 and no text")
    return folder


def command(text: Path, output: Path, *more: str) -> list[str]:
    stages = "data.clean.stages=[formatting, pii, exact_duplicates, near_duplicates]"
    places = [str(text), "--output", str(output), "--quiet"]
    return ["data", "build", *places, "tokenizer.vocab_size=300", stages, *more]


def content(corpus: Path) -> dict[str, bytes]:
    files = (path for path in sorted(corpus.rglob("*")) if path.is_file())
    return {str(p.relative_to(corpus)): p.read_bytes() for p in files if p.name not in NOT_COMPARED}


def run_to_end(launcher: Launcher, arguments: list[str], **environment: str) -> None:
    done = launcher.run(*arguments, environment={**os.environ, **environment})
    assert done.code == 0, done.err


@pytest.fixture(scope="module")
def on_one_machine(launcher: Launcher, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a build without any other process gives."""
    output = tmp_path_factory.mktemp("local") / "corpus"
    run_to_end(launcher, command(text, output, "--workers", "0"))
    return content(output)


@pytest.fixture
def cluster() -> Iterator[Any]:
    with two_nodes() as found:
        yield found


# A build each of whose tasks in the first pass writes a note when its part is written but not yet in its place. The
# first one then goes on; the others wait for a lock on the gate, which the test holds.
HELD = """
import sys
from sheepop.data.pipeline import engine
control = sys.argv.pop(1)
def done(task, rank):
    import fcntl, os
    directory, mark, work = task.args
    def held(rank, staging):
        work(rank, staging)
        if directory.name != "pass-0":
            return
        with open(f"{control}/notes", "a") as notes:
            fcntl.flock(notes, fcntl.LOCK_EX)
            is_first = not os.path.getsize(notes.name)
            notes.write(f"{rank} {os.getpid()}\\n")
        if not is_first:
            with open(f"{control}/gate") as gate:
                fcntl.flock(gate, fcntl.LOCK_SH)
    return task.func(directory, mark, held, rank)
engine._done = done
from sheepop.__main__ import main
main()
"""


class Build:
    """A build on the cluster that has one finished part and gets no further, until the gate is opened."""

    def __init__(self, launcher: Launcher, arguments: list[str], output: Path, address: str) -> None:
        self.parts = output.with_name(f".{output.name}.building") / "pass-0"
        self._control = output.with_name(f"{output.name}, control")
        self._control.mkdir()
        self._gate = (self._control / "gate").open("w")
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        self._start = partial(
            launcher.start, self._control, *arguments, program=HELD, environment={**os.environ, "RAY_ADDRESS": address}
        )
        self.process = self._start()

    def __enter__(self) -> Build:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self._gate.close()

    def noted(self) -> list[tuple[int, int]]:
        """The part and the process of every task that has written a part, in this order."""
        notes = self._control / "notes"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [(int(rank), int(process)) for rank, process in map(str.split, lines)]

    def await_parts(self) -> None:
        """Waits until one part is finished and each node holds another one."""
        # A node has one core: its second task begins when its first one has ended.
        while len(self.noted()) < PARTS and self.process.poll() is None:
            time.sleep(0.005)
        assert (ended := self.process.poll()) is None, ended
        assert [path.name for path in self.parts.glob("0*")] == [f"{self.noted()[0][0]:05d}"]
        assert len(list(self.parts.glob(".0*.partial-*"))) == PARTS - 1

    def open_gate(self) -> None:
        """Lets all parts be finished."""
        self._gate.close()

    def await_end_of_tasks(self) -> None:
        """Waits until no process of the cluster works for the killed build."""
        held = [psutil.Process(process) for _, process in self.noted()[1:] if psutil.pid_exists(process)]
        _, alive = psutil.wait_procs(held, timeout=SECONDS)
        assert not alive

    def resume(self) -> list[int]:
        """Runs the same command to its end; returns the parts that it wrote."""
        before = len(self.noted())
        done = self._start().wait(SECONDS)
        assert done.code == 0, done.err
        return [rank for rank, _ in self.noted()[before:]]


def test_two_nodes_give_the_same_bytes_even_when_one_is_killed(
    cluster: Any,
    launcher: Launcher,
    text: Path,
    on_one_machine: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = cluster.address
    run_to_end(launcher, command(text, tmp_path / "corpus", "--engine", "ray"), RAY_ADDRESS=address)
    assert content(tmp_path / "corpus") == on_one_machine

    # A node is lost and the build goes on with the other.
    output = tmp_path / "goes on"
    with Build(launcher, command(text, output, "--engine", "ray"), output, address) as build:
        build.await_parts()
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        build.open_gate()
        assert (ended := build.process.wait(SECONDS)).code == 0, ended.err
    assert content(output) == on_one_machine
    written = [rank for rank, _ in build.noted()]
    assert written.count(written[0]) == 1 and sorted(written.count(rank) for rank in range(PARTS)) == [1, 1, 2]

    # A node is lost and the build with it; the same command goes on with what is finished.
    cluster.add_node(**NODE)
    cluster.wait_for_nodes(timeout=60)
    output = tmp_path / "resumed"
    with Build(launcher, command(text, output, "--engine", "ray"), output, address) as build:
        build.await_parts()
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        build.process.kill()
        build.await_end_of_tasks()
        assert len(list(build.parts.glob("0*"))) == 1
        build.open_gate()
        assert sorted(build.resume()) == sorted(rank for rank, _ in build.noted()[1:PARTS])
    assert content(output) == on_one_machine
    assert not list(tmp_path.glob(".*")), "the workplaces are gone"

    # An error of a task is told as what it was, and what else is done stays.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("RAY_ADDRESS", address)
    import pass_work  # type: ignore[import-not-found]
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(pass_work)  # which nodes do not have
    control, squares = tmp_path / "control", tmp_path / "squares"
    control.mkdir()
    for what, kind, message in (
        ("refuse", TokenizerError, "^part 1 cannot be had"),
        ("fail", RuntimeError, "is broken"),
    ):
        (control / "order-1").write_text(what)
        with pytest.raises(kind, match=message):
            run_pass(RayEngine(1), squares, pass_work.Noted(control), [1.0] * 3, Console.silent(), "Squaring")
    (control / "order-1").unlink()
    run_pass(RayEngine(), squares, pass_work.Noted(control), [1.0] * 3, Console.silent(), "Squaring")
    assert [(squares / f"{rank:05d}" / "square").read_text() for rank in range(3)] == ["0", "1", "4"]
