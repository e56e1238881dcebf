"""The settings under ``data.extract``: which text is read from files, and the limits on reading them."""

from __future__ import annotations

import re
import string
from functools import lru_cache
from typing import Self

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config

# A command line and plain YAML keep a backslash and the letter after it as two characters.
_ESCAPE = re.compile(r"\\([nt\\])")
_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\"}


@lru_cache
def parse_template(template: str) -> tuple[tuple[str, str | None], ...]:
    """Returns the pieces of a template such as ``{title}\\n{body}``: (literal text, the field that follows or None).

    ``{a.b}`` is the field `b` of the record in the field `a`; ``{{`` and ``}}`` are the braces themselves. A backslash
    before ``n``, ``t`` or another backslash makes a line end, a tab or a backslash.
    Raises ValueError for an unmatched brace, an empty field name, a format or an index, or if no field is named.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"an unmatched brace: {error}; write {{{{ or }}}} for the brace itself") from None
    names = [name for _, name, _, _ in pieces if name is not None]
    if not names:
        raise ValueError("it names no field; write names in braces, such as {title}")
    for name in names:
        if not all(name.split(".")):
            raise ValueError(f"{{{name}}} does not name a field; write {{name}}, or {{a.b}} for a field inside a field")
    # In a Python format string these access objects or change how a value is written.
    if any(form or conversion or re.search(r"[\[\]]", name or "") for _, name, form, conversion in pieces):
        raise ValueError("formats and indexes are not allowed; write only {name} or {a.b}")
    return tuple((_ESCAPE.sub(lambda escape: _ESCAPED[escape[1]], text), name) for text, name, _, _ in pieces)


class ExtractConfig(Config):
    """How files become documents, and the limits of the process that reads a file.

    With neither `column` nor `template`, the text of a record is found as `RecordFormat` describes.
    """

    max_seconds: float = Field(default=60.0, gt=0)
    """Maximum seconds between two pages or documents of a file."""
    max_memory_bytes: int = Field(default=2**30 + 2**29, ge=2**28)
    """Maximum memory of the process that reads a file."""
    max_document_bytes: int = Field(default=2**24, ge=2**10, le=2**25)
    """Maximum size of a document; longer text is cut into pieces, at line ends if possible."""
    max_expansion: float = Field(default=200.0, ge=1)
    """Maximum ratio of the unpacked content to the size of the file; 64 MiB are always allowed."""
    max_members: int = Field(default=100_000, ge=1)
    """Maximum members of an archive, and maximum documents of a web archive."""
    max_member_bytes: int = Field(default=2**30, ge=1)
    """Maximum size of an archive member; larger ones are left out."""
    max_depth: int = Field(default=4, ge=0)
    """Maximum nesting depth of archives."""
    column: str | None = Field(default=None, min_length=1)
    """The text field of table rows and JSON records; `null` chooses it automatically."""
    template: str | None = Field(default=None, min_length=1)
    r"""Makes the text from several fields, such as `"{title}\n{body}"`; cannot be used with `column`; `null` uses
    no template."""
    pair: tuple[str, str] | None = None
    """The source and target fields of each record, such as `[source, target]`; with `null`, an encoder-decoder uses
    `[source, target]`."""
    ocr: bool = True
    """Recognise text in pictures, and on PDF pages without text."""
    ocr_threads: int = Field(default=1, ge=1)
    """Threads for text recognition, in each process."""
    ocr_min_confidence: float = Field(default=0.5, ge=0, le=1)
    """Minimum confidence of a recognised line; other lines are left out."""
    # The share of characters recognised correctly on a page is about equal to its confidence.
    ocr_min_page_confidence: float = Field(default=0.8, ge=0, le=1)
    """Minimum confidence of a picture or scanned page; others are refused."""
    # The upper bound is the largest size that Pillow does not treat as an attack.
    max_image_pixels: int = Field(default=80_000_000, ge=1, le=89_000_000)
    """Maximum pixels of a picture; larger ones are refused."""
    pdf_tables: bool = True
    """Write PDF tables that have ruling lines as Markdown."""
    strip_running_lines: bool = True
    """Remove repeated headers, footers and page numbers from the pages of a PDF."""
    notebook_outputs: bool = False
    """Keep the printed output of notebook cells; pictures are never kept."""

    @field_validator("template", mode="before")
    @classmethod
    def _template_can_be_read(cls, template: object) -> object:
        if isinstance(template, dict):
            raise ValueError("braces alone are a mapping in YAML; write the template in quotes, such as '\"{title}\"'")
        if isinstance(template, str):
            parse_template(template)
        return template

    @model_validator(mode="after")
    def _one_way_to_the_text(self) -> Self:
        if self.column is not None and self.template is not None:
            raise ValueError(
                "column and template cannot be used together; give the template alone, with {column} in it"
            )
        if self.pair is not None and (self.column is not None or self.template is not None):
            raise ValueError("pair already names the two texts of a record; leave out column and template")
        if self.pair is not None and (not all(self.pair) or self.pair[0] == self.pair[1]):
            raise ValueError(f"pair = {list(self.pair)} must name two fields, of the source and of the target")
        return self
