"""Pictures of text: decoded by Pillow within limits, read by recognition."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.ocr import fitting, recognise
from sheepop.data.extract.page_lines import Page
from sheepop.data.extract.paged_text import Gathering

if TYPE_CHECKING:
    from PIL.Image import Image

    from sheepop.data.extract.config import ExtractConfig

_FORMATS = ("PNG", "JPEG", "TIFF", "WEBP", "BMP", "GIF", "AVIF")
_HEIF, _AVIF = b"ftyp", b"ftypavif"
_PAGED = "TIFF"
# A JPEG can be decoded at a fraction of its size; at this one nothing is lost for recognition.
_DECODED_SIDE = 3600
# Under this mean of 0 to 255, what can be seen of a transparent picture is dark and belongs on white.
_DARK = 128


def extract_image(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    """One document of prose: the text that is recognised in the picture, or in the pages of a TIFF, with marks.

    Only the first frame of an animation is read; ``frames`` then says how many there are. Raises `ExtractionError`:
    ``bomb`` for more than `max_image_pixels`, ``damaged`` for what Pillow cannot read, ``unsupported`` with `ocr`
    off; ImportError without Pillow or rapidocr.
    """
    config = context.config
    if not config.ocr:
        raise ExtractionError("unsupported", "it is a picture, and data.extract.ocr is off")
    with content.open() as file:
        from PIL import Image as PillowImage

        with _refusals():
            image = PillowImage.open(file, formats=_formats(content))
            frames = int(getattr(image, "n_frames", 1))
        if image.format == _PAGED and frames > 1:
            yield from _pages(image, frames, context)
        else:
            upright = _upright(image, config)
            image.close()  # recognition needs the memory
            yield from _picture(upright, {"frames": str(frames)} if frames > 1 else {}, config)


def _formats(content: Content) -> tuple[str, ...]:
    """The formats as one of which Pillow may open a picture; that of phones is made known to it."""
    brand = content.head(12)[4:]
    if brand == _AVIF or not brand.startswith(_HEIF):
        return _FORMATS
    from pi_heif import register_heif_opener

    register_heif_opener()
    return (*_FORMATS, "HEIF")


def _picture(image: Image, facts: Mapping[str, str], config: ExtractConfig) -> Iterator[Extracted | Refused]:
    page = _recognised(image, 1, config)
    gathering = Gathering(config, facts)
    list(gathering.add(page))
    if not page.lines:
        yield Refused("", "empty", "no text was recognised in it")
    for document in gathering.document():
        yield replace(document, marks=())  # there are no pages to tell apart


def _pages(image: Image, frames: int, context: Context) -> Iterator[Extracted | Refused]:
    config = context.config
    gathering = Gathering(config, {"pages": str(frames)})
    for number in range(1, frames + 1):
        context.alive()
        try:
            with _refusals():
                image.seek(number - 1)
            page = _recognised(_upright(image, config), number, config)
        except ExtractionError as error:
            yield Refused(f"page {number}", error.reason, error.detail)
            continue
        if page.lines:
            yield from gathering.add(page)
        else:
            yield Refused(f"page {number}", "empty", "no text was recognised in it")
    yield from gathering.document()


def _recognised(image: Image, number: int, config: ExtractConfig) -> Page:
    found = recognise(image, config)
    return Page(number, found.height, found.lines, confidence=found.confidence, unsure=found.unsure)


def _upright(image: Image, config: ExtractConfig) -> Image:
    """The picture, decoded, the right way up, grey and shrunk; its size is looked at before it is decoded."""
    from PIL import ImageOps

    if image.width * image.height > config.max_image_pixels:
        size = f"{image.width:,} x {image.height:,}"
        limit = f"data.extract.max_image_pixels = {config.max_image_pixels:,}"
        raise ExtractionError("bomb", f"its {size} pixels are more than {limit}")
    with _refusals():
        image.draft(None, (_DECODED_SIDE, _DECODED_SIDE))
        return fitting(_grey(ImageOps.exif_transpose(image)))


def _grey(image: Image) -> Image:
    from PIL import Image as PillowImage

    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        import numpy

        # Deeper than 8 bits: what is darkest becomes black, what is lightest white.
        values = numpy.nan_to_num(numpy.asarray(image, dtype=numpy.float32))
        low, high = float(values.min()), float(values.max())
        return PillowImage.fromarray(((values - low) * (255 / max(high - low, 1e-9))).astype(numpy.uint8))
    if not image.has_transparency_data:
        return image.convert("L")
    grey, alpha = image.convert("RGBA").convert("LA").split()
    ground = PillowImage.new("L", grey.size, 255 if _is_dark(grey, alpha) else 0)
    ground.paste(grey, mask=alpha)
    return ground


def _is_dark(grey: Image, alpha: Image) -> bool:
    """Whether what can be seen of a transparent picture is dark."""
    from PIL import ImageStat

    visible = alpha.point(lambda value: 255 if value >= _DARK else 0)
    return visible.getbbox() is None or ImageStat.Stat(grey, mask=visible).mean[0] < _DARK


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns what Pillow raises for a picture that it cannot read into an `ExtractionError`."""
    from PIL import Image as PillowImage

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (MemoryError, ExtractionError):
        raise
    except PillowImage.DecompressionBombError as error:
        raise ExtractionError("bomb", str(error)) from None
    except Exception as error:
        # Its decoders raise what Python raises where data is not as they expect, not errors of their own.
        raise ExtractionError("damaged", f"it cannot be decoded: {error}") from None
