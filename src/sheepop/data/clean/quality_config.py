"""The settings under ``data.clean.quality``: thresholds of the published rules for prose, and of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from sheepop.core.config import Config


class GopherConfig(Config):
    """Gopher's quality rules for web pages in English (Rae et al. 2021, appendix A.1.1)."""

    min_words: int = Field(default=50, ge=0)
    """Fewest words in a document."""
    max_words: int = Field(default=100_000, ge=1)
    """Most words in a document."""
    min_mean_word_length: float = Field(default=3.0, ge=0)
    """Shortest mean length of a word, in characters."""
    max_mean_word_length: float = Field(default=10.0, gt=0)
    """Longest mean length of a word, in characters."""
    max_symbols_per_word: float = Field(default=0.1, ge=0)
    """Most number signs, and most ellipses, for each word."""
    max_bullet_lines: float = Field(default=0.9, ge=0, le=1)
    """Most lines that begin with a bullet, as a share of all."""
    max_ellipsis_lines: float = Field(default=0.3, ge=0, le=1)
    """Most lines that end with an ellipsis, as a share of all."""
    min_words_with_letter: float = Field(default=0.8, ge=0, le=1)
    """Fewest words that hold a letter, as a share of all."""
    min_stop_words: int = Field(default=2, ge=0, le=8)
    """Fewest different words of eight common English ones."""


