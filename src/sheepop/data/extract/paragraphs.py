"""Lines to paragraphs: wrapped lines are joined, divided words made whole, deliberate line breaks kept."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from sheepop.data.extract.page_lines import Line, runs

WORDS = re.compile(r"\w+(?:[-\u2010]\w+)*")
HYPHENS = "-\u2010\u00ad"
_DIVIDED = re.compile(rf"(\w+)[{HYPHENS}]$")
_FIRST_WORD = re.compile(r"\w+")
# Words after or before which a hyphen divides no word: "self-evident", "two- and three-dimensional".
_KEEPS_HYPHEN = frozenset({"self", "well"})
_AFTER_SUSPENDED = frozenset({"and", "or", "nor", "to", "und", "oder", "bis", "et", "ou", "y", "o", "e", "en"})
_LIST_ITEM = re.compile(
    "(?:[\u2022\u2023\u2043\u25aa\u25ab\u25cf\u25cb\u25e6\u25a0\u25a1\u27a2\u2713*\u2013\u2014-]"
    r"|\[[^\]\s]{1,12}\]|\(?(?:\d{1,3}|[a-zA-Z]|[ivx]{1,5})[.)])\s"
)
_LONGEST_WORD = 100
_WITHOUT_SPACES = re.compile("[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef]")
# A row with cells, or an entry of a table of contents; but a label may stand before a line of text.
_TABULAR = re.compile(r"\S {3}\S|(?:\. ?){4,}\s*\w{0,6}$|\.{4,}")
_LABEL = re.compile(r"\S{1,12} {3}(?=\S)")
# Of the lines of running text so many are as long as they can be, not counting those that end a sentence.
_RUNNING_SHARE = 2 / 3
_SENTENCE_END = re.compile("[.!?\u2026\u3002][\"\u201d\u2019')\\]]?$")
_RUNNING_WORDS = 5
_ENDS = tuple('.!?:;\u2026\u3002\uff01\uff1f"\u201d\u2019)]')
# All in multiples of the size of the letters.
_MARGIN = 0.15
_LEAST_INDENT = 0.7
_WIDEST_INDENT = 6.0
_BLANK_LINE = 1.75
# Against the pitch from line to line.
_WIDER_PITCH = 1.3
_LEAST_PITCH = 1.1
_OTHER_SIZE = 1.15


def paragraphs(blocks: Sequence[Sequence[Line]], words: Container[str]) -> str:
    """The text of a page whose blocks are in reading order: paragraphs, with a blank line between two.

    `words` are the words of the whole document in lower case, by which a hyphen at a line's end is judged.
    """
    texts: list[str] = []
    before: _Paragraph | None = None
    for block in blocks:
        for number, paragraph in enumerate(_paragraphs(block, words)):
            if number == 0 and before is not None and before.goes_on(paragraph):
                texts[-1] = join_lines(texts[-1], paragraph.text, words)
            else:
                texts.append(paragraph.text)
            before = paragraph
    return "\n\n".join(texts).replace("\u00ad", "")


def join_lines(before: str, after: str, words: Container[str]) -> str:
    """Two lines of one paragraph as one; the hyphen of a divided word goes, that of a compound stays."""
    divided, follows = _DIVIDED.search(before[-_LONGEST_WORD:]), _FIRST_WORD.match(after)
    if not divided or not follows:
        return before + ("" if _is_tight(before[-2:], after[:1]) else " ") + after
    stem, mark = before[:-1], before[-1]
    head, tail = divided.group(1), follows.group()
    if mark == "\u00ad":
        return stem + after
    if tail in _AFTER_SUSPENDED:
        return f"{before} {after}"
    if not tail[0].islower() or not head[-1].isalpha() or head.isupper():
        return f"{stem}-{after}"
    is_known, is_compound = f"{head}{tail}".lower() in words, f"{head}-{tail}".lower() in words
    keeps = is_compound or head.lower() in _KEEPS_HYPHEN
    return f"{stem}-{after}" if keeps and not is_known else stem + after


def _is_tight(before: str, after: str) -> bool:
    """Whether no blank belongs between the end of one line and the beginning of the next."""
    if _WITHOUT_SPACES.match(before[-1:]) and _WITHOUT_SPACES.match(after):
        return True
    # A range of numbers or an address goes on.
    return (before[-1:] in ("\u2013", "/") and before[:1].isalnum() and after.isalnum()) or before == "//"


class _Paragraph(NamedTuple):
    """A paragraph, the size of its last letters, and whether its last line is full."""

    text: str
    size: float
    is_cut: bool

    def goes_on(self, other: _Paragraph) -> bool:
        """Whether the first paragraph of the next block seems to be its continuation."""
        if not self.is_cut or max(self.size, other.size) > _OTHER_SIZE * min(self.size, other.size):
            return False
        end = self.text[-_LONGEST_WORD:]
        return bool(_DIVIDED.search(end)) or (not end.endswith(_ENDS) and other.text[:1].islower())


def _paragraphs(block: Sequence[Line], words: Container[str]) -> Iterator[_Paragraph]:
    """The paragraphs of a block, whose lines follow each other without a blank space, in letters of one size."""
    pitch = _pitch(block)
    edge = max((line.right for line in block if not line.rigid), default=0.0)
    for run in runs(block, lambda run, line: not _is_apart(run[-1], line, pitch)):
        if run[0].rigid:
            yield _Paragraph(run[0].text, run[0].size, False)
        else:
            yield from _flowing(run, edge, words)


def _pitch(block: Sequence[Line]) -> float | None:
    """The lower quartile of the steps from line to line, which stands for the inside of paragraphs."""
    steps = sorted(
        after.bottom - before.bottom
        for before, after in pairwise(block)
        if not (before.rigid or after.rigid) and after.bottom - before.bottom > 0.6 * before.size
    )
    return steps[len(steps) // 4] if len(steps) >= 3 else None


def _is_apart(before: Line, after: Line, pitch: float | None) -> bool:
    if before.rigid or after.rigid:
        return True
    large, small = max(before.size, after.size), min(before.size, after.size)
    step = after.bottom - before.bottom
    if large > _OTHER_SIZE * small:
        return True
    # Paragraphs of one line each look like lines that are set wide apart.
    if step > _BLANK_LINE * large and _SENTENCE_END.search(before.text) and not after.text[0].islower():
        return True
    return step > (_BLANK_LINE * large if pitch is None else _WIDER_PITCH * max(pitch, _LEAST_PITCH * large))


def _flowing(run: list[Line], edge: float, words: Container[str]) -> Iterator[_Paragraph]:
    """The paragraphs of a run of lines; what is not running text, such as code or verse, keeps its lines."""
    # A long run shows its own right edge; a short one may end before the block's.
    right = max(line.right for line in run) if len(run) >= 5 else edge
    full = [_is_full(before, after, right) for before, after in pairwise(run)]
    pairs = zip(full, run, strict=False)
    ends = sum(not is_full and _SENTENCE_END.search(line.text) is not None for is_full, line in pairs)
    is_running = sum(full) >= _RUNNING_SHARE * (len(full) - ends)
    text = run[0].text
    for index, line in enumerate(run[1:]):
        # One line alone is full by being the longest.
        is_wrapped = full[index] and (is_running or (sum(full) > 1 and _reads_on(run[index], line)))
        if is_running and _is_indented(run, index + 1, full[index]):
            yield _Paragraph(text, run[index].size, False)
            text = line.text
        elif is_wrapped and not _LIST_ITEM.match(line.text):
            text = join_lines(text, line.text, words)
        else:
            text = f"{text}\n{line.text}"
    yield _Paragraph(text, run[-1].size, is_running and run[-1].right > right - 4 * run[-1].size)


def _reads_on(before: Line, after: Line) -> bool:
    """Whether two lines among others that are not running text are still one sentence."""
    is_sentence = len(before.text.split()) >= _RUNNING_WORDS and before.text[-1] not in ";{}"
    return is_sentence and after.text[0].islower()


def _is_full(before: Line, after: Line, right: float) -> bool:
    """Whether the line before ends because the first word of the next would not have fitted."""
    if _is_tabular(before.text) or _is_tabular(after.text):
        return False
    return before.right + 0.25 * before.size + after.first_width > right - _MARGIN * before.size


def _is_tabular(text: str) -> bool:
    label = _LABEL.match(text)
    return _TABULAR.search(text, label.end() if label else 0) is not None


def _is_indented(run: list[Line], index: int, is_full: bool) -> bool:
    """Whether the line begins a paragraph by standing further in than the lines round it."""
    before, line = run[index - 1], run[index]
    indent = (line.left - min(before.left, run[index + 1].left if index + 1 < len(run) else before.left)) / line.size
    if not _LEAST_INDENT <= indent <= _WIDEST_INDENT or line.left <= before.left + _MARGIN * line.size:
        return False
    # The lines of a list or of references hang below their label.
    return not is_full or (_SENTENCE_END.search(before.text) is not None and not _LIST_ITEM.match(before.text))
