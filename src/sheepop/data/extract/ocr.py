"""Text in pictures: rapidocr reads it, offline, with the models that come in its wheel."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
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
# A page the right way up is recognised with 0.93 to 1.00 unless it is hard to see, one that is turned with 0.5 to 0.8.
_UPRIGHT = 0.9
_SHORTEST_WORD = re.compile(r"\w{3}")
# Letters side by side, each as wide as it is high, cover a line 0.8 to 2.3 times in the scripts that are read. Of
# others the models read dots and the odd letter: 0.0 to 0.2 times.
_THINNEST = 0.4
_GREEK, _VIETNAMESE = re.compile("[\u0370-\u03ff\u1f00-\u1fff]"), re.compile("[ơưƠƯ]")
# Of Vietnamese, 5 in 100 of the letters that come through are these two, which no other language has.
_VIETNAMESE_SHARE = 0.01
_READ = "recognition reads Latin letters, Chinese and Japanese"


@dataclass(frozen=True, slots=True)
class Recognised:
    """The lines found in a picture, in pixels of a copy, turned or smaller, of this `width` and `height`.

    `confidence` is the mean over the characters, from 0 to 1, and 0 without lines; `unsure` is how many lines were left
    out because they are hardly read, or their confidence is under `data.extract.ocr_min_confidence`.
    """

    lines: list[Line]
    width: float
    height: float
    confidence: float
    unsure: int


def recognise(image: Image, config: ExtractConfig) -> Recognised:
    """The text in a picture of mode ``L`` or ``RGB``, which is turned by quarters where it is not the right way up.

    Raises ImportError without rapidocr, MemoryError, and `ExtractionError`: ``oversized`` for a strip that would have
    to be read for too long, ``damaged`` when recognition fails, ``unsupported`` for letters of which it misses some,
    ``illegible`` where it is less sure than `ocr_min_page_confidence`, as with a script that it does not know.
    """
    views = [_View.of(fitting(image), config)]
    if views[0].sees_writing:
        for turn in views[0].turns():
            if not views[-1].is_doubtful:
                break
            views.append(_View.of(views[0].image.transpose(turn), config))
    view = max(views, key=lambda view: view.right_characters)
    if view.sees_writing:
        _refuse_unread(view, config)
    return Recognised(
        _same_sizes(view.lines), view.image.width, view.image.height, view.confidence, view.seen - view.read
    )


@dataclass(frozen=True, slots=True)
class _View:
    """What recognition finds in a picture as it is held: pieces of lines with their scores.

    `seen` is how many lines there are, `read` how many of them gave what can be kept.
    """

    image: Image
    found: list[tuple[Line, float]]
    seen: int
    read: int

    @classmethod
    def of(cls, image: Image, config: ExtractConfig) -> _View:
        import numpy

        engine = _engine(config.ocr_threads)
        tiles = list(_tiles(numpy.asarray(image.convert("L"))))
        lines = [
            [(_moved(piece, x, y), score) for piece in pieces] if score >= config.ocr_min_confidence else []
            for x, y, tile in tiles
            for pieces, score in _read(engine, tile)
        ]
        # Lines of which no letter is known are not among those that it hands on.
        seen = len(lines) or sum(_detected(engine, tile) for _, _, tile in tiles)
        return cls(image, list(chain.from_iterable(lines)), seen, sum(map(bool, lines)))

    @property
    def lines(self) -> list[Line]:
        return [line for line, _ in self.found]

    @property
    def sees_writing(self) -> bool:
        return self.seen > 0

    @property
    def confidence(self) -> float:
        """The mean over the characters."""
        count = sum(len(line.text) for line, _ in self.found)
        return sum(score * len(line.text) for line, score in self.found) / count if count else 0.0

    @property
    def right_characters(self) -> float:
        """About how many characters in level lines are right."""
        return sum(score * len(line.text) for line, score in self.found if not _is_steep(line))

    @property
    def is_doubtful(self) -> bool:
        """Whether it may not be the right way up."""
        return self.confidence < _UPRIGHT or self.is_steep

    @property
    def is_steep(self) -> bool:
        """Whether most of the text runs up or down."""
        steep = sum(len(line.text) for line in self.lines if _is_steep(line))
        return 2 * steep > sum(len(line.text) for line in self.lines)

    def turns(self) -> list[Any]:
        """The other ways to hold the picture, the likeliest first; lines that run upwards are read turned back."""
        from PIL.Image import Transpose

        left, right, over = Transpose.ROTATE_90, Transpose.ROTATE_270, Transpose.ROTATE_180
        if not self.is_steep:
            return [over, right, left]
        return [left, right, over] if self.confidence >= _UPRIGHT else [right, left, over]


def _is_steep(line: Line) -> bool:
    # A single letter or number may be higher than it is wide.
    return len(line.text) > 2 and line.bottom - line.top > line.right - line.left


def _refuse_unread(view: _View, config: ExtractConfig) -> None:
    """Raises `ExtractionError` where what was read is not what stands there."""
    text = "".join(line.text for line in view.lines)
    letters = sum(map(str.isalpha, text))
    if 2 * len(_GREEK.findall(text)) > letters:
        raise ExtractionError("unsupported", f"it is in Greek; {_READ}")
    if len(_VIETNAMESE.findall(text)) > _VIETNAMESE_SHARE * letters:
        raise ExtractionError(
            "unsupported", f"it is in Vietnamese, of which letters with two marks are missed; {_READ}"
        )
    # Where most lines are unread, what was taken from the others is no more than dots and odd letters.
    confidence = 0.0 if view.is_doubtful and 2 * view.read < view.seen else view.confidence
    if confidence < config.ocr_min_page_confidence:
        limit = f"data.extract.ocr_min_page_confidence = {config.ocr_min_page_confidence}"
        sure = f"recognition is sure of {view.read} of {view.seen} lines, and of their letters to {view.confidence:.2f}"
        raise ExtractionError("illegible", f"unclear, or in a script that is not known: {sure}; {_READ}; see {limit}")


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


def _detected(engine: Any, tile: NDArray[numpy.uint8]) -> int:
    """How many lines there seem to be in a tile, whatever they say."""
    boxes = _run(engine, tile, use_rec=False).boxes if tile.max() > tile.min() else None
    return 0 if boxes is None else len(boxes)


def _run(engine: Any, tile: NDArray[numpy.uint8], *, use_rec: bool) -> Any:
    import numpy

    try:
        return engine(numpy.stack([tile] * 3, axis=-1), use_det=True, use_rec=use_rec, return_word_box=True)
    except Exception as error:
        # "bad_alloc" and "failed to allocate" of onnxruntime and OpenCV.
        if "alloc" in str(error) or isinstance(error, MemoryError):
            raise MemoryError("text recognition ran out of memory") from None
        raise ExtractionError("damaged", f"text recognition failed: {type(error).__name__}") from None


def _read(engine: Any, tile: NDArray[numpy.uint8]) -> Iterator[tuple[list[Line], float]]:
    """The lines in one tile, in pieces where there are wide gaps, with their scores, which are 0 for unread ones."""
    if tile.max() == tile.min():
        return
    result = _run(engine, tile, use_rec=True)
    if result.txts is None:
        return
    for box, text, score, words in zip(result.boxes, result.txts, result.scores, _words(result), strict=True):
        # The corners go round from the upper left; halfway along the sides a slanted line has its true height.
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = box.tolist()
        top, bottom = (y0 + y1) / 2, (y2 + y3) / 2
        left, right = min(x0, x3), max(x1, x2)
        size = _LETTERS * (bottom - top)
        is_thin = len(text) * min(size, _LETTERS * (right - left)) < _THINNEST * max(right - left, bottom - top)
        pieces = [
            Line(piece, begin, top, end, bottom, size, (end - begin) * len(piece.split(" ", 1)[0]) / len(piece))
            for piece, begin, end in _pieces(text, words, left, right, size)
            if piece and end > begin and bottom > top
        ]
        # Where most of a line is dots, as in a table of contents, it has words all the same.
        yield pieces, 0.0 if is_thin and not _SHORTEST_WORD.search(text) else float(score)


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
