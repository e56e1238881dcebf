"""Reads text in pictures: decodes them with Pillow within limits and recognises text with rapidocr, offline."""

from __future__ import annotations

import io
import logging
import math
import re
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, ImageStat

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, Context, Documents, ExtractionError, Refused
from sheepop.data.extract.page_lines import WIDE_GAP, Line, Page
from sheepop.data.extract.paged_text import documents

_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF", "AVIF")
_HEIF, _AVIF = b"ftyp", b"ftypavif"
_PAGED = "TIFF"
# A JPEG can be decoded at a fraction of its size; sides of at least this many pixels lose nothing for recognition.
_DECODED_SIDE = 3600
# A transparent picture whose visible pixels have a lower mean than this (of 0 to 255) gets a white background.
_DARK = 128
# Pixels. Larger pictures are shrunk and longer ones are cut into tiles: memory and time of recognition grow with the
# input, and an A4 page of this size (155 dots per inch) is read as well as a larger one.
_LONG_SIDE, _SHORT_SIDE = 1800, 1273
_LONGEST_ASPECT = 2.0
_MOST_TILES = 8
_LARGEST_TILE = 2400
# A tile ends at the emptiest row in this last part of its length.
_CUT_SHARE = 0.25
# The height of letters as a share of the height of the box around a line; the bounds within which sizes are the same.
_LETTERS = 0.75
_SAME_SIZE = (0.7, 1.35)
# The confidence of an upright page is 0.93 to 1.00 unless it is hard to read, that of a turned page 0.5 to 0.8.
_UPRIGHT = 0.9
_SHORTEST_WORD = re.compile(r"\w{3}")
# The number of letters times their height, relative to the length of the line: 0.8 to 2.3 in the scripts that the
# models read. In other scripts they read dots and a few letters: 0.0 to 0.2.
_THINNEST = 0.4
# Unsupported languages: a text in which more than this share of the letters match the pattern is in that language.
_UNREAD = (
    (re.compile("[\u0370-\u03ff\u1f00-\u1fff]"), 0.5, "Greek"),
    # 5 in 100 of the recognised letters are these two, which no other language has.
    (re.compile("[ơưƠƯ]"), 0.01, "Vietnamese, of which letters with two marks are missed"),
)
_READ = "recognition reads Latin letters, Chinese and Japanese"
_SCRIPT = re.compile(rb"Script: (?!Latin|Fraktur|Han\b|Japanese)(\w+)")
_TELL_SCRIPT, _SCRIPT_SECONDS = ("tesseract", "stdin", "stdout", "--psm", "0"), 30.0


def extract_image(content: Content, context: Context) -> Documents:
    """Yields the text recognised in the picture as prose; the pages of a TIFF get marks.

    Only the first frame of an animation is read; the metadata ``frames`` is their number. Raises `ExtractionError`:
    ``bomb`` for more than `max_image_pixels`, ``damaged`` if Pillow cannot decode it, ``unsupported`` with `ocr` off;
    ImportError without rapidocr.
    """
    if not context.config.ocr:
        raise ExtractionError("unsupported", "it is a picture, and data.extract.ocr is off")
    with content.open() as file:
        with _refusals():
            image = Image.open(file, formats=_formats(content))
            frames = int(getattr(image, "n_frames", 1))
        is_paged = image.format == _PAGED and frames > 1
        facts = {"pages" if is_paged else "frames": str(frames)} if frames > 1 else {}
        for item in documents(_pages(image, frames if is_paged else 1, context), facts, context.config):
            # A single picture has no pages to tell apart.
            yield item if is_paged or isinstance(item, Refused) else replace(item, marks=())


def _formats(content: Content) -> tuple[str, ...]:
    """Returns the formats that Pillow may try; registers HEIF, the format of phones, if the picture needs it."""
    brand = content.head(12)[4:]
    if brand == _AVIF or not brand.startswith(_HEIF):
        return _FORMATS
    from pi_heif import register_heif_opener

    register_heif_opener()
    return (*_FORMATS, "HEIF")