class RepetitionConfig(Config):
    """Gopher's repetition rules (Rae et al. 2021, table A1): largest shares of a text that may be repeated."""

    max_duplicate_lines: float = Field(default=0.3, ge=0, le=1)
    """Most lines that repeat earlier ones, as a share of all lines."""
    max_duplicate_paragraphs: float = Field(default=0.3, ge=0, le=1)
    """Most paragraphs that repeat earlier ones, as a share of all paragraphs."""
    max_duplicate_line_characters: float = Field(default=0.2, ge=0, le=1)
    """Most characters in lines that repeat earlier ones, as a share of all characters."""
    max_duplicate_paragraph_characters: float = Field(default=0.2, ge=0, le=1)
    """Most characters in paragraphs that repeat earlier ones, as a share of all characters."""
    top_ngrams: tuple[tuple[int, float], ...] = ((2, 0.2), (3, 0.18), (4, 0.16))
    """Pairs `[words, share]`: most characters in the most frequent run of that many words."""
    duplicate_ngrams: tuple[tuple[int, float], ...] = (
        (5, 0.15),
        (6, 0.14),
        (7, 0.13),
        (8, 0.12),
        (9, 0.11),
        (10, 0.10),
    )
    """Pairs `[words, share]`: most characters in runs of that many words that repeat earlier ones."""

    @field_validator("top_ngrams", "duplicate_ngrams")
    @classmethod
    def _sensible_runs(cls, bounds: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if any(not 1 <= n <= 64 or not 0 <= most <= 1 for n, most in bounds):
            raise ValueError(
                "each bound must be a number of words from 1 to 64 and a share from 0 to 1, such as [5, 0.15]"
            )
        return bounds


class C4Config(Config):
    """The rules of C4 (Raffel et al. 2020, section 2.2), which judge lines and, by what is left of them, documents."""

    min_sentences: int = Field(default=5, ge=0)
    """Fewest sentences in the lines that stay."""
    min_words_per_line: int = Field(default=3, ge=0)
    """Fewest words of a line that stays."""
    max_word_length: int = Field(default=1000, ge=1)
    """A line with a longer word, in characters, does not stay."""
    drop_lines: bool = False
    """Remove the other lines from the document, which otherwise stays whole."""


class FineWebConfig(Config):
    """FineWeb's own rules (Penedo et al. 2024, section 3.5)."""

    min_lines_with_punctuation: float = Field(default=0.12, ge=0, le=1)
    """Fewest lines that end with punctuation, as a share of all."""
    max_short_lines: float = Field(default=0.67, ge=0, le=1)
    """Most short lines, as a share of all."""
    short_line: int = Field(default=30, ge=0)
    """The most characters of a short line."""
    max_duplicate_line_characters: float = Field(default=0.01, ge=0, le=1)
    """Most characters in lines that repeat earlier ones, as a share of all."""
    max_lines_per_word: float = Field(default=0.3, ge=0)
    """Most line breaks for each word."""


class GarbageConfig(Config):
    """What anybody would call garbage, in prose and chat. White space does not count where shares are taken."""

    min_judged: int = Field(default=200, ge=1)
    """Texts with fewer characters need only be printable, contain a letter or digit, and not be a placeholder."""
    max_unprintable: float = Field(default=0.05, ge=0, le=1)
    """Most control, replacement and private characters, as a share of the text."""
    min_letters: float = Field(default=0.1, ge=0, le=1)
    """Fewest letters, as a share of the text."""
    max_repeated_lines: float = Field(default=0.9, ge=0, le=1)
    """Most text in lines that repeat earlier ones, as a share of it, white space included; from 1,000 characters on."""
    max_repeated_runs: float = Field(default=0.9, ge=0, le=1)
    """Most text in runs of ten words that repeat earlier ones, as a share of it; from 1,000 characters on."""
    max_one_character: float = Field(default=0.5, ge=0, le=1)
    """Largest share of the text that is its most frequent character; from 1,000 characters on."""
    max_encoded: float = Field(default=0.5, ge=0, le=1)
    """Most base64 or hexadecimal data, as a share of the text."""
    placeholders: bool = True
    """Whether to remove a page that says only that there is nothing on it."""


class CodeConfig(Config):
    """Rules for source code; where none is given, the bounds are those of the preset.

    ``web`` has the bounds of The Stack (Kocetkov et al. 2022, section 3).
    """

    generated: bool = False
    """Remove files whose first lines or name say that a program wrote them."""
    max_line_length: int = Field(default=1_000_000, ge=1)
    """The longest line, in characters."""
    max_mean_line_length: float = Field(default=300.0, gt=0)
    """The longest mean of all lines, in characters."""
    max_in_long_lines: float = Field(default=0.5, ge=0, le=1)
    """Most characters in lines of more than 1,000, as a share of all."""
    min_alphanumeric: float = Field(default=0.05, ge=0, le=1)
    """Fewest letters and digits, as a share of all characters."""
    max_digits: float = Field(default=0.8, ge=0, le=1)
    """Most digits, as a share of what is not white space."""
    max_encoded: float = Field(default=0.5, ge=0, le=1)
    """Most base64 or hexadecimal data, as a share of what is not white space."""


class TableConfig(Config):
    """Rules for tables, in which numbers and repetition are no sign of garbage."""

    max_unprintable: float = Field(default=0.05, ge=0, le=1)
    """Most control, replacement and private characters, as a share of what is not white space."""
    max_repeated_rows: float = Field(default=0.95, ge=0, le=1)
    """Most text in rows that repeat earlier ones, as a share of it; from 20 rows on."""


_CODE_OF_PRESET: dict[str, dict[str, Any]] = {
    "gentle": {},
    "web": {
        "generated": True,
        "max_line_length": 1000,
        "max_mean_line_length": 100.0,
        "min_alphanumeric": 0.25,
        "max_digits": 0.5,
        "max_encoded": 0.25,
    },
}


class QualityConfig(Config):
    """Which documents are too bad to learn from, by the kind of document.

    The rules of Gopher, C4 and FineWeb are made for pages of English prose and remove most of what is not that.
    """

    preset: Literal["gentle", "web"] = "gentle"
    """`gentle` applies `garbage`, `code` and `table`; `web` adds `gopher`, `repetition`, `c4` and `fineweb` for
    prose, and stricter defaults in `code`; `data.clean.preset` sets it."""
    garbage: GarbageConfig = GarbageConfig()
    """What anybody would call garbage, in prose and chat."""
    gopher: GopherConfig = GopherConfig()
    """Gopher's rules for web pages in English; with the preset `web`."""
    repetition: RepetitionConfig = RepetitionConfig()
    """Gopher's rules against repetition; with the preset `web`."""
    c4: C4Config = C4Config()
    """The rules of C4, which judge lines; with the preset `web`."""
    fineweb: FineWebConfig = FineWebConfig()
    """FineWeb's own rules; with the preset `web`."""
    code: CodeConfig = CodeConfig()
    """Rules for source code."""
    table: TableConfig = TableConfig()
    """Rules for tables."""

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_the_preset(cls, given: Any) -> Any:
        """Writes the bounds that follow from the preset into the config, where they can be seen and are kept."""
        if not isinstance(given, Mapping):
            return given
        preset, code = given.get("preset", cls.model_fields["preset"].default), given.get("code", {})
        if preset not in _CODE_OF_PRESET or not isinstance(code, Mapping):
            return given
        return {**given, "code": {**_CODE_OF_PRESET[preset], **code}}
