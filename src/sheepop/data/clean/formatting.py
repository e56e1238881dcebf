"""The stage that repairs how text is written down: wrong decoding, Unicode forms, white space; never inside code."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from operator import ne

from sheepop.data.clean.config import FormattingConfig
from sheepop.data.clean.ledger import Ledger
from sheepop.data.clean.stage import ChangeStage
from sheepop.data.clean.verbatim_lines import pieces
from sheepop.data.clean.wrong_decoding import NO_BREAK, NO_WIDTH, UNWANTED, WRONG, repaired, suspects
from sheepop.data.documents import Draft

_LINE_END = re.compile(r"\r\n?")
_BLANKS = " \t\xa0"
# In a table a tab may be an empty cell.
_BLANKS_IN_TABLE = " \xa0"
# Marks without width. Scripts written without spaces use U+200B between words, joiners change letters; both stay.
_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_ZERO_WIDTH = re.compile(rf"[\u2060\ufeff]|(?<![{_NO_SPACES}])\u200b(?![{_NO_SPACES}])|(?<=\w)\u00ad(?=\w)")
_INDENT_OR_NO_BREAK_SPACE = re.compile(r"((?:(?<=\n)|\A)[ \t\xa0]+)|\xa0")


class Formatting(ChangeStage):
    """Repairs prose, tables and chat as `FormattingConfig` says; code stays as it is, byte for byte.

    White space at the beginning of a line is never touched, nor is anything but line ends in fenced, indented and
    other verbatim blocks.
    """

    name = "formatting"

    def __init__(self, ledger: Ledger, config: FormattingConfig) -> None:
        super().__init__(ledger)
        self.config = config
        self._too_many_breaks = "\n" * (config.max_blank_lines + 2)
        self._breaks = re.compile(rf"(?<!\n)\n{{{config.max_blank_lines + 2},}}")

    def applies_to(self, document: Draft) -> bool:
        """Whether it is not code."""
        return bool(document.kind != "code")

    def changed(self, text: str, document: Draft) -> tuple[str, Mapping[str, int]]:
        """The repaired text, and how many lines, characters or places of each kind were changed."""
        counts: Counter[str] = Counter()
        if self.config.whitespace and "\r" in text:
            text, counts["line ends"] = _LINE_END.subn("\n", text)
        if not self._has_faults(text):
            return text, counts
        is_table = document.kind == "table"
        parts = ((text, False),) if is_table else pieces(text)
        text = "".join(part if verbatim else self._repaired(part, is_table, counts) for part, verbatim in parts)
        return text, +counts

    def _has_faults(self, text: str) -> bool:
        """Whether there might be something to repair; quick, and no only where it is sure."""
        if self.config.whitespace and (" \n" in text or "\t\n" in text or self._too_many_breaks in text):
            return True
        found = suspects(text)
        wanted = (WRONG | UNWANTED) * self.config.decoding | (NO_WIDTH | NO_BREAK) * self.config.whitespace
        return bool(found & wanted) or (self.config.normalize and not unicodedata.is_normalized("NFC", text))

    def _repaired(self, text: str, is_table: bool, counts: Counter[str]) -> str:
        if self.config.decoding:
            text, found = repaired(text)
            counts.update(found)
        if self.config.normalize and not unicodedata.is_normalized("NFC", text):
            composed = unicodedata.normalize("NFC", text)
            counts["composed characters"] += max(1, len(text) - len(composed))
            text = composed
        return self._with_plain_space(text, is_table, counts) if self.config.whitespace else text

    def _with_plain_space(self, text: str, is_table: bool, counts: Counter[str]) -> str:
        if not text.isascii():
            if any(mark in text for mark in "\u00ad\u200b\u2060\ufeff"):
                text, removed = _ZERO_WIDTH.subn("", text)
                counts["zero-width characters"] += removed
            if "\xa0" in text:
                before = text.count("\xa0")
                text = _INDENT_OR_NO_BREAK_SPACE.sub(lambda found: found.group(1) or " ", text)
                counts["no-break spaces"] += before - text.count("\xa0")
        *lines, rest = text.split("\n")
        stripped = [line.rstrip(_BLANKS_IN_TABLE if is_table else _BLANKS) for line in lines]
        if stripped != lines:
            counts["lines with blanks at the end"] += sum(map(ne, stripped, lines))
            text = "\n".join([*stripped, rest])
        if self._too_many_breaks in text:
            text, shortened = self._breaks.subn(self._too_many_breaks[:-1], text)
            counts["runs of blank lines"] += shortened
        return text
