from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.detection import FileType
from sheepop.data.extract.dispatch import Dispatcher
from sheepop.data.extract.interface import Content, Context, Extracted, Refused

if TYPE_CHECKING:
    from reportlab.pdfgen.canvas import Canvas

ReadAs = Callable[..., list[Extracted | Refused]]
Drawn = Callable[..., bytes]


@pytest.fixture
def read_as(tmp_path: Path) -> ReadAs:
    """Extracts bytes as a given type, in this process, and checks that no temporary file is left behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def run(kind: str, data: bytes, name: str = "", **settings: object) -> list[Extracted | Refused]:
        config = ExtractConfig.model_validate(settings)
        content = Content(name or f"file.{kind}", data=data)
        items = list(Dispatcher(config, scratch).documents(content, FileType(kind)))
        assert list(scratch.iterdir()) == []
        return items

    return run


@pytest.fixture
def damaged() -> Callable[..., Iterator[bytes]]:
    """Yields copies of a file that are cut off or have some bits flipped, always the same ones."""

    def run(data: bytes, count: int = 50) -> Iterator[bytes]:
        chosen = random.Random(len(data))
        for number in range(count):
            if number % 2:
                yield data[: chosen.randrange(len(data))]
                continue
            copy = bytearray(data)
            for _ in range(chosen.randrange(1, 20)):
                copy[chosen.randrange(len(copy))] ^= 1 << chosen.randrange(8)
            yield bytes(copy)

    return run


@pytest.fixture
def damaged_parts() -> Callable[..., Iterator[bytes]]:
    """Yields copies of a zip package in which one part is damaged, and the package itself is not."""

    def run(data: bytes, count: int = 50) -> Iterator[bytes]:
        chosen = random.Random(len(data))
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            parts = {
                name: old.read(name) for name in old.namelist() if name.endswith((".xml", ".rels", ".xhtml", ".opf"))
            }
            for number in range(count):
                name = chosen.choice(sorted(parts))
                part = bytearray(parts[name])
                if number % 3 == 0:
                    del part[chosen.randrange(len(part)) :]
                for _ in range(chosen.randrange(1, 6) if part else 0):
                    part[chosen.randrange(len(part))] = chosen.choice(b"<>&0a \x00\xff")
                buffer = io.BytesIO()
                with zipfile.ZipFile(buffer, "w") as new:
                    for member in old.namelist():
                        new.writestr(member, bytes(part) if member == name else old.read(member))
                yield buffer.getvalue()

    return run


@pytest.fixture
def alive() -> list[None]:
    """Grows by one with every sign of life that `extract_pdf` gives."""
    return []


@pytest.fixture
def extract_pdf(tmp_path: Path, alive: list[None]) -> Callable[..., list[Extracted | Refused]]:
    """Extracts a PDF in this process, by default without recognition of text in pictures."""
    from sheepop.data.extract import pdf

    def run(data: bytes, **settings: object) -> list[Extracted | Refused]:
        config = ExtractConfig.model_validate({"ocr": False, **settings})
        context = Context(config, tmp_path, lambda *_: iter(()), lambda: alive.append(None))
        return list(pdf.extract_pdf(Content("a.pdf", data=data), context))

    return run


@pytest.fixture
def read_pdf(extract_pdf: Callable[..., list[Extracted | Refused]]) -> Callable[..., Extracted]:
    """The one document of a PDF of which nothing is refused."""

    def run(data: bytes, **settings: object) -> Extracted:
        (document,) = extract_pdf(data, **settings)
        assert isinstance(document, Extracted)
        return document

    return run


@pytest.fixture(scope="session")
def drawn() -> Drawn:
    """``drawn(draw)``: a PDF that `draw` draws on a canvas of A4; y grows upwards."""
    from reportlab.lib.pagesizes import A4
    from reportlab.pdfgen.canvas import Canvas

    def run(draw: Callable[[Canvas], object], **options: Any) -> bytes:
        buffer = io.BytesIO()
        canvas = Canvas(buffer, pagesize=options.pop("pagesize", A4), **options)
        draw(canvas)
        canvas.save()
        return buffer.getvalue()

    return run


@pytest.fixture(scope="session")
def pages_of(drawn: Drawn) -> Drawn:
    """``pages_of("one", "")``: a PDF with one line of text on each page; an empty text is a blank page."""

    def run(*pages: str) -> bytes:
        def draw(canvas: Canvas) -> None:
            for page in pages:
                canvas.drawString(72, 700, page)
                canvas.showPage()

        return drawn(draw)

    return run
