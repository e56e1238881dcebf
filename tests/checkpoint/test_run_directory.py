"""Runs on disk: what may be created where, which checkpoint is meant, what pruning leaves."""

import fcntl
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sheepop.checkpoint import RunDirectory, resolve_model_directory, run_directory
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import remove_tree
from sheepop.core.locks import exclusive_lock


class KilledError(BaseException):
    """In the place of a kill."""


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
        with pytest.raises(UsageError, match="not empty and is not a run"):
            RunDirectory.create(tmp_path, overwrite=overwrite)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_plan_may_lie_where_a_run_begins_and_stays_there(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.plan.write_text("planned")
    RunDirectory.create(run.path)
    run.config_file.write_text("seed: 1")
    RunDirectory.create(run.path, overwrite=True)
    assert run.plan.read_text() == "planned" and not run.config_file.exists()


def test_the_place_of_a_new_run_is_on_the_disk_before_what_it_writes_there(
    tmp_path: Path, disk_order: list[str]
) -> None:
    run = RunDirectory(tmp_path / "runs" / "first")
    with run.locked():
        assert disk_order == [tmp_path.name, "runs"]
        RunDirectory.create(run.path)
        assert disk_order == [tmp_path.name, "runs", "first"]


def test_latest_moves_with_every_checkpoint_and_best_only_when_told(tmp_path: Path) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 2)
    run.mark_best(1)
    checkpoint(run, 3)
    assert (run.pointer("latest"), run.pointer("best")) == (3, 1)
    assert (run.checkpoints / "latest").read_text() == "step-00000003\n"


def test_latest_moves_when_the_checkpoint_is_on_the_disk_and_at_once(tmp_path: Path, disk_order: list[str]) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 1)
    disk_order.clear()
    checkpoint(run, 2)
    moved, pointed = (number for number, event in enumerate(disk_order) if " -> " in event)
    assert [disk_order[number].split(" -> ")[1] for number in (moved, pointed)] == ["step-00000002", "latest"]
    assert disk_order[moved + 1] == "checkpoints"
    assert disk_order[pointed - 1 :] == [disk_order[pointed].split(" -> ")[0], disk_order[pointed], "checkpoints"]


def test_a_checkpoint_is_written_anew_where_a_damaged_one_and_the_rest_of_a_killed_writer_lie(tmp_path: Path) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 2)
    (run.checkpoint(2) / "config.json").write_text("damaged")
    (run.checkpoints / ".step-00000002.partial-0123456789ab").mkdir()
    checkpoint(run, 2)
    assert run.latest_good(pytest.fail) == 2
    assert {entry.name for entry in run.checkpoints.iterdir()} == {"step-00000001", "step-00000002", "latest"}


def test_a_run_of_more_than_a_hundred_million_steps_and_what_only_looks_like_a_checkpoint(tmp_path: Path) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 1)
    checkpoint(run, 123_456_789)
    (run.checkpoints / "step-00000003").touch()
    (run.checkpoints / "step-00000004-mine").mkdir()
    assert run.steps() == [1, 123_456_789]
    assert run.pointer("latest") == 123_456_789


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


def test_pruning_looks_at_no_checkpoint_after_the_newest(tmp_path: Path) -> None:
    """A damaged one that was passed over stays, and takes no place of those that are kept."""
    run = steps_after(RunDirectory.create(tmp_path / "run"), 5)
    checkpoint(run, 9)
    run.mark_latest(5)
    run.prune(newest=5, keep_last=2, milestones=set())
    assert run.steps() == [4, 5, 9]


def test_killed_while_it_prunes_a_run_has_no_half_deleted_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = steps_after(RunDirectory.create(tmp_path / "run"), 2)

    def killed(path: Path, **options: Any) -> None:
        (path / "config.json").unlink()
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KilledError):
            run.prune(newest=2, keep_last=1, milestones=set())
    assert run.steps() == [2]
    run.remove_leftovers()
    assert {entry.name for entry in run.checkpoints.iterdir()} == {"step-00000002", "latest"}


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
    run.plots.mkdir()
    for folder, name in ((run.path, "config.yaml"), (run.checkpoints, "latest"), (run.plots, "loss.png")):
        (folder / f".{name}.partial-1a").write_text("half")
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


@pytest.mark.parametrize("exists", [False, True])
def test_what_is_there_when_the_lock_is_given_back_stays(tmp_path: Path, exists: bool) -> None:
    run = RunDirectory(tmp_path / "run")
    if exists:
        run.path.mkdir()
    with run.locked():
        pass
    assert run.path.is_dir() == exists
    with run.locked():
        checkpoint(RunDirectory.create(run.path), 1)
    assert run.steps() == [1]
