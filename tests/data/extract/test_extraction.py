from __future__ import annotations

import gzip
import os
import sqlite3
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sheepop.core.errors import StorageError
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.detection import FileType
from sheepop.data.extract.extraction import LIMITS, Extraction
from sheepop.data.extract.interface import Content, Extracted, Refused

MIB = 2**20
Make = Callable[..., Extraction]


@pytest.fixture
def extraction(tmp_path: Path) -> Iterator[Make]:
    """Makes extractions and checks at the end that nothing of them is left."""
    made, scratch = [], tmp_path / "scratch"
    scratch.mkdir()

    def make(**settings: object) -> Extraction:
        config = ExtractConfig.model_validate(settings)
        made.append(Extraction(config, scratch))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert list(scratch.iterdir()) == []


def test_a_file_that_is_left_half_read_can_be_closed_after_its_reader(extraction: Make, tmp_path: Path) -> None:
    """As when an interrupt ends a build: what was being read is dropped last."""
    path = tmp_path / "two.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "one")
        archive.writestr("b.txt", "two")
    reader = extraction()
    items = reader.documents(path, path.name)
    assert next(items) == Extracted("one", place="member a.txt", metadata={"encoding": "utf_8"})
    reader.close()
    items.close()  # type: ignore[attr-defined]


