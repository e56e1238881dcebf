"""The stage that repairs wrong decoding, Unicode forms and white space, but never code.

ftfy repairs wrong decoding at 3 MB/s, and almost all lines need no repair. `repaired` gives exactly the result of ftfy
with these settings, but one pass over the characters first finds the lines that a fix can change, and only those go to
ftfy.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import ne

import numpy as np
import numpy.typing as npt

from sheepop.data.clean.account import Account
from sheepop.data.clean.config import FormattingConfig
from sheepop.data.clean.stage import ChangeStage
from sheepop.data.documents import Draft

_FENCES = ("```", "~~~")
_FENCE = re.compile(r"(`{3,}(?=[^`]*$)|~{3,})")
_LATEX_BEGIN = re.compile(r"\\begin\{(verbatim\*?|Verbatim|lstlisting|minted|alltt)\}")
_CODE_DIRECTIVE = re.compile(
    r"\.\. +(?:[\w.-]+:)?(?:code|code-block|sourcecode|highlight|parsed-literal|math|doctest|testcode|testoutput"
    r"|productionlist|prompt|ipython|graphviz|raw)::"
)
_LIST_ITEM = re.compile(r"[ \t]*(?:[-*+•‣–o]|\(?[0-9a-zA-Z]{1,3}[.)]|\[\w+\]|:[^:\n]+:|\.\.)(?:[ \t]|$)")
_INDENTED = re.compile(r"(?: {4}|\t)")
# A text without these strings, whose first line is not indented, has no verbatim lines.
_HINTS = ("```", "~~~", "::\n", ":: ", ">>> ", "\\begin{", "\n    ", "\n\t")


def pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Cuts the text into runs of whole lines, each with a flag for verbatim ones; joined they are the text."""
    if not any(hint in text for hint in _HINTS) and not _INDENTED.match(text):
        yield text, False
        return
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    begin, number, after_blank, above = 0, 0, True, ""
    while number < len(lines):
        line = lines[number]
        if not line or line.isspace():
            after_blank, number = True, number + 1
            continue
        first, last = _block_at(lines, number, after_blank, above)
        if last > first:
            if first > begin:
                yield "".join(lines[begin:first]), False
            yield "".join(lines[first:last]), True
            begin = last
        number, after_blank, above = max(last, number + 1), False, line
    yield "".join(lines[begin:]), False


def _block_at(lines: list[str], number: int, after_blank: bool, above: str) -> tuple[int, int]:
    """The line range of the verbatim block at or after line `number`, empty if none; `above` is the text line before.

    A fence or prompt is part of its block; a line that ends in ``::`` only introduces one.
    """
    line = lines[number]
    content = line.strip()
    if content[:3] in _FENCES and (fence := _FENCE.match(content)):
        marks = fence.group(1)
        return number, _end(
            lines, number + 1, lambda line: line.strip().startswith(marks) and not line.strip().strip(marks[0])
        )
    if content.startswith(">>> "):
        blank = (n for n in range(number, len(lines)) if not lines[n].strip())
        return number, next(blank, len(lines))
    if "\\begin{" in content and (latex := _LATEX_BEGIN.search(content)):
        phrase = f"\\end{{{latex.group(1)}}}"
        return number, _end(lines, number, lambda line: phrase in line)
    if after_blank and _INDENTED.match(line) and not _INDENTED.match(above) and not _LIST_ITEM.match(above):
        return number, _end_of_indented(lines, number, 3)
    if _CODE_DIRECTIVE.match(content) if content.startswith(".. ") else content.endswith("::"):
        return number + 1, _end_of_indented(lines, number + 1, _indent(line))
    return number, number


def _end(lines: list[str], number: int, is_last: Callable[[str], bool]) -> int:
    """The index after the first line from `number` on for which `is_last` is true, or after the last line."""
    return next((n + 1 for n in range(number, len(lines)) if is_last(lines[n])), len(lines))


def _end_of_indented(lines: list[str], number: int, indent: int) -> int:
    """The end of the lines from `number` on that are indented by more than `indent`, with blank lines between them."""
    end = number
    for current in range(number, len(lines)):
        if lines[current].strip():
            if _indent(lines[current]) <= indent:
                break
            end = current + 1
    return end


def _indent(line: str) -> int:
    """The width of the indentation of a line; a tab reaches to the next multiple of 4."""
    expanded = line.expandtabs(4)
    return len(expanded) - len(expanded.lstrip())


# What a text may contain: signs of wrong decoding, characters that do not belong in text, zero-width marks, no-break
# spaces.
WRONG, UNWANTED, NO_WIDTH, NO_BREAK = (1 << bit for bit in range(4))
_WRONG_BEFORE_SPACE, _ODD = 1 << 4, 1 << 5

# As regular expression classes. Unwanted characters are controls and line ends except \t, \n and \f, Latin ligatures,
# surrogates, and deprecated format characters: all that ftfy changes regardless of context.
UNWANTED_IN_ASCII = "\x00-\x08\x0b\x0e-\x1f\x7f\r"
UNWANTED_CHARACTERS = (
    f"{UNWANTED_IN_ASCII}\u2028\u2029\u206a-\u206f\ufeff\ufff9-\ufffc\ud800-\udfff"
    "\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\ufb00-\ufb06"
)
# Signs of wrong decoding are C1 controls, the ligature oe, a capital A with tilde or circumflex before a space, and two
# consecutive non-ASCII characters of which one is odd.
_SIGNS = {
    WRONG: "\x80-\x9f\u0152\u0153",
    _WRONG_BEFORE_SPACE: "\u00c2\u00c3",
    UNWANTED: UNWANTED_CHARACTERS,
    NO_WIDTH: "\u00ad\u200b\u2060\ufeff",
    NO_BREAK: "\xa0",
}
# These of ftfy's mojibake categories are ordinary Greek and Cyrillic letters, except one.
_ORDINARY = ("lower_common", "upper_common")
_ODD_LETTER = "\u0402"
_UNWANTED = re.compile(f"[{UNWANTED_CHARACTERS}]")
# A longer line is repaired in pieces, so that none takes long.
_LONGEST = 100_000
_CONTROLS = re.sub(f"[^{UNWANTED_IN_ASCII}]", "", "".join(map(chr, range(128)))).encode()


