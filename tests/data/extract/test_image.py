from __future__ import annotations

import io
import random
import shutil
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from sheepop.data.extract import image as image_module
from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.dispatch import Dispatcher
from sheepop.data.extract.image import extract_image, recognise
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.page_lines import Line, Page

WORDS = "The quick brown fox jumps over the lazy dog near 42 sheep."
LINES = "The quick brown fox jumps\nover the lazy dog near 42 sheep."

Extract = Callable[..., list[Extracted | Refused]]


@pytest.fixture
def extract(tmp_path: Path) -> Extract:
    """Extracts a picture in this process."""

    def run(data: bytes, **settings: object) -> list[Extracted | Refused]:
        context = Context(ExtractConfig.model_validate(settings), tmp_path, lambda *_: iter(()))
        return list(extract_image(Content("picture", data=data), context))

    return run


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> list[Image.Image]:
    """Leaves recognition out: the pictures that it is given, each "read" as one line that says how large it is."""
    pictures: list[Image.Image] = []

    def recognised(image: Image.Image, config: ExtractConfig, number: int) -> Page:
        pictures.append(image)
        line = Line(f"A picture {image.width} wide", 10, 10, 400, 30, 15, 60)
        return Page(number, image.height, [line], confidence=0.95)

    monkeypatch.setattr(image_module, "recognise", recognised)
    return pictures


def drawn(text: str = LINES, size: int = 20, mode: str = "L", ink: Any = 0, ground: Any = 255) -> Image.Image:
    """A picture of lines of text."""
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")), size)
    lines = text.split("\n")
    width = int(max(font.getlength(line) for line in lines)) + 40
    image = Image.new(mode, (width, 30 + int(1.6 * size) * len(lines)), ground)
    for row, line in enumerate(lines):
        ImageDraw.Draw(image).text((20, 15 + int(1.6 * size) * row), line, font=font, fill=ink)
    return image


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def words(document: Extracted | Refused) -> str:
    assert isinstance(document, Extracted)
    return " ".join(document.text.split())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF"])
def test_text_is_recognised_in_every_format(extract: Extract, kind: str) -> None:
    (document,) = extract(saved(drawn(), kind))

    assert words(document) == WORDS
    assert isinstance(document, Extracted)
    assert (document.kind, document.place, document.marks) == ("prose", "", ())
    assert document.metadata["recognised_pages"] == "1"
    assert float(document.metadata["recognition_confidence"]) > 0.9


def test_the_same_picture_gives_the_same_text_again(extract: Extract) -> None:
    data = saved(drawn(), "PNG")

    assert extract(data) == extract(data)


def test_white_letters_on_nothing_are_read(extract: Extract) -> None:
    image = drawn(mode="RGBA", ink=(255, 255, 255, 255), ground=(255, 255, 255, 0))

    assert words(extract(saved(image, "PNG"))[0]) == WORDS


def test_a_picture_of_16_bits_is_read(extract: Extract) -> None:
    dim = np.asarray(drawn(), dtype=np.uint16) * 4 + 300

    assert words(extract(saved(Image.fromarray(dim), "PNG"))[0]) == WORDS


def test_a_photograph_that_says_how_it_was_held_is_turned(extract: Extract) -> None:
    exif = Image.Exif()
    exif[274] = 6  # the orientation tag: to be turned by 90 degrees clockwise
    data = saved(drawn().transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif, quality=95)

    assert words(extract(data)[0]) == WORDS


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_a_scan_that_is_turned_is_read_as_the_upright_one(extract: Extract, degrees: int) -> None:
    upright = drawn("All human beings are born\nfree and equal in dignity\nand rights. They are endowed\nwith reason.")

    (document,) = extract(saved(upright.rotate(degrees, expand=True), "PNG"))

    assert words(document) == (
        "All human beings are born free and equal in dignity and rights. They are endowed with reason."
    )


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        (
            "Все люди рождаются\nсвободными и равными\nв своем достоинстве\nи правах.",
            "illegible",
            "in an unknown script",
        ),
        ("Όλοι οι άνθρωποι γεννιούνται\nελεύθεροι και ίσοι\nστην αξιοπρέπεια", "unsupported", "in Greek"),
        ("Tất cả mọi người sinh ra\nđều được tự do và bình đẳng\nvề nhân phẩm.", "unsupported", "in Vietnamese"),
    ],
    ids=["Russian", "Greek", "Vietnamese"],
)
def test_a_script_that_recognition_does_not_know_is_refused(
    extract: Extract, monkeypatch: pytest.MonkeyPatch, text: str, reason: str, detail: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no other program is needed
    with pytest.raises(ExtractionError, match=detail) as raised:
        extract(saved(drawn(text), "PNG"))

    assert raised.value.reason == reason
    assert "Latin letters, Chinese and Japanese" in raised.value.detail


@pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract is not installed")
def test_tesseract_names_a_script_of_which_recognition_knows_no_letter(extract: Extract) -> None:
    with pytest.raises(ExtractionError, match="in Cyrillic script: ") as raised:
        extract(saved(drawn("Все люди рождаются\nсвободными и равными\nв своем достоинстве\nи правах."), "PNG"))

    assert raised.value.reason == "illegible"


def test_a_picture_that_is_hard_to_read_is_refused_with_the_limit(extract: Extract) -> None:
    pixels = np.asarray(drawn(size=30))
    noise = np.random.default_rng(0).normal(0, 110, pixels.shape)
    data = saved(Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8)), "PNG")

    with pytest.raises(ExtractionError, match=r"ocr_min_page_confidence = 0\.999") as raised:
        extract(data, ocr_min_page_confidence=0.999)
    assert raised.value.reason == "illegible"
    assert isinstance(extract(data, ocr_min_page_confidence=0)[0], Extracted)


