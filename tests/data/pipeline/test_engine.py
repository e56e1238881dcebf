"""Passes over parts: what is whole stays, the rest is done, and the first error is the error of the task itself."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import StringIO
from itertools import count
from pathlib import Path

import pytest

from sheepop.core.console import Console, Progress
from sheepop.core.errors import DataError, StorageError, TokenizerError
from sheepop.data.pipeline.engine import Engine, LocalEngine, run_pass
from sheepop.data.pipeline.workplace import clear, locked_workplace

SIZES = (0.5, 1.25, 2.0, 4.0, 8.0, 16.0)
WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Counting(Console):
    """Keeps what progress was reported: the total and every advance."""

    def __init__(self) -> None:
        super().__init__(file=StringIO())
        self.total: float | None = None
        self.advances: list[float] = []

    @contextmanager
    def progress(self, description: str, total: float | None, unit: str = "") -> Iterator[Progress]:
        assert (description, unit) == ("Squaring", "MB")
        self.total = total
        yield self

    def advance(self, amount: float = 1) -> None:
        self.advances.append(amount)

    def describe(self, detail: str) -> None:
        raise AssertionError("a pass has nothing to say behind the bar")


class Squares:
    """A pass of six tasks in a folder, with a second folder where its tasks take orders and note that they ran."""

    def __init__(self, place: Path) -> None:
        from pass_work import Noted  # type: ignore[import-not-found]

        self.directory, self.control = place / "pass", place / "control"
        self.control.mkdir()
        self._work = Noted(self.control)

    def run(self, engine: Engine) -> Counting:
        console = Counting()
        run_pass(engine, self.directory, self._work, SIZES, console, "Squaring")
        return console

    def order(self, rank: int, what: str) -> None:
        (self.control / f"order-{rank}").write_text(what)

    def called(self) -> list[int]:
        """The tasks that ran since the last call, sorted."""
        calls = self.control / "calls"
        ranks = sorted(map(int, calls.read_text().split())) if calls.is_file() else []
        calls.unlink(missing_ok=True)
        return ranks

    def squares(self) -> dict[int, int]:
        return {int(path.parent.name): int(path.read_text()) for path in self.directory.glob("0*/square")}

    def file(self, rank: int, name: str = "square") -> Path:
        return self.directory / f"{rank:05d}" / name


@pytest.fixture
def squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Squares:
    # Worker processes inherit the path.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return Squares(tmp_path)


@WORKERS
class TestWhatIsDoneAlready:
    def test_every_part_is_made_once_and_no_part_twice(self, squares: Squares, workers: int) -> None:
        engine = LocalEngine(workers)
        squares.run(engine)
        assert squares.called() == [0, 1, 2, 3, 4, 5]
        assert squares.squares() == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16, 5: 25}
        squares.run(engine)
        assert squares.called() == []

    def test_damaged_and_unfinished_parts_are_made_again(self, squares: Squares, workers: int) -> None:
        squares.run(LocalEngine(0))
        squares.called()
        squares.file(0).write_text("7")
        squares.file(2).unlink()
        squares.file(3, "checksums.json").unlink()
        squares.file(5).with_name("square").rename(squares.directory / ".00005.partial-abc123")
        squares.file(5, "checksums.json").write_text("{")
        squares.run(LocalEngine(workers))
        assert squares.called() == [0, 2, 3, 5]
        assert squares.squares() == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16, 5: 25}
        assert not list(squares.directory.glob(".*"))

    def test_a_part_that_was_moved_aside_comes_back(self, squares: Squares, workers: int) -> None:
        squares.run(LocalEngine(0))
        squares.called()
        squares.file(4).parent.rename(squares.directory / ".00004.replaced-abc123")
        squares.file(3).parent.rename(squares.directory.parent / "gone")
        squares.run(LocalEngine(workers))
        # Part 4 had been moved aside by a writer that was killed before it put a new one there.
        assert squares.called() == [3]
        assert len(squares.squares()) == 6


@WORKERS
class TestATaskThatFails:
    @pytest.mark.parametrize(
        ("what", "kind", "message"),
        [
            ("refuse", TokenizerError, "part 3 cannot be had. Take another."),
            ("fail", LookupError, "part 3 is broken"),
        ],
    )
    def test_its_own_error_is_raised_and_the_pass_can_go_on(
        self, squares: Squares, workers: int, what: str, kind: type[Exception], message: str
    ) -> None:
        squares.order(3, what)
        with pytest.raises(kind) as error:
            squares.run(LocalEngine(workers))
        assert (type(error.value), error.value.args) == (kind, (message,))
        done = squares.squares()
        assert {0: 0, 1: 1, 2: 4}.items() <= done.items() and 3 not in done
        assert not list(squares.directory.glob(".*")), "nothing unfinished is left"
        squares.called()
        squares.order(3, "")
        squares.run(LocalEngine(workers))
        assert squares.called() == [rank for rank in range(6) if rank not in done]
        assert len(squares.squares()) == 6

    def test_it_fails_again_when_nothing_was_mended(self, squares: Squares, workers: int) -> None:
        squares.order(0, "refuse")
        for _ in range(2):
            with pytest.raises(TokenizerError, match="part 0 cannot be had"):
                squares.run(LocalEngine(workers))


def test_a_worker_that_dies_is_told_from_a_task_that_fails(squares: Squares) -> None:
    squares.order(5, "die")
    with pytest.raises(DataError, match="A worker process ended abruptly, most likely because memory ran out"):
        squares.run(LocalEngine(2))
    squares.order(5, "")
    squares.run(LocalEngine(2))
    assert squares.squares()[5] == 25
    assert not list(squares.directory.glob(".*"))


def test_an_interrupt_does_not_wait_for_work_that_is_going_on(squares: Squares) -> None:
    def interrupt() -> None:
        while 1 not in squares.called():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    squares.order(1, "wait")
    before = set(multiprocessing.active_children())
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        squares.run(LocalEngine(2))
    assert not set(multiprocessing.active_children()) - before
    assert 1 not in squares.squares()


class Orphans(LocalEngine):
    """Keeps the task of a pass instead of running it, as a worker has it whose build was killed."""

    task: Callable[[int], int]

    def execute(self, task: Callable[[int], int], ranks: Sequence[int]) -> Iterator[int]:
        self.task = task
        return iter(ranks)


class TestATaskThatOutlivesItsBuild:
    def test_it_does_not_make_the_removed_workplace_anew(self, tmp_path: Path) -> None:
        def write(rank: int, staging: Path) -> None:
            (staging / "a").touch()

        orphans = Orphans()
        with locked_workplace(tmp_path / "corpus") as workplace:
            run_pass(orphans, workplace / "pass-0", write, SIZES, Console.silent(), "Writing")
        with pytest.raises(StorageError, match="its directory was removed or moved in the meantime"):
            orphans.task(0)
        assert not list(tmp_path.iterdir())

    def test_what_it_is_writing_is_removed_with_the_workplace(self, tmp_path: Path) -> None:
        begun = threading.Event()

        def write_on(rank: int, staging: Path) -> None:
            for number in count():
                (staging / str(number)).touch()
                begun.set()

        def work() -> None:
            with pytest.raises(StorageError, match="its directory was removed or moved in the meantime"):
                orphans.task(0)

        orphans = Orphans()
        with ThreadPoolExecutor(1) as threads:
            with locked_workplace(tmp_path / "corpus") as workplace:
                run_pass(orphans, workplace / "pass-0", write_on, SIZES, Console.silent(), "Writing")
                found = threads.submit(work)
                begun.wait()
            assert not list(tmp_path.iterdir())
            found.result()

    def test_it_adds_nothing_to_another_build(self, squares: Squares) -> None:
        def write(rank: int, staging: Path) -> None:
            (staging / "square").write_text("wrong")

        orphans = Orphans()
        run_pass(orphans, squares.directory, write, SIZES, Console.silent(), "Writing")
        clear(squares.directory.parent, squares.control.name)
        squares.run(LocalEngine())
        with pytest.raises(StorageError, match="another build has begun there"):
            orphans.task(0)
        assert squares.squares() == {0: 0, 1: 1, 2: 4, 3: 9, 4: 16, 5: 25}


@WORKERS
def test_progress_adds_up_to_the_sizes_of_the_parts(squares: Squares, workers: int) -> None:
    first = squares.run(LocalEngine(workers))
    assert (first.total, first.advances) == (sum(SIZES), list(SIZES))
    squares.file(4).unlink()
    second = squares.run(LocalEngine(workers))
    assert (second.total, second.advances) == (sum(SIZES), [sum(SIZES) - SIZES[4], SIZES[4]])
    third = squares.run(LocalEngine(workers))
    assert (third.total, third.advances) == (sum(SIZES), [sum(SIZES)])