def _pages(image: Image.Image, count: int, context: Context) -> Iterator[Page | Refused]:
    """Yields the first `count` frames as recognised pages or refusals; raises the error of a single frame."""
    for number in range(1, count + 1):
        context.alive()
        place = f"page {number}" if count > 1 else ""
        try:
            with _refusals():
                image.seek(number - 1)
            upright = _upright(image, context.config)
            if number == count:
                image.close()  # recognition needs the memory
            page = recognise(upright, context.config, number)
        except ExtractionError as error:
            if count == 1:
                raise
            yield Refused(place, error.reason, error.detail)
        else:
            yield page if page.lines else Refused(place, "empty", "no text was recognised in it")


def _upright(image: Image.Image, config: ExtractConfig) -> Image.Image:
    """Checks the size of the picture, then returns it decoded, turned by its EXIF orientation, grey and shrunk."""
    if image.width * image.height > config.max_image_pixels:
        size = f"{image.width:,} x {image.height:,}"
        limit = f"data.extract.max_image_pixels = {config.max_image_pixels:,}"
        raise ExtractionError("bomb", f"its {size} pixels are more than {limit}")
    with _refusals():
        image.draft(None, (_DECODED_SIDE, _DECODED_SIDE))
        return fitting(_grey(ImageOps.exif_transpose(image)))


