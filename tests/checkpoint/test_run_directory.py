"""Runs on disk: what may be created where, which checkpoint is meant, what pruning leaves."""

import fcntl
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory, resolve_model_directory, run_directory
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import remove_tree
from sheepop.core.locks import exclusive_lock


def checkpoint(run: RunDirectory, step: int) -> None:
    with run.write_checkpoint(step) as directory:
        (directory / "config.json").write_text("{}")


def steps_after(run: RunDirectory, count: int) -> RunDirectory:
    for step in range(1, count + 1):
        checkpoint(run, step)
    return run


def test_a_new_run_needs_an_empty_place(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="not empty and does not hold a run"):
            RunDirectory.create(tmp_path, overwrite=overwrite)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_is_replaced_only_on_request(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    checkpoint(run, 1)
    with pytest.raises(UsageError, match="already holds a run"):
        RunDirectory.create(tmp_path / "run")
    assert run.steps() == [1]
    assert RunDirectory.create(tmp_path / "run", overwrite=True).steps() == []


@pytest.mark.parametrize("name", ["thesis.txt", "checkpoints/epoch-3.pt"])
def test_replacing_a_run_costs_nobody_their_own_files(tmp_path: Path, name: str) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 1)
    (run.path / name).write_text("mine")
    with pytest.raises(UsageError, match=rf"{name} is not part of a run"):
        RunDirectory.create(run.path, overwrite=True)
    assert (run.path / name).read_text() == "mine"
    assert run.steps() == [1]


def test_what_a_killed_writer_left_is_replaced_with_the_run(tmp_path: Path) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 1)
    (run.checkpoints / ".step-00000002.partial-0123456789ab").mkdir()
    (run.path / ".config.yaml.partial-0123456789ab").write_text("")
    RunDirectory.create(run.path, overwrite=True)
    assert [entry.name for entry in run.path.rglob("*")] == ["checkpoints"]


def test_latest_moves_with_every_checkpoint_and_best_only_when_told(tmp_path: Path) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 2)
    run.mark_best(1)
    checkpoint(run, 3)
    assert (run.pointer("latest"), run.pointer("best")) == (3, 1)
    assert (run.checkpoints / "latest").read_text() == "step-00000003\n"


@pytest.mark.parametrize("content", ["", "step-00000099\n", "../../etc\n", "step-1\n", "\x00"])
def test_a_pointer_that_names_no_checkpoint_counts_as_missing(tmp_path: Path, content: str) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 1)
    (run.checkpoints / "best").write_text(content)
    assert run.pointer("best") is None


def test_pruning_keeps_the_last_best_and_milestones(tmp_path: Path) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 9)
    run.mark_best(4)
    run.prune(newest=9, keep_last=2, milestones={1, 6})
    assert run.steps() == [1, 4, 6, 8, 9]
    assert not list(run.checkpoints.glob(".*"))


def test_pruning_keeps_the_checkpoint_that_latest_names(tmp_path: Path) -> None:
    """After damage ``latest`` may name an old one, which a reader of the run is sent to."""
    run = steps_after(RunDirectory.create(tmp_path / "run"), 5)
    run.mark_latest(2)
    run.prune(newest=5, keep_last=1, milestones=set())
    assert run.steps() == [2, 5]
    assert resolve_model_directory(run.path) == run.checkpoint(2)


def test_what_a_kill_left_undone_is_done_and_nothing_else_is_touched(tmp_path: Path) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 2)
    (run.checkpoints / "latest").write_text("step-00000001\n")
    for left in (run.path / ".config.yaml.partial-1a", run.checkpoints / ".latest.partial-2b"):
        left.write_text("half")
    run.checkpoint(2).rename(run.checkpoints / ".step-00000002.replaced-3c")
    (run.checkpoints / ".step-00000002.partial-4d").mkdir()
    (run.path / ".own-notes").write_text("mine")
    run.remove_leftovers()
    run.mark_latest(2)
    assert run.steps() == [1, 2]
    assert run.latest_good(lambda problem: None) == run.pointer("latest") == 2
    assert [path.name for path in run.path.rglob(".*")] == [".own-notes"]


