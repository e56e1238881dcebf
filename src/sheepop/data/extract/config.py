"""The settings under ``data.extract``: what is read from a file, and the limits within which."""

from __future__ import annotations

import re
import string
from functools import lru_cache
from typing import Self

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config

# A command line and plain YAML hand a backslash and the letter after it on as they are.
_ESCAPE = re.compile(r"\\([nt\\])")
_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\"}


@lru_cache
def parse_template(template: str) -> tuple[tuple[str, str | None], ...]:
    """The pieces of a template such as ``{title}\\n{body}``: words, and the field behind them, None behind the last.

    ``{a.b}`` is the field `b` of the record in the field `a`; ``{{`` and ``}}`` stand for the braces themselves, and
    a backslash before ``n``, ``t`` or another backslash for a line end, a tab and the backslash.
    Raises ValueError when a brace has no partner, a name is empty or asks for more than a name, or no field is named.
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
    # In a format string of Python these reach into objects or change how a value is written.
    if any(form or conversion or re.search(r"[\[\]]", name or "") for _, name, form, conversion in pieces):
        raise ValueError("it asks for more than fields; write only {name} or {a.b}")
    return tuple((_ESCAPE.sub(lambda escape: _ESCAPED[escape[1]], words), name) for words, name, _, _ in pieces)


class ExtractConfig(Config):
    """How files become documents, and the limits of the process that reads one file.

    With neither `column` nor `template` the record decides what its text is (see `RecordFormat`).
    """

    max_seconds: float = Field(default=60.0, gt=0)
    """The most seconds that the process reading a file may take until its next page or document."""
    max_memory_bytes: int = Field(default=2**30 + 2**29, ge=2**28)
    """The memory that this process may use."""
    max_document_bytes: int = Field(default=2**24, ge=2**10, le=2**25)
    """The longest document; longer text is cut, at a line end where possible."""
    max_expansion: float = Field(default=200.0, ge=1)
    """How many times larger than the file its unpacked content may be; 64 MiB is always allowed."""
    max_members: int = Field(default=100_000, ge=1)
    """The most members of an archive, and the most documents of a web archive."""
    max_member_bytes: int = Field(default=2**30, ge=1)
    """The largest member of an archive; larger ones are left out."""
    max_depth: int = Field(default=4, ge=0)
    """How deep archives may be nested."""
    column: str | None = Field(default=None, min_length=1)
    """The field of a table, database or JSON record that is its text; `null` leaves it to the record."""
    template: str | None = Field(default=None, min_length=1)
    r"""Makes the text from several fields, such as `"{title}\n{body}"`; cannot be used with `column`; `null` is
    none."""
    pair: tuple[str, str] | None = None
    """The fields of a source and its target, such as `[source, target]`; an encoder-decoder uses these two when it is
    `null`."""
    ocr: bool = True
    """Recognise text in pictures, and on PDF pages that have none."""
    ocr_threads: int = Field(default=1, ge=1)
    """Threads for text recognition, in each process."""
    ocr_min_confidence: float = Field(default=0.5, ge=0, le=1)
    """Recognised lines with less confidence are left out."""
    # A page recognised with this confidence has about as large a share of its characters right.
    ocr_min_page_confidence: float = Field(default=0.8, ge=0, le=1)
    """Pictures and scanned pages recognised with less confidence are refused."""
    # At most what Pillow itself takes for no attack.
    max_image_pixels: int = Field(default=80_000_000, ge=1, le=89_000_000)
    """Pictures with more pixels are refused."""
    pdf_tables: bool = True
    """Write PDF tables that have ruling lines as Markdown."""
    strip_running_lines: bool = True
    """Leave out the heads, feet and page numbers that the pages of a PDF repeat."""
    notebook_outputs: bool = False
    """Keep the printed output of notebook cells along with the cells; pictures are never kept."""

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