def _grey(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        # Deeper than 8 bits: the darkest value becomes black, the lightest white.
        values = np.nan_to_num(np.asarray(image, dtype=np.float32))
        low, high = float(values.min()), float(values.max())
        return Image.fromarray(((values - low) * (255 / max(high - low, 1e-9))).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("L")
    grey, alpha = image.convert("RGBA").convert("LA").split()
    visible = alpha.point(lambda value: 255 if value >= _DARK else 0)
    is_dark = visible.getbbox() is None or ImageStat.Stat(grey, mask=visible).mean[0] < _DARK
    ground = Image.new("L", grey.size, 255 if is_dark else 0)
    ground.paste(grey, mask=alpha)
    return ground


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns the errors of Pillow for unreadable pictures into `ExtractionError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (MemoryError, ExtractionError):
        raise
    except Image.DecompressionBombError as error:
        raise ExtractionError("bomb", str(error)) from None
    except Exception as error:
        # Pillow's decoders raise any Python error on malformed data, not errors of their own.
        raise ExtractionError("damaged", f"it cannot be decoded: {error}") from None


def recognise(image: Image.Image, config: ExtractConfig, number: int = 1) -> Page:
    """Returns the text in a picture of mode ``L`` or ``RGB`` as a page; turns the picture by quarters if necessary.

    The unit is a pixel of the picture as read, turned and perhaps shrunk. Lines of which little is read, or with a
    confidence under `ocr_min_confidence`, are left out and counted as unsure. Raises ImportError without rapidocr,
    MemoryError, and `ExtractionError`: ``oversized`` for a strip that is too long, ``damaged`` if recognition fails,
    ``unsupported`` for a language whose letters it misses, ``illegible``.
    """
    views = [_view(fitting(image), config)]
    left, right, over = Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_270, Image.Transpose.ROTATE_180
    # The most likely turn comes first; rapidocr itself turns steep lines before it reads them.
    turns = [over, right, left]
    if views[0].is_steep:
        turns = [left, right, over] if views[0].confidence >= _UPRIGHT else [right, left, over]
    for turn in turns if views[0].seen else ():
        if views[-1].is_doubtful:
            views.append(_view(views[0].image.transpose(turn), config))
    view = max(views, key=lambda view: view.right)
    if view.seen:
        _refuse_unread(view, config)
    usual = median([line.size for line in view.lines] or [0.0])
    low, high = (share * usual for share in _SAME_SIZE)
    # Line heights differ with the letters that occur, so heights close to the median become the median.
    lines = [line._replace(size=usual) if low <= line.size <= high else line for line in view.lines]
    return Page(number, view.image.height, lines, confidence=view.confidence, unsure=view.seen - view.read)


class _View(NamedTuple):
    """The result of recognition in one orientation: pieces of lines, and the mean confidence over characters.

    `seen` is the number of lines, `read` the number of lines that gave text, `right` an estimate of the correct
    characters in level lines. A view is steep if most text runs up or down, doubtful if it may not be upright.
    """

    image: Image.Image
    lines: list[Line]
    seen: int
    read: int
    confidence: float
    right: float
    is_steep: bool
    is_doubtful: bool


def _view(image: Image.Image, config: ExtractConfig) -> _View:
    read = engine(config.ocr_threads)
    tiles = [tile for tile in _tiles(np.asarray(image.convert("L"))) if tile[2].max() > tile[2].min()]
    least = config.ocr_min_confidence
    lines = [(pieces if score >= least else [], score) for tile in tiles for pieces, score in _read(read, *tile)]
    found = [(piece, len(piece.text), score) for pieces, score in lines for piece in pieces]
    # A piece of one or two characters may be higher than wide.
    level = [item for item in found if item[1] <= 2 or item[0].height <= item[0].right - item[0].left]
    count = sum(length for _, length, _ in found)
    confidence = sum(length * score for _, length, score in found) / max(count, 1)
    right = sum(length * score for _, length, score in level)
    is_steep, is_doubtful = count > 2 * sum(length for _, length, _ in level), confidence < _UPRIGHT
    num_read, pieces = sum(bool(pieces) for pieces, _ in lines), [piece for piece, _, _ in found]
    return _View(image, pieces, len(lines), num_read, confidence, right, is_steep, is_steep or is_doubtful)


def _refuse_unread(view: _View, config: ExtractConfig) -> None:
    """Raises `ExtractionError` if the recognised text cannot be trusted."""
    text = "".join(line.text for line in view.lines)
    num_letters = sum(map(str.isalpha, text))
    for letters, share, language in _UNREAD:
        if len(letters.findall(text)) > share * num_letters:
            raise ExtractionError("unsupported", f"it is in {language}; {_READ}")
    # If most lines gave no text, the rest is only dots and a few letters.
    confidence = 0.0 if view.is_doubtful and 2 * view.read < view.seen else view.confidence
    if confidence < config.ocr_min_page_confidence:
        script = _script(view.image)
        cause = f"in {script} script" if script else "unclear, or in an unknown script"
        limit = f"data.extract.ocr_min_page_confidence = {config.ocr_min_page_confidence}"
        sure = f"recognition read {view.read} of {view.seen} lines, with a confidence of {view.confidence:.2f}"
        raise ExtractionError("illegible", f"{cause}: {sure}; {_READ}; see {limit}")


def _script(image: Image.Image) -> str | None:
    """Returns the script of a picture by tesseract; None if the script is supported or tesseract is not installed."""
    picture = io.BytesIO()
    image.save(picture, "PNG")
    try:
        found = subprocess.run(_TELL_SCRIPT, input=picture.getvalue(), capture_output=True, timeout=_SCRIPT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _SCRIPT.search(found.stdout)
    return match.group(1).decode() if match else None


def fitting(image: Image.Image) -> Image.Image:
    """Returns the picture, shrunk to a tile or the width of a strip of tiles; raises `ExtractionError` if too long."""
    short, long = sorted(image.size)
    if long <= _LONGEST_ASPECT * short:
        scale = min(1.0, _LONG_SIDE / long, math.sqrt(_LONG_SIDE * _SHORT_SIDE / (short * long)))
    else:
        scale = min(1.0, _SHORT_SIDE / short)
    if math.ceil(long * scale / (_LONG_SIDE * (1 - _CUT_SHARE))) > _MOST_TILES:
        shape = f"{image.width:,} x {image.height:,}"
        raise ExtractionError("oversized", f"a picture of {shape} pixels is too long to read")
    if scale == 1.0:
        return image
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)


@lru_cache(maxsize=1)
def engine(threads: int) -> Any:
    """Returns the text recognition engine with this many threads; raises ImportError without rapidocr."""
    from rapidocr import RapidOCR

    class Engine(RapidOCR):
        """RapidOCR that also counts the detected lines, because its results omit lines without a recognised letter."""

        num_detected = 0

        def detect_and_crop(self, *inputs: Any) -> Any:
            crops, found = super().detect_and_crop(*inputs)
            self.num_detected = len(crops)
            return crops, found

    logging.getLogger("RapidOCR").setLevel(logging.CRITICAL)
    return Engine(
        params={
            "Global.log_level": "critical",
            # The classifier for upside-down lines makes upright pages worse.
            "Global.use_cls": False,
            "Global.text_score": 0.0,
            "Global.max_side_len": _LARGEST_TILE,
            # Do not enlarge small pictures to a minimum size: it takes seconds and reads no better.
            "Det.limit_type": "max",
            "Det.limit_side_len": _LARGEST_TILE,
            # One line at a time: the result then does not depend on the other lines, and takes less time and memory.
            "Rec.rec_batch_num": 1,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )


def _tiles(pixels: NDArray[np.uint8]) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
    """Yields (x, y, pixels) of pieces along the longer side of the picture, cut at its emptiest rows."""
    is_tall = pixels.shape[0] >= pixels.shape[1]
    strip = pixels if is_tall else pixels.T
    begin = 0
    while begin < len(strip):
        end = len(strip)
        if end - begin > _LONG_SIDE:
            first = begin + round(_LONG_SIDE * (1 - _CUT_SHARE))
            window = strip[first : begin + _LONG_SIDE]
            end = first + int((window.max(axis=1).astype(int) - window.min(axis=1)).argmin())
        yield (0, begin, strip[begin:end]) if is_tall else (begin, 0, strip[begin:end].T)
        begin = end


def _read(read: Any, x: int, y: int, tile: NDArray[np.uint8]) -> Iterator[tuple[list[Line], float]]:
    """Yields (pieces, score) for each line in one tile; lines are cut at wide gaps, and unread lines have score 0."""
    read.num_detected = 0
    try:
        result = read(np.stack([tile] * 3, axis=-1), return_word_box=True)
    except Exception as error:
        # Onnxruntime and OpenCV say "bad_alloc" and "failed to allocate".
        if "alloc" in str(error) or isinstance(error, MemoryError):
            raise MemoryError("text recognition ran out of memory") from None
        raise ExtractionError("damaged", f"text recognition failed: {type(error).__name__}") from None
    texts = result.txts or ()
    yield from [([], 0.0)] * (read.num_detected - len(texts))
    if not texts:
        return
    # `word_results` omits lines without known words.
    words = [line for line in result.word_results or () if isinstance(line, tuple)]
    if len(words) != len(texts):
        words = [()] * len(texts)
    for box, text, score, places in zip(result.boxes, texts, result.scores, words, strict=True):
        # The corners go round from the upper left; midway along its sides a slanted line has its true height.
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = box.tolist()
        top, bottom = (y0 + y1) / 2, (y2 + y3) / 2
        left, right = min(x0, x3), max(x1, x2)
        size = _LETTERS * (bottom - top)
        is_thin = len(text) * min(size, _LETTERS * (right - left)) < _THINNEST * max(right - left, bottom - top)
        pieces = []
        for piece, begin, end in _pieces(text, places, left, right, WIDE_GAP * size):
            if piece and end > begin and bottom > top:
                first_width = (end - begin) * len(piece.split(" ", 1)[0]) / len(piece)
                pieces.append(Line(piece, x + begin, y + top, x + end, y + bottom, size, first_width))
        # A line that is mostly dots, as in a table of contents, still has words.
        yield pieces, 0.0 if is_thin and not _SHORTEST_WORD.search(text) else float(score)


def _pieces(text: str, words: Any, left: float, right: float, gap: float) -> list[tuple[str, float, float]]:
    """Cuts a line at wide gaps into (text, left, right), because detection may take two columns for one line."""
    pieces: list[tuple[str, float, float]] = []
    start, begin = 0, left
    position, reach = 0, left
    for word, _, box in words:
        first, *_, last = sorted(corner[0] for corner in box)
        place = text.find(word, position)
        if place < 0:
            pieces, start, begin = [], 0, left
            break
        if position and first - reach > gap:
            pieces.append((text[start:place], begin, reach))
            start, begin = place, first
        position, reach = place + len(word), max(reach, last)
    pieces.append((text[start:], begin, right))
    return [(" ".join(piece.split()), begin, end) for piece, begin, end in pieces]