def test_two_columns_are_read_one_after_the_other(extract: Extract) -> None:
    left = """\
The shepherd counted the flock
twice before the rain began,
and both times one animal was
missing from the count."""
    right = """\
In the valley below the river
had risen above the lower
meadow and nobody had seen it
so high since that winter."""
    one, other = drawn(left, 16), drawn(right, 16)
    page = Image.new("L", (one.width + other.width - 10, one.height), 255)
    page.paste(one, (0, 0))
    page.paste(other, (one.width - 10, 0))

    assert words(extract(saved(page, "PNG"))[0]) == " ".join((left + " " + right).split())


def test_the_pages_of_a_tiff_have_marks_and_an_empty_one_is_refused(extract: Extract) -> None:
    pages = [drawn("First page of it"), Image.new("L", (200, 100), 255), drawn("Third page of it")]

    refused, document = extract(saved(pages[0], "TIFF", save_all=True, append_images=pages[1:]))

    assert refused == Refused("page 2", "empty", "no text was recognised in it")
    assert isinstance(document, Extracted)
    assert document.text == "First page of it\n\nThird page of it"
    assert document.marks == ((0, "page 1"), (18, "page 3"))
    assert document.metadata["pages"] == "3"


def test_a_picture_without_text_is_refused(extract: Extract) -> None:
    assert extract(saved(Image.new("L", (300, 200), 255), "PNG")) == [
        Refused("", "empty", "no text was recognised in it")
    ]


def test_lines_that_recognition_is_not_sure_of_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Result:
        boxes = np.array([[[0, y], [100, y], [100, y + 20], [0, y + 20]] for y in (0, 30)], dtype=float)
        txts = ("clear", "blurred")
        scores = (0.9, 0.4)
        word_results = None

    monkeypatch.setattr(image_module, "engine", lambda threads: lambda *_, **__: Result())
    found = recognise(drawn(), ExtractConfig())

    assert [line.text for line in found.lines] == ["clear"]
    assert (found.confidence, found.unsure) == (0.9, 1)
    assert len(recognise(drawn(), ExtractConfig(ocr_min_confidence=0.3, ocr_min_page_confidence=0.6)).lines) == 2


@pytest.mark.parametrize(
    "line",
    ["ყველა ადამიანი იბადება თავისუფალი", "يولد جميع الناس أحرارا متساوين", "Все люди рождаются свободными"],
    ids=["Georgian", "Arabic", "Russian"],
)
def test_a_line_of_which_recognition_knows_no_letter_is_counted(line: str) -> None:
    page = recognise(drawn(f"{LINES}\n{line}\nAnd all of them were glad."), ExtractConfig())

    assert [line.text for line in page.lines] == [*LINES.split("\n"), "And all of them were glad."]
    assert page.unsure == 1


def test_only_the_first_frame_of_an_animation_is_read(extract: Extract, unread: list[Image.Image]) -> None:
    frames = [drawn(f"Frame {number}") for number in range(3)]

    (document,) = extract(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))

    assert isinstance(document, Extracted)
    assert document.metadata["frames"] == "3"
    assert len(unread) == 1
    assert np.array_equal(np.asarray(unread[0]), np.asarray(frames[0]))


