"""A run that takes the place of another: on request alone, at no cost to other files, and killed at any moment."""

import itertools
from contextlib import nullcontext
from pathlib import Path

import pytest

from sheepop.checkpoint import RunDirectory
from sheepop.core.errors import UsageError


class KilledError(BaseException):
    """In the place of a kill."""


def steps_after(run: RunDirectory, count: int) -> RunDirectory:
    for step in range(1, count + 1):
        with run.write_checkpoint(step) as directory:
            (directory / "config.json").write_text("{}")
    return run


def test_a_run_is_replaced_only_on_request(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    steps_after(run, 1)
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


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_start_that_fails_leaves_the_place_as_it_was(tmp_path: Path, failure: type[BaseException]) -> None:
    with pytest.raises(failure), RunDirectory.starting(tmp_path / "new") as run:
        run.config_file.write_text("half")
        raise failure
    assert not (tmp_path / "new").exists()
    old = steps_after(RunDirectory.create(tmp_path / "old"), 2)
    with pytest.raises(failure), RunDirectory.starting(old.path, overwrite=True) as run:
        assert run.steps() == []
        with run.write_checkpoint(7) as directory:
            (directory / "config.json").write_text("{}")
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


@pytest.mark.parametrize("moment", range(1, 7))
def test_a_run_that_is_put_back_does_not_look_like_one_until_all_of_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    run = begun(tmp_path / "run")
    before, rename, calls = contents(run.path), Path.rename, 0
    run._set_aside()

    def killed(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == moment:
            raise KilledError
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KilledError) if moment < 6 else nullcontext():
        run._put_back()
    monkeypatch.undo()
    assert run.config_file.is_file() == (moment == 6)
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
    for place, path in itertools.product((run.path, link), repeat=2):
        with (
            pytest.raises(UsageError, match=r"would read .*, which is part of the run"),
            RunDirectory.starting(place, overwrite=True, reading=[path / name]),
        ):
            raise AssertionError
    assert contents(run.path) == before


def test_a_run_whose_checkpoints_lie_behind_a_link_is_not_replaced(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run")
    run.config_file.write_text("")
    (tmp_path / "large-disk").mkdir()
    run.checkpoints.rmdir()
    run.checkpoints.symlink_to("../large-disk")
    with pytest.raises(UsageError, match=r"checkpoints is a link, whose target"):
        RunDirectory.create(run.path, overwrite=True)
    assert run.checkpoints.is_symlink() and run.config_file.is_file()


def test_a_link_to_a_run_stays_when_the_run_is_replaced(tmp_path: Path) -> None:
    old = RunDirectory.create(tmp_path / "run")
    old.config_file.write_text("")
    (tmp_path / "link").symlink_to("run")
    RunDirectory.create(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink() and old.checkpoints.is_dir() and not old.config_file.exists()
