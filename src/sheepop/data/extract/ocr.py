"""Text in pictures: rapidocr reads it, offline, with the models that come in its wheel."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from sheepop.data.extract.interface import ExtractionError
from sheepop.data.extract.page_lines import Line

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
    from PIL.Image import Image

    from sheepop.data.extract.config import ExtractConfig

# Pixels. What is larger is shrunk, what is longer is cut into tiles: memory and time of recognition grow with its
# input, and a page of A4 at this size (155 dots per inch) is read as well as at any larger one.
_LONG_SIDE, _SHORT_SIDE = 1800, 1273
_LONGEST_ASPECT = 2.0
_MOST_TILES = 8
_LARGEST_TILE = 2400
# A tile ends at the emptiest row in this last part of it.
_CUT_SHARE = 0.25
# Letters take this share of the height of the box found round a line; heights within these bounds are one size.
_LETTERS = 0.75
_SAME_SIZE = (0.7, 1.35)
# In multiples of the size of the letters.
_GAP = 0.9


@dataclass(frozen=True, slots=True)
class Recognised:
    """The lines found in a picture, in pixels of it or of a smaller copy of this `width` and `height`.

    `confidence` is the mean over the lines, from 0 to 1, and 0 without lines; `unsure` is how many lines were left
    out because their confidence is under `data.extract.ocr_min_confidence`.
    """

    lines: list[Line]
    width: float
    height: float
    confidence: float
    unsure: int


def recognise(image: Image, config: ExtractConfig) -> Recognised:
    """The text in an upright picture of mode ``L`` or ``RGB``.

    Raises ImportError without rapidocr, MemoryError, and `ExtractionError`: ``oversized`` for a strip that would have
    to be read for too long, ``damaged`` when recognition fails.
    """
    import numpy

    engine = _engine(config.ocr_threads)
    image = fitting(image)
    pixels = numpy.asarray(image.convert("L"))
    found: list[tuple[Line, float]] = []
    for x, y, tile in _tiles(pixels):
        found += [(_moved(line, x, y), score) for line, score in _read(engine, tile)]
    sure = [(line, score) for line, score in found if score >= config.ocr_min_confidence]
    confidence = sum(score for _, score in sure) / len(sure) if sure else 0.0
    lines = _same_sizes([line for line, _ in sure])
    return Recognised(lines, image.width, image.height, confidence, len(found) - len(sure))


def fitting(image: Image) -> Image:
    """The picture, shrunk where it is larger than what is read at once, or broader than a strip of tiles may be.

    Raises `ExtractionError` for a strip of too many tiles.
    """
    from PIL import Image as PillowImage

    short, long = sorted(image.size)
    if long <= _LONGEST_ASPECT * short:
        scale = min(1.0, _LONG_SIDE / long, math.sqrt(_LONG_SIDE * _SHORT_SIDE / (short * long)))
    else:
        scale = min(1.0, _SHORT_SIDE / short)
    tiles = math.ceil(long * scale / (_LONG_SIDE * (1 - _CUT_SHARE)))
    if tiles > _MOST_TILES:
        shape = f"{image.width:,} x {image.height:,}"
        raise ExtractionError("oversized", f"a picture of {shape} pixels is too long to read")
    if scale == 1.0:
        return image
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, PillowImage.Resampling.LANCZOS, reducing_gap=3.0)


@lru_cache(maxsize=1)
def _engine(threads: int) -> Any:
    from rapidocr import RapidOCR

    logging.getLogger("RapidOCR").setLevel(logging.CRITICAL)
    return RapidOCR(
        params={
            "Global.log_level": "critical",
            # Recognition that also looks for lines upside down reads upright pages worse.
            "Global.use_cls": False,
            "Global.text_score": 0.0,
            "Global.max_side_len": _LARGEST_TILE,
            # As the picture is: small ones are not blown up to a least size, which takes seconds and reads no better.
            "Det.limit_type": "max",
            "Det.limit_side_len": _LARGEST_TILE,
            # One line at a time: a line is read the same whatever stands beside it, and in less time and memory.
            "Rec.rec_batch_num": 1,
            "EngineConfig.onnxruntime.intra_op_num_threads": threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )


def _tiles(pixels: NDArray[numpy.uint8]) -> Iterator[tuple[int, int, NDArray[numpy.uint8]]]:
    """The picture in pieces along its longer side, cut where it is emptiest: x, y and pixels of each."""
    is_tall = pixels.shape[0] >= pixels.shape[1]
    strip = pixels if is_tall else pixels.T
    begin = 0
    while len(strip) - begin > _LONG_SIDE:
        first = begin + round(_LONG_SIDE * (1 - _CUT_SHARE))
        window = strip[first : begin + _LONG_SIDE]
        contrast = window.max(axis=1).astype(int) - window.min(axis=1)
        end = first + int(contrast.argmin())
        yield (0, begin, strip[begin:end]) if is_tall else (begin, 0, strip[begin:end].T)
        begin = end
    yield (0, begin, strip[begin:]) if is_tall else (begin, 0, strip[begin:].T)


def _read(engine: Any, tile: NDArray[numpy.uint8]) -> Iterator[tuple[Line, float]]:
    """The lines in one tile with their scores."""
    import numpy

    if tile.max() == tile.min():
        return
    try:
        result = engine(numpy.stack([tile] * 3, axis=-1), return_word_box=True)
    except Exception as error:
        # "bad_alloc" and "failed to allocate" of onnxruntime and OpenCV.
        if "alloc" in str(error) or isinstance(error, MemoryError):
            raise MemoryError("text recognition ran out of memory") from None
        raise ExtractionError("damaged", f"text recognition failed: {type(error).__name__}") from None
    if result.txts is None:
        return
    for box, text, score, words in zip(result.boxes, result.txts, result.scores, _words(result), strict=True):
        # The corners go round from the upper left; halfway along the sides a slanted line has its true height.
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = box.tolist()
        top, bottom = (y0 + y1) / 2, (y2 + y3) / 2
        size = _LETTERS * (bottom - top)
        for piece, left, right in _pieces(text, words, min(x0, x3), max(x1, x2), size):
            if piece and right > left and bottom > top:
                first = (right - left) * len(piece.split(" ", 1)[0]) / len(piece)
                yield Line(piece, left, top, right, bottom, size, first), float(score)


def _words(result: Any) -> list[Any]:
    """The words of each line as (text, score, box), nothing where they are not known for all lines."""
    count, words = len(result.txts), result.word_results
    is_complete = words is not None and len(words) == count and all(isinstance(line, tuple) for line in words)
    return list(words) if is_complete else [()] * count


def _pieces(text: str, words: Any, left: float, right: float, size: float) -> list[tuple[str, float, float]]:
    """The parts of a line with wide gaps between them, and their ends: detection takes two columns for one line."""
    cuts: list[tuple[int, float, float]] = []
    position, reach = 0, left
    for word, _, box in words:
        begin, end = min(corner[0] for corner in box), max(corner[0] for corner in box)
        place = text.find(word, position)
        if place < 0:
            return [(" ".join(text.split()), left, right)]
        if position and begin - reach > _GAP * size:
            cuts.append((place, reach, begin))
        position, reach = place + len(word), max(reach, end)
    places = [0, *(place for place, _, _ in cuts), len(text)]
    lefts, rights = [left, *(begin for _, _, begin in cuts)], [*(end for _, end, _ in cuts), right]
    texts = [" ".join(text[begin:end].split()) for begin, end in pairwise(places)]
    return list(zip(texts, lefts, rights, strict=True))


def _moved(line: Line, x: int, y: int) -> Line:
    return replace(line, left=line.left + x, right=line.right + x, top=line.top + y, bottom=line.bottom + y)


def _same_sizes(lines: list[Line]) -> list[Line]:
    """The lines, where heights that differ only by which letters occur are made one."""
    if not lines:
        return lines
    usual = median(line.size for line in lines)
    low, high = (share * usual for share in _SAME_SIZE)
    return [replace(line, size=usual) if low <= line.size <= high else line for line in lines]