def test_a_long_tiff_is_one_document_with_a_mark_for_every_page(extract: Extract, unread: list[Image.Image]) -> None:
    data = saved(drawn(), "TIFF", save_all=True, append_images=[drawn()] * 4)

    (document,) = extract(data)

    assert isinstance(document, Extracted)
    assert (document.place, document.metadata["pages"]) == ("", "5")
    assert [name for _, name in document.marks] == [f"page {n}" for n in range(1, 6)]


def test_a_strip_is_read_in_tiles_that_are_cut_between_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    heights: list[int] = []

    def engine(tile: np.ndarray, **_: object) -> Any:
        # Says at which rows there is ink, as lines of one word each.
        rows = np.flatnonzero((tile[:, :, 0] < 128).any(axis=1))
        starts = [int(row) for row in rows if row - 1 not in rows]
        ends = [int(row) + 1 for row in rows if row + 1 not in rows]
        heights.append(len(tile))

        class Result:
            boxes = np.array([[[10, a], [90, a], [90, b], [10, b]] for a, b in zip(starts, ends, strict=True)], float)
            txts = tuple("line" for _ in starts)
            scores = tuple(0.9 for _ in starts)
            word_results = None

        return Result()

    monkeypatch.setattr(image_module, "engine", lambda threads: engine)
    strip = Image.new("L", (400, 5000), 255)
    for top in range(10, 4960, 37):
        strip.paste(0, (10, top, 90, top + 20))

    lines = recognise(strip, ExtractConfig()).lines

    assert [line.top for line in lines] == list(range(10, 4960, 37))
    assert {line.bottom - line.top for line in lines} == {20}
    assert sum(heights) == 5000
    assert max(heights) <= 1800


@pytest.mark.parametrize("size", [(20, 100_000), (100_000, 20), (1, 60_000)])
def test_an_endless_strip_is_refused(extract: Extract, size: tuple[int, int]) -> None:
    with pytest.raises(ExtractionError) as raised:
        extract(saved(Image.new("1", size, 1), "PNG"))

    assert raised.value.reason == "oversized"


def test_a_bomb_is_refused_before_it_is_decoded(extract: Extract) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 1, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(6251) * 500, 9)  # more would follow
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")

    for data in (bomb, saved(Image.new("1", (9000, 9000)), "PNG")):
        with pytest.raises(ExtractionError) as raised:
            extract(data)
        assert raised.value.reason == "bomb"
    with pytest.raises(ExtractionError, match="max_image_pixels = 100"):
        extract(saved(drawn(), "PNG"), max_image_pixels=100)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF"])
def test_a_truncated_picture_is_damaged(extract: Extract, kind: str) -> None:
    data = saved(drawn(), kind)

    with pytest.raises(ExtractionError) as raised:
        extract(data[: len(data) // 2])

    assert raised.value.reason == "damaged"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF"])
def test_damage_anywhere_ends_in_text_or_a_refusal(extract: Extract, unread: list[Image.Image], kind: str) -> None:
    good = saved(drawn(), kind, **({"save_all": True, "append_images": [drawn()]} if kind == "TIFF" else {}))
    generator = random.Random(7)
    reasons = set()
    for _ in range(60):
        data = bytearray(good)
        for _ in range(generator.choice([1, 8, 64])):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        try:
            reasons |= {item.reason for item in extract(bytes(data)) if isinstance(item, Refused)}
        except ExtractionError as error:
            reasons.add(error.reason)

    assert reasons <= {"damaged", "bomb"}


def test_a_picture_is_refused_where_recognition_is_off_or_not_installed(
    extract: Extract, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved(drawn(), "PNG")
    with pytest.raises(ExtractionError) as raised:
        extract(data, ocr=False)
    assert raised.value.reason == "unsupported"

    monkeypatch.setitem(sys.modules, "rapidocr", None)
    image_module.engine.cache_clear()
    (refused,) = Dispatcher(ExtractConfig(), tmp_path).documents(Content("a.png", data=data))
    assert refused == Refused("", "not_installed", "rapidocr is not installed: install sheepop[ocr]")


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("onnxruntime: Failed to allocate memory for requested buffer", MemoryError),
        ("Non-zero status code returned while running Concat node. Status Message: std::bad_alloc", MemoryError),
        ("Invalid rank for input", ExtractionError),
    ],
)
def test_recognition_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, message: str, kind: type[Exception]) -> None:
    def engine(*_: object, **__: object) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(image_module, "engine", lambda threads: engine)
    with pytest.raises(kind):
        recognise(drawn(), ExtractConfig())