def suspects(text: str) -> int:
    """The kinds of characters above that the text may contain, as bits; it certainly has none of a missing bit."""
    if text.isascii():
        data = text.encode("ascii")
        return UNWANTED if len(data.translate(None, _CONTROLS)) < len(data) else 0
    codes, signs = _signs(text)
    found = int(np.bitwise_or.reduce(signs))
    if found & (_ODD | _WRONG_BEFORE_SPACE) and not found & WRONG and _may_be_wrong(codes, signs).any():
        found |= WRONG
    return found & (WRONG | UNWANTED | NO_WIDTH | NO_BREAK)


def _signs(text: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return codes, _table().take(np.minimum(codes, 0xFFFF))


def _may_be_wrong(codes: npt.NDArray[np.uint32], signs: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Which characters, or pairs that begin with them, are signs of wrong decoding."""
    wrong = (signs & WRONG) != 0
    beyond, odd = codes > 0x7F, (signs & _ODD) != 0
    wrong[:-1] |= (beyond[1:] & odd[:-1]) | (odd[1:] & beyond[:-1])
    wrong[:-1] |= ((signs[:-1] & _WRONG_BEFORE_SPACE) != 0) & (codes[1:] == ord(" "))
    return wrong


@cache
def _table() -> npt.NDArray[np.uint8]:
    from ftfy.badness import MOJIBAKE_CATEGORIES

    odd = "".join(characters for name, characters in MOJIBAKE_CATEGORIES.items() if name not in _ORDINARY)
    table = np.zeros(0x10000, np.uint8)
    for sign, characters in {**_SIGNS, _ODD: odd + _ODD_LETTER}.items():
        for first, last in re.findall(r"(.)(?:-(.))?", characters, re.DOTALL):
            table[ord(first) : ord(last or first) + 1] |= sign
    return table


def repaired(text: str) -> tuple[str, dict[str, int]]:
    """The repaired text, and the number of lines changed for wrong decoding and for unwanted characters."""
    counts: dict[str, int] = {}
    if not suspects(text) & (WRONG | UNWANTED):
        return text, counts
    from ftfy.badness import is_bad

    codes, signs = _signs(text)
    marked = np.flatnonzero(_may_be_wrong(codes, signs) | ((signs & UNWANTED) != 0))
    lines = text.split("\n")
    for number in np.unique(np.searchsorted(np.flatnonzero(codes == ord("\n")), marked)).tolist():
        # ftfy judges the end of a line together with the line break.
        line, end = lines[number], "\n" if number + 1 < len(lines) else ""
        is_unwanted = _UNWANTED.search(line) is not None
        if not is_unwanted and not is_bad(line + end):
            continue
        fixed = _ftfy()(line + end).removesuffix(end)
        if fixed != line:
            lines[number] = fixed
            reason = "unwanted characters" if is_unwanted else "wrong decoding"
            counts[reason] = counts.get(reason, 0) + 1
    return "\n".join(lines), counts


@cache
def _ftfy() -> Callable[[str], str]:
    from ftfy import TextFixerConfig, fix_text

    settings = TextFixerConfig(
        unescape_html=False,
        fix_character_width=False,
        uncurl_quotes=False,
        normalization=None,
        max_decode_length=_LONGEST,
        explain=False,
    )
    return lambda text: str(fix_text(text, settings))


_LINE_END = re.compile(r"\r\n?")
_BLANKS = " \t\xa0"
# In a table a tab may be an empty cell.
_BLANKS_IN_TABLE = " \xa0"
# Zero-width marks. Scripts written without spaces use U+200B between words, and joiners change letters; both stay.
_NO_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
_ZERO_WIDTH = re.compile(rf"[\u2060\ufeff]|(?<![{_NO_SPACES}])\u200b(?![{_NO_SPACES}])|(?<=\w)\u00ad(?=\w)")
_INDENT_OR_NO_BREAK_SPACE = re.compile(r"((?:(?<=\n)|\A)[ \t\xa0]+)|\xa0")


class Formatting(ChangeStage):
    """Repairs all but code; white space that begins a line never changes, and in verbatim blocks only line ends do."""

    name = "formatting"
    config: FormattingConfig

    def __init__(self, account: Account, config: FormattingConfig, *, seed: int = 0) -> None:
        super().__init__(account, config, seed=seed)
        self._too_many_breaks = "\n" * (config.max_blank_lines + 2)
        self._breaks = re.compile(rf"(?<!\n)\n{{{config.max_blank_lines + 2},}}")

    def applies_to(self, document: Draft) -> bool:
        """Whether the document is not code."""
        return bool(document.kind != "code")

    def changed(self, text: str, document: Draft) -> tuple[str, Mapping[str, int]]:
        """The repaired text, and the number of lines, characters or places changed by kind."""
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
        """Whether there may be something to repair; a quick check without false negatives."""
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
        if not self.config.whitespace:
            return text
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