def test_a_failed_checkpoint_leaves_the_ones_before_it(tmp_path: Path) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 1)
    with pytest.raises(RuntimeError), run.write_checkpoint(2) as directory:
        (directory / "config.json").write_text("{}")
        raise RuntimeError("power cut")
    assert run.steps() == [1]
    assert run.pointer("latest") == 1
    assert not list(run.checkpoints.glob(".*"))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 3)
    (run.checkpoint(3) / "config.json").write_text("{ }")
    (run.checkpoint(2) / "checksums.json").unlink()
    warnings: list[str] = []
    assert run.latest_good(warnings.append) == 1
    assert len(warnings) == 2
    assert "step-00000003/config.json is damaged" in warnings[0]
    assert "step-00000002/checksums.json is missing" in warnings[1]


def test_a_path_means_a_model_a_checkpoint_or_a_run(tmp_path: Path) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 3)
    assert resolve_model_directory(run.path) == run.checkpoint(3)
    run.mark_best(2)
    assert resolve_model_directory(run.path) == run.checkpoint(2)
    assert resolve_model_directory(run.checkpoint(1)) == run.checkpoint(1)
    checkpoint(run, 0)
    run.mark_latest(3)
    run.mark_best(0)
    assert resolve_model_directory(run.path) == run.checkpoint(0)


@pytest.mark.parametrize("place", ["missing", "empty", "started"])
def test_a_path_without_a_model_is_explained(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    if place == "empty":
        path.mkdir()
    if place == "started":
        RunDirectory.create(path)
    messages = {"missing": "does not exist", "empty": "is not a model", "started": "no finished checkpoint yet"}
    with pytest.raises(CheckpointError, match=messages[place]):
        resolve_model_directory(path)


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_start_that_fails_leaves_the_place_as_it_was(tmp_path: Path, failure: type[BaseException]) -> None:
    with pytest.raises(failure), RunDirectory.starting(tmp_path / "new") as run:
        run.config_file.write_text("half")
        raise failure
    assert not (tmp_path / "new").exists()
    old = steps_after(RunDirectory.create(tmp_path / "old"), 2)
    with pytest.raises(failure), RunDirectory.starting(old.path, overwrite=True) as run:
        assert run.steps() == []
        checkpoint(run, 7)
        raise failure
    assert old.steps() == [1, 2] and old.pointer("latest") == 2
    assert [entry.name for entry in old.path.iterdir()] == ["checkpoints"]


def test_a_start_that_was_killed_gives_back_the_run_it_was_to_replace(tmp_path: Path) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 2)
    run._set_aside()  # what is on the disk when the process ends here
    run.checkpoints.mkdir()
    with pytest.raises(UsageError, match="already holds a run"):
        RunDirectory.create(run.path)
    with pytest.raises(ValueError, match="stop"), RunDirectory.starting(run.path, overwrite=True):
        raise ValueError("stop")
    assert run.steps() == [1, 2]