@pytest.fixture
def hostile(extraction: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list]:
    """Extracts zip files with a reader that does what their names say."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setattr("sheepop.data.extract.extraction._CHILD", "hostile_child")
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "a")
    made: dict[str, Extraction] = {}

    def run(name: str, **settings: object) -> list[Extracted | Refused]:
        key = repr(settings)
        made[key] = made.get(key) or extraction(**settings)
        return list(made[key].documents(path, f"{name}.zip"))

    return run


def children() -> set[psutil.Process]:
    """The processes that this one has started, those of other tests too."""
    return set(psutil.Process().children())


def test_text_is_read_here_and_other_formats_in_a_child(extraction: Make, tmp_path: Path):
    (tmp_path / "a.py").write_bytes(b"def f():\r\n\treturn 1\n")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as file:
        file.writestr("c.md", "# C\n")
        file.writestr("d.bin", bytes(100))
    before = children()
    reader = extraction()
    (code,) = reader.documents(tmp_path / "a.py", "a.py")
    assert code == Extracted("def f():\r\n\treturn 1\n", "code", "python", metadata={"encoding": "utf_8"})
    assert children() == before
    document, refused = reader.documents(tmp_path / "b.zip", "b.zip")
    assert document == Extracted("# C\n", place="member c.md", metadata={"encoding": "utf_8"})
    assert (refused.place, refused.reason) == ("member d.bin", "binary")
    (child,) = children() - before
    reader.close()
    assert not child.is_running()


def test_marks_and_kinds_come_back_from_the_child_as_they_went(extraction: Make, tmp_path: Path):
    (tmp_path / "a.csv").write_text("name,age\nDolly,6\nShaun,3\n")
    items = list(extraction().documents(tmp_path / "a.csv", "a.csv"))
    assert all(isinstance(item, Extracted) and isinstance(item.marks, tuple) for item in items)
    assert "Dolly" in "".join(item.text for item in items)


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("sleep", "timeout", "it did not respond within 2 s"),
        ("hoard", "memory", "268,435,456 bytes of memory"),
        ("crash", "damaged", "SIGSEGV"),
        ("exit", "damaged", "exit status 7"),
    ],
)
def test_what_strikes_the_child_refuses_the_file_and_not_the_next(hostile, name: str, reason: str, words: str):
    settings = {"max_seconds": 2.0 if name == "sleep" else 60.0, "max_memory_bytes": 256 * MIB}
    before, refused = hostile(name, **settings)
    assert before == Extracted("before")
    assert (refused.place, refused.reason) == ("", reason)
    assert words in refused.detail
    assert (refused.reason in LIMITS) == (name in ("sleep", "hoard"))
    assert hostile("fine", **settings) == [Extracted("before")]


def test_a_document_may_take_long_that_shows_signs_of_life(hostile):
    assert hostile("slow pages", max_seconds=2.0) == [Extracted("before"), Extracted("after")]


def test_one_child_reads_many_files_and_printing_does_no_harm(hostile):
    pids = {hostile("pid")[1].text for _ in range(5)}
    assert len(pids) == 1
    assert hostile("print") == [Extracted("before")]


def test_a_file_is_not_refused_for_what_files_before_it_left_in_the_child(hostile):
    settings = {"max_memory_bytes": 256 * MIB}
    assert hostile("keep", **settings) == [Extracted("before")]
    assert [item.text for item in hostile("needs much", **settings)] == ["before", "needs much", f"had {150 * MIB}"]
    assert hostile("keep", **settings) == [Extracted("before")]
    assert [item.text for item in hostile("dies second", **settings)] == ["before", "one", "two"]


def test_what_a_dead_child_left_in_the_temporary_folder_is_removed(hostile, tmp_path: Path):
    hostile("litter")
    assert [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()] == []


def test_reading_that_is_given_up_leaves_no_child_waiting(hostile, extraction: Make, tmp_path: Path):
    before = children()
    reader = extraction()
    items = reader.documents(tmp_path / "a.zip", "sleep.zip")
    next(items)
    (child,) = children() - before
    items.close()
    assert not child.is_running()


def test_a_missing_or_unreadable_file_is_refused(extraction: Make, tmp_path: Path):
    reader = extraction()
    assert list(reader.documents(tmp_path / "none", "none")) == [Refused("", "unreadable", "no such file or directory")]
    (tmp_path / "empty").touch()
    assert list(reader.documents(tmp_path / "empty", "empty")) == [Refused("", "empty", "0 bytes")]
    (refused,) = reader.documents(tmp_path, "folder")
    assert refused.reason == "unreadable"


def test_a_file_that_goes_away_before_the_child_opens_it_is_unreadable(extraction: Make, tmp_path: Path, monkeypatch):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"text\n"))
    reader = extraction()
    bounded = reader._bounded

    def vanish_and_read(*arguments):
        path.unlink()
        return bounded(*arguments)

    monkeypatch.setattr(reader, "_bounded", vanish_and_read)
    assert [item.reason for item in reader.documents(path, "a.txt.gz")] == ["unreadable", "changed"]


@pytest.mark.parametrize("name", ["pipe", "pipe.zip", "pipe.csv"])
def test_a_pipe_in_place_of_the_file_is_refused_and_not_waited_for(extraction: Make, tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)
    (refused,) = extraction().documents(tmp_path / name, name)
    assert (refused.reason, refused.detail) == ("unreadable", "it is no longer a regular file")


def test_a_name_that_is_not_utf8_is_read(extraction: Make, tmp_path: Path):
    for suffix, data in (("txt", b"text\n"), ("txt.gz", gzip.compress(b"text\n"))):
        path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9\n." + suffix.encode()))
        path.write_bytes(data)
        (document,) = extraction().documents(path, f"caf\\xe9\n.{suffix}")
        assert document.text == "text\n"


def test_a_text_that_changes_while_it_is_read_is_refused(extraction: Make, tmp_path: Path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one\n" * 100)
    reader = extraction()
    whole = reader._whole

    def grow_and_read(file, before):
        with path.open("a") as other:
            other.write("more\n")
        return whole(file, before)

    monkeypatch.setattr(reader, "_whole", grow_and_read)
    assert list(reader.documents(path, "a.txt")) == [Refused("", "changed", "it changed while it was being read")]


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: os.utime(path, (1, 1)),
        lambda path: (path.rename(path.with_suffix(".old")), path.write_bytes(path.with_suffix(".old").read_bytes())),
        lambda path: path.unlink(),
    ],
    ids=["grown", "touched", "replaced", "removed"],
)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_streamed_file_that_changes_is_reported_after_its_documents(
    extraction: Make, tmp_path: Path, name: str, change: Callable[[Path], object]
):
    path = tmp_path / name
    text = b"a line of text\n" * 1000
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    items = extraction(max_document_bytes=2000).documents(path, name)
    first = next(items)
    change(path)
    rest = list(items)
    assert isinstance(first, Extracted)
    assert rest[-1] == Refused("", "changed", "it changed while it was being read")


def test_a_file_that_stays_as_it_is_is_not_reported(extraction: Make, tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a line of text\n" * 1000)
    items = list(extraction(max_document_bytes=2000).documents(path, "a.txt"))
    assert "".join(item.text for item in items) == "a line of text\n" * 1000


def test_files_written_to_all_the_time_end_in_documents_or_reasons(extraction: Make, tmp_path: Path):
    path, stop = tmp_path / "a.txt", threading.Event()
    path.write_bytes(b"start\n")

    def write() -> None:
        while not stop.is_set():
            with path.open("ab") as file:
                file.write(b"more and more\n" * 20)
            if path.stat().st_size > MIB:
                path.write_bytes(b"start\n")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        deadline = time.monotonic() + 1
        reader = extraction()
        while time.monotonic() < deadline:
            for item in reader.documents(path, "a.txt"):
                reasons = ("changed", "empty")
                assert isinstance(item, Extracted) or item.reason in reasons, item
    finally:
        stop.set()
        thread.join()


def test_no_room_for_temporary_files_ends_the_work_with_a_clear_error(extraction: Make, tmp_path: Path, monkeypatch):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("large.txt", b"x" * 2**25)
    reader = extraction()
    full = tmp_path / "full"
    full.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(full)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        monkeypatch.setattr(reader, "_below", full)
        with pytest.raises(StorageError, match="no room for temporary files"):
            list(reader.documents(path, "a.zip"))
        reader.close()
    finally:
        subprocess.run(["umount", str(full)], check=True)


def test_content_that_is_no_file_is_read_in_the_child_too(extraction: Make, tmp_path: Path):
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("create table t (text text)")
        connection.execute("insert into t values ('Dolly was a sheep.')")
    connection.close()
    items = list(extraction()._read(Content("a.sqlite", data=path.read_bytes()), FileType("sqlite")))
    assert "Dolly was a sheep." in "".join(item.text for item in items if isinstance(item, Extracted))


def test_the_same_input_gives_the_same_items_again(extraction: Make, tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        for number in range(20):
            file.writestr(f"{number}.txt", f"document {number}\n")
        file.writestr("b.bin", bytes(50))
    first = list(extraction().documents(tmp_path / "a.zip", "a.zip"))
    again = extraction()
    assert list(again.documents(tmp_path / "a.zip", "a.zip")) == first
    assert list(again.documents(tmp_path / "a.zip", "a.zip")) == first
