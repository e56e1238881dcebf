"""Pictures of text: decoded by Pillow within limits, read by recognition."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from PIL import Image, ImageOps, ImageStat

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Content, Context, Extracted, ExtractionError, Refused
from sheepop.data.extract.ocr import fitting, recognise
from sheepop.data.extract.page_lines import Page
from sheepop.data.extract.paged_text import documents

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
    off; ImportError without rapidocr.
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
            is_marked = is_paged or isinstance(item, Refused)
            yield item if is_marked else replace(item, marks=())  # one picture has no pages to tell apart


def _formats(content: Content) -> tuple[str, ...]:
    """The formats as one of which Pillow may open a picture; that of phones is made known to it."""
    brand = content.head(12)[4:]
    if brand == _AVIF or not brand.startswith(_HEIF):
        return _FORMATS
    from pi_heif import register_heif_opener

    register_heif_opener()
    return (*_FORMATS, "HEIF")


def _pages(image: Image.Image, count: int, context: Context) -> Iterator[Page | Refused]:
    """The first frames of a picture, read; what is wrong with a single one is raised."""
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
    """The picture, decoded, the right way up, grey and shrunk; its size is looked at before it is decoded."""
    if image.width * image.height > config.max_image_pixels:
        size = f"{image.width:,} x {image.height:,}"
        limit = f"data.extract.max_image_pixels = {config.max_image_pixels:,}"
        raise ExtractionError("bomb", f"its {size} pixels are more than {limit}")
    with _refusals():
        image.draft(None, (_DECODED_SIDE, _DECODED_SIDE))
        return fitting(_grey(ImageOps.exif_transpose(image)))


def _grey(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        # Deeper than 8 bits: what is darkest becomes black, what is lightest white.
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
    """Turns what Pillow raises for a picture that it cannot read into an `ExtractionError`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (MemoryError, ExtractionError):
        raise
    except Image.DecompressionBombError as error:
        raise ExtractionError("bomb", str(error)) from None
    except Exception as error:
        # Its decoders raise what Python raises where data is not as they expect, not errors of their own.
        raise ExtractionError("damaged", f"it cannot be decoded: {error}") from None