@pytest.mark.parametrize("moves", range(1, 6))
def test_a_kill_while_the_old_run_is_moved_loses_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    """Stopped dead before any move, on its way aside or back; the next start that fails leaves the run as it was."""
    run = steps_after(RunDirectory.create(tmp_path / "run"), 2)
    run.config_file.write_text("seed: 0\n")
    run.metrics_file.write_text("{}\n")
    before = {path.relative_to(run.path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    rename, count = Path.rename, 0

    def killing(path: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count >= moves:
            raise OSError("the process is gone")
        return rename(path, target)

    def failing_start() -> None:
        with RunDirectory.starting(run.path, overwrite=True):
            raise RuntimeError("no data")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killing)
        with pytest.raises((OSError, RuntimeError)):
            failing_start()
    with pytest.raises(RuntimeError, match="no data"):
        failing_start()
    after = {path.relative_to(run.path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert after == before


class KilledError(BaseException):
    """Ends a start as a kill would: what cleans up after an exception does not run."""


def begun(path: Path) -> RunDirectory:
    run = steps_after(RunDirectory.create(path), 2)
    for name in ("metrics.jsonl", "environment.json", "config.yaml"):
        (path / name).write_text(name)
    return run


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("moment", range(1, 6))
def test_a_run_whose_replacement_is_killed_is_whole_or_does_not_look_like_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    run = begun(tmp_path / "run")
    before, rename, calls = contents(run.path), Path.rename, 0

    def killed(self: Path, *target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls >= moment:  # nothing more is done, what would put things back neither
            raise KilledError
        rename(self, *target)

    monkeypatch.setattr(Path, "rename", killed)
    monkeypatch.setattr(Path, "rmdir", killed)
    with pytest.raises(KilledError):
        RunDirectory.create(run.path, overwrite=True)
    monkeypatch.undo()
    assert run.is_being_replaced()
    assert run.config_file.is_file() == (moment == 1)
    if moment == 1:  # nothing had been moved, so it goes on as it was
        run.remove_leftovers()
        assert not run.is_being_replaced()
        assert contents(run.path) == before
    with pytest.raises(KilledError), RunDirectory.starting(run.path, overwrite=True):
        raise KilledError
    assert contents(run.path) == before


def test_a_run_of_which_a_part_cannot_be_moved_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path / "run")
    before, rename = contents(run.path), Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self.name == "checkpoints" and self.parent == run.path:
            raise OSError(16, "Device or resource busy", str(self))  # as where another disk is mounted there
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="busy"):
        RunDirectory.create(run.path, overwrite=True)
    assert contents(run.path) == before


def test_what_a_replaced_run_left_is_removed_when_the_new_one_goes_on(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    old = run.path / ".replaced"
    old.mkdir()
    (old / "config.yaml").write_text("the one before")
    run.remove_leftovers()
    assert not old.exists()
    assert run.steps() == [1, 2]


@pytest.mark.parametrize("name", [".", "corpus", "checkpoints/step-00000001"])
def test_no_run_is_replaced_by_one_that_is_made_from_it(tmp_path: Path, name: str) -> None:
    run = begun(tmp_path / "run")
    before, link = contents(run.path), tmp_path / "link"
    link.symlink_to(run.path)
    for path in (run.path, link):
        with (
            pytest.raises(UsageError, match=r"is to be made from .*, which is part of the run"),
            RunDirectory.starting(run.path, overwrite=True, reading=[path / name]),
        ):
            raise AssertionError
    assert contents(run.path) == before


def test_of_two_that_start_at_once_the_refused_one_leaves_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "run")
    with ExitStack() as first:

        def overtaken(*arguments: Any) -> Any:
            monkeypatch.undo()
            assert first.enter_context(RunDirectory(run.path).locked())
            return exclusive_lock(*arguments)

        monkeypatch.setattr(run_directory, "exclusive_lock", overtaken)
        for _ in range(2):  # the second, and then a third, which comes when the second is refused
            with pytest.raises(CheckpointError, match="Another process"), run.locked():
                pass


def test_a_lock_whose_file_was_removed_before_it_was_held_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, flock = RunDirectory(tmp_path / "run"), fcntl.flock

    def overtaken(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        remove_tree(run.path)  # by the one that held the lock until now, whose run did not begin
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with run.locked() as held:
        assert held
        assert [entry.name for entry in run.path.iterdir()] == [".lock"]
        with pytest.raises(CheckpointError, match="Another process"), RunDirectory(run.path).locked():
            pass


def test_a_run_whose_checkpoints_lie_behind_a_link_is_not_replaced(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    run.config_file.write_text("")
    (tmp_path / "large-disk").mkdir()
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to("../large-disk")
    with pytest.raises(UsageError, match=r"checkpoints is a link to another place"):
        RunDirectory.create(run.path, overwrite=True)
    assert run.checkpoints.is_symlink() and run.config_file.is_file()


def test_a_link_to_a_run_stays_when_the_run_is_replaced(tmp_path: Path) -> None:
    old = RunDirectory.create(tmp_path / "run")
    old.config_file.write_text("")
    (tmp_path / "link").symlink_to("run")
    RunDirectory.create(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and old.checkpoints.is_dir() and not old.config_file.exists()
