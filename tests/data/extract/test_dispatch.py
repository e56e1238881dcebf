from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.errors import StorageError
from sheepop.data.extract import pdf
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.detection import FileType
from sheepop.data.extract.dispatch import FORMATS, Dispatcher
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused

Run = Callable[..., list[Extracted | Refused]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Dispatches content to the given function in place of the reader of PDF."""

    def dispatch(
        read: Callable[[Content, Context], Any], data: bytes = b"x", *, extra: str = "data", **settings: object
    ) -> list[Extracted | Refused]:
        monkeypatch.setattr(pdf, "extract_pdf", read)
        monkeypatch.setitem(FORMATS, "pdf", replace(FORMATS["pdf"], extra=extra))
        dispatcher = Dispatcher(ExtractConfig.model_validate(settings), tmp_path)
        return list(dispatcher.documents(Content("a.pdf", data=data), FileType("pdf")))

    return dispatch


def failing(error: BaseException) -> Callable[[Content, Context], Iterator[Extracted]]:
    def read(content: Content, context: Context) -> Iterator[Extracted]:
        yield Extracted("page one")
        raise error

    return read


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ExtractionError("encrypted", "it needs a password"), ("encrypted", "it needs a password")),
        (RuntimeError("boom\nsecond line"), ("damaged", "RuntimeError: boom")),
        (RecursionError("maximum recursion depth"), ("damaged", "RecursionError: maximum recursion depth")),
        (OSError(errno.EIO, "Input/output error"), ("unreadable", "input/output error")),
        (
            ModuleNotFoundError("No module", name="pypdfium2"),
            ("not_installed", "pypdfium2 is not installed: install sheepop[data]"),
        ),
        (ValueError(), ("damaged", "ValueError:")),
        (KeyError("a" * 5000), ("damaged", "KeyError: '" + "a" * 289)),
        (ValueError("at <object 0x7f3a2b1c0d00>"), ("damaged", "ValueError: at <object 0x…>")),
        (ValueError("bad \udcff name"), ("damaged", "ValueError: bad \\udcff name")),
    ],
)
def test_what_fails_is_a_reason_and_what_came_before_is_kept(run: Run, error: Exception, refused: tuple[str, str]):
    assert run(failing(error)) == [Extracted("page one"), Refused("", *refused)]


def test_the_names_of_temporary_files_are_not_in_the_reasons(run: Run, tmp_path: Path):
    (refused,) = run(failing(ValueError(f"cannot read '{tmp_path}/tmpab12cd.pdf' at 5")))[1:]
    assert refused == Refused("", "damaged", "ValueError: cannot read 'a temporary file' at 5")


def test_a_full_disk_and_a_lack_of_memory_are_not_the_fault_of_the_file(run: Run):
    with pytest.raises(StorageError, match=r"no room for temporary files.*No space left on device"):
        run(failing(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(MemoryError):
        run(failing(MemoryError()))


def test_half_a_surrogate_pair_refuses_that_document_only(run: Run):
    def read(content: Content, context: Context) -> Iterator[Extracted]:
        yield Extracted("good 🐑")
        yield Extracted("bad \ud83d", place="page 2")
        yield Extracted("good again")

    first, refused, last = run(read)
    assert (first, last) == (Extracted("good 🐑"), Extracted("good again"))
    assert refused == Refused("page 2", "undecodable", "it contains half of a surrogate pair at character 4")


def test_a_long_document_of_any_format_is_cut(run: Run):
    def read(content: Content, context: Context) -> Iterator[Extracted]:
        yield Extracted("a line\n" * 1000, place="page 1", marks=((0, "page 1"),))

    items = run(read, max_document_bytes=1024)
    assert "".join(item.text for item in items) == "a line\n" * 1000
    assert [item.place for item in items] == [f"page 1, piece {number}" for number in range(1, 8)]


def test_text_without_end_is_a_bomb(run: Run):
    def read(content: Content, context: Context) -> Iterator[Extracted]:
        while True:
            yield Extracted("x" * 2**20)

    items = run(read)
    assert len(items) == 65
    assert items[-1] == Refused("", "bomb", "it unpacks to over 67,108,864 bytes; see data.extract.max_expansion")


def test_inner_content_is_read_by_its_own_type_at_its_place(run: Run):
    def read(content: Content, context: Context) -> Iterator[Extracted | Refused]:
        yield from context.inner(Content("b.py", data=b"x = 1\n"), "attachment 1")
        yield from context.inner(Content("c", data=b""), "attachment 2")
        yield from context.inner(Content("d.md", data=b"# D\n"), "attachment 3")

    code, refused, prose = run(read)
    assert (code.text, code.kind, code.language, code.place) == ("x = 1\n", "code", "python", "attachment 1")
    assert refused == Refused("attachment 2", "empty", "0 bytes")
    assert (prose.kind, prose.place) == ("prose", "attachment 3")


def test_content_that_holds_itself_is_refused_when_it_lies_too_deep(run: Run):
    def read(content: Content, context: Context) -> Iterator[Extracted | Refused]:
        yield from context.inner(Content("a.pdf", data=b"%PDF-1.4\n"), "inside")

    (refused,) = run(read, b"%PDF-1.4\n")
    assert refused.reason == "nested"
    assert refused.place.count("inside") == 7


def test_a_reader_that_hides_the_end_of_the_budget_does_not_get_round_it(run: Run):
    def read(content: Content, context: Context) -> Iterator[Extracted | Refused]:
        for number in range(100):
            try:
                yield from context.inner(Content("a.txt", data=bytes(2**20)), f"part {number}")
            except Exception:
                continue

    items = run(read)
    assert items[-1].reason == "bomb"
    assert sum(item.reason == "bomb" for item in items) == 1


def test_every_type_has_a_reader_and_says_what_it_needs():
    assert {name for name, row in FORMATS.items() if not row.bounded} == {"text", "markdown", "rst", "latex", "code"}
    assert {row.extra for row in FORMATS.values()} <= {"", "data", "ocr"}
    for row in FORMATS.values():
        assert callable(row.load())
