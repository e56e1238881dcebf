"""Turns pages into documents: paragraphs of one text with a mark for each page, without running lines.

Wrapped lines and hyphenated words are joined; intended line breaks are kept.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Documents, Extracted, Refused
from sheepop.data.extract.markdown import marked
from sheepop.data.extract.page_lines import Line, Page, is_right_to_left, mirrored, reading_blocks, runs

_WORDS = re.compile(r"\w+(?:[-\u2010]\w+)*")
HYPHENS = "-\u2010\u00ad"
_DIVIDED = re.compile(rf"(\w+)[{HYPHENS}]$")
_FIRST_WORD = re.compile(r"\w+")
# Words after or before which a hyphen belongs to the text: "self-evident", "two- and three-dimensional".
_KEEPS_HYPHEN = frozenset({"self", "well"})
_AFTER_SUSPENDED = frozenset({"and", "or", "nor", "to", "und", "oder", "bis", "et", "ou", "y", "o", "e", "en"})
_LIST_ITEM = re.compile(
    "(?:[\u2022\u2023\u2043\u25aa\u25ab\u25cf\u25cb\u25e6\u25a0\u25a1\u27a2\u2713*\u2013\u2014-]"
    r"|\[[^\]\s]{1,12}\]|\(?(?:\d{1,3}|[a-zA-Z]|[ivx]{1,5})[.)])\s"
)
_LONGEST_WORD = 100
_WITHOUT_SPACES = re.compile("[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef]")
# A row with cells, or an entry of a table of contents; but a label may precede a line of text.
_TABULAR = re.compile(r"\S {3}\S|(?:\. ?){4,}\s*\w{0,6}$|\.{4,}")
_LABEL = re.compile(r"\S{1,12} {3}(?=\S)")
# The share of lines in running text that are full, without those that end a sentence.
_RUNNING_SHARE = 2 / 3
_SENTENCE_END = re.compile("[.!?\u2026\u3002][\"\u201d\u2019')\\]]?$")
_RUNNING_WORDS = 5
_ENDS = tuple('.!?:;\u2026\u3002\uff01\uff1f"\u201d\u2019)]')
# All in multiples of the size of the letters.
_MARGIN = 0.15
_LEAST_INDENT = 0.7
_WIDEST_INDENT = 6.0
_BLANK_LINE = 1.75
# In multiples of the distance from line to line, and of the size of the letters.
_WIDER_PITCH = 1.3
_LEAST_PITCH = 1.1
_OTHER_SIZE = 1.15
# A running line is on at least this many pages, and on this share of the pages from the first to the last that has it:
# odd and even pages may have different headers.
_LEAST_PAGES = 5
_LEAST_SHARE = 0.4
# A running line with fewer letters is a page number, and is removed even on its first page.
_LEAST_LETTERS = 8
# Running lines are in this share of the page height at either end, and move by at most _LEVEL letter sizes.
_MARGINS = 0.15
_LEVEL = 0.5
_MOST_EDGE_LINES = 6
_LONGEST_LINE = 200
_NUMBER = re.compile(r"\d{1,9}")


def documents(
    pages: Iterable[Page | Refused], facts: Mapping[str, str], config: ExtractConfig, *, is_whole: bool = True
) -> Documents:
    """Yields the pages as one document with metadata `facts`, or several if it is too long; passes refusals on.

    The places of documents name their pages, unless they are all in one and `is_whole`.
    """
    gathered: list[Page] = []
    size = 0
    for page in pages:
        if isinstance(page, Refused):
            yield page
            continue
        length = sum(len(line.text.encode("utf-8", "replace")) + 1 for line in (*page.lines, *page.others))
        if gathered and size + length > config.max_document_bytes:
            yield from _document(gathered, facts, config, is_whole=False)
            gathered, size, is_whole = [], 0, False
        gathered.append(page)
        size += length
    yield from _document(gathered, facts, config, is_whole=is_whole)


def _document(pages: Sequence[Page], facts: Mapping[str, str], config: ExtractConfig, *, is_whole: bool) -> Documents:
    """Yields the document of these pages, if they have any text."""
    gone = running_lines(pages) if config.strip_running_lines else set()
    words = frozenset(word.lower() for page in pages for line in page.lines for word in _WORDS.findall(line.text))
    text, marks = marked((f"page {page.number}", _page_text(page, gone, words)) for page in pages)
    if text:
        first, last = pages[0].number, pages[-1].number
        place = "" if is_whole else f"page {first}" if first == last else f"pages {first} to {last}"
        yield Extracted(text, place=place, marks=marks, metadata={**facts, **_facts(pages, len(gone))})


def _page_text(page: Page, gone: set[int], words: frozenset[str]) -> str:
    lines = [line for line in page.lines if id(line) not in gone]
    if is_right_to_left(lines):
        lines = mirrored(lines)
    return "\n\n".join(filter(None, [paragraphs(reading_blocks(lines), words), *(line.text for line in page.others)]))


def _facts(pages: Sequence[Page], running: int) -> dict[str, str]:
    """Returns metadata about how the pages were read; counts of 0 are left out."""
    recognised = [page.confidence for page in pages if page.confidence is not None]
    counts = {
        "recognised_pages": len(recognised),
        "unsure_lines": sum(page.unsure for page in pages),
        "tables": sum(page.tables for page in pages),
        "pages_not_searched_for_tables": sum(page.is_unsearched for page in pages),
        "unknown_characters": sum(page.meaningless for page in pages),
        "running_lines": running,
    }
    facts = {name: str(count) for name, count in counts.items() if count}
    if recognised:
        facts["recognition_confidence"] = f"{sum(recognised) / len(recognised):.2f}"
    return facts


class _EdgeLine(NamedTuple):
    """A line at the top or bottom of a page, and the numbers in it."""

    page: int
    line: Line
    numbers: tuple[int, ...]


def running_lines(pages: Sequence[Page]) -> set[int]:
    """Returns the ``id`` of each line that repeats a line of an earlier page, and of each page number.

    Such a line is on at least five pages, and on 40 percent of those from the first to the last of them, at the same
    height and with the same words. Its numbers are constant or increase with the pages, unlike the figures of a table.
    """
    groups: defaultdict[tuple[bool, str], list[_EdgeLine]] = defaultdict(list)
    for page in pages:
        for is_head, line in _edge_lines(page):
            numbers = tuple(map(int, _NUMBER.findall(line.text)))
            groups[is_head, _NUMBER.sub("#", line.text)].append(_EdgeLine(page.number, line, numbers))
    found: set[int] = set()
    for (_, words), group in groups.items():
        keeps_first = sum(map(str.isalpha, words)) >= _LEAST_LETTERS
        group.sort(key=lambda edge: edge.line.bottom)
        for level in runs(
            group, lambda level, edge: edge.line.bottom - level[-1].line.bottom <= _LEVEL * edge.line.size
        ):
            kept = sorted(_counting(level), key=lambda edge: edge.page)
            had = {edge.page for edge in kept}
            if len(had) >= max(_LEAST_PAGES, _LEAST_SHARE * (max(had) - min(had) + 1)):
                found.update(id(edge.line) for edge in kept[keeps_first:])
    return found


def _edge_lines(page: Page) -> list[tuple[bool, Line]]:
    """Returns (is at the top, line) of the outermost lines at the top and bottom of a page, without tables."""
    lines = [line for line in page.lines if not line.rigid and len(line.text) <= _LONGEST_LINE]
    lines.sort(key=lambda line: (line.top, line.left))
    heads = [(True, line) for line in lines if line.bottom <= _MARGINS * page.height]
    feet = [(False, line) for line in reversed(lines) if line.top >= (1 - _MARGINS) * page.height]
    return heads[:_MOST_EDGE_LINES] + feet[:_MOST_EDGE_LINES]


def _counting(level: list[_EdgeLine]) -> list[_EdgeLine]:
    """Returns the lines whose numbers are the most common ones, or have the most common offset to the page number."""
    for place in range(len(level[0].numbers)):
        alike: defaultdict[tuple[int, int], list[_EdgeLine]] = defaultdict(list)
        for step in (1, 0):
            for edge in level:
                alike[step, edge.numbers[place] - step * edge.page].append(edge)
        level = max(alike.values(), key=len)
    return level


def paragraphs(blocks: Sequence[Sequence[Line]], words: Container[str]) -> str:
    """Returns the paragraphs of blocks; `words` are those of the document in lower case, see `join_lines`."""
    texts: list[str] = []
    before: _Paragraph | None = None
    for block in blocks:
        for number, paragraph in enumerate(_paragraphs(block, words)):
            if number == 0 and before is not None and before.continues_in(paragraph):
                texts[-1] = join_lines(texts[-1], paragraph.text, words)
            else:
                texts.append(paragraph.text)
            before = paragraph
    return "\n\n".join(texts).replace("\u00ad", "")


def join_lines(before: str, after: str, words: Container[str]) -> str:
    """Joins lines of a paragraph; removes the hyphen of a divided word, and keeps that of a compound in `words`."""
    divided, follows = _DIVIDED.search(before[-_LONGEST_WORD:]), _FIRST_WORD.match(after)
    if not divided or not follows:
        # No blank in Chinese, in a range of numbers, or in an address.
        is_tight = (
            (_WITHOUT_SPACES.match(before[-1:]) and _WITHOUT_SPACES.match(after))
            or (before[-1:] in ("\u2013", "/") and before[-2:-1].isalnum() and after[:1].isalnum())
            or before.endswith("//")
        )
        return before + ("" if is_tight else " ") + after
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


class _Paragraph(NamedTuple):
    """A paragraph, the size of the letters in its last line, and whether that line is full."""

    text: str
    size: float
    is_cut: bool

    def continues_in(self, other: _Paragraph) -> bool:
        """Returns whether the first paragraph of the next block seems to continue this one."""
        if not self.is_cut or max(self.size, other.size) > _OTHER_SIZE * min(self.size, other.size):
            return False
        end = self.text[-_LONGEST_WORD:]
        return bool(_DIVIDED.search(end)) or (not end.endswith(_ENDS) and other.text[:1].islower())


def _paragraphs(block: Sequence[Line], words: Container[str]) -> Iterator[_Paragraph]:
    """Yields the paragraphs of a block: lines without vertical gaps between them, in letters of one size."""
    steps = sorted(
        after.bottom - before.bottom
        for before, after in pairwise(block)
        if not (before.rigid or after.rigid) and after.bottom - before.bottom > 0.6 * before.size
    )
    # The lower quartile is the distance of lines inside paragraphs.
    pitch = steps[len(steps) // 4] if len(steps) >= 3 else None
    edge = max((line.right for line in block if not line.rigid), default=0.0)
    for run in runs(block, lambda run, line: not _is_apart(run[-1], line, pitch)):
        if run[0].rigid:
            yield _Paragraph(run[0].text, run[0].size, False)
        else:
            yield from _flowing(run, edge, words)


def _is_apart(before: Line, after: Line, pitch: float | None) -> bool:
    large, small = max(before.size, after.size), min(before.size, after.size)
    step = after.bottom - before.bottom
    if before.rigid or after.rigid or large > _OTHER_SIZE * small:
        return True
    # Paragraphs of one line each look like lines with a wide spacing.
    if step > _BLANK_LINE * large and _SENTENCE_END.search(before.text) and not after.text[0].islower():
        return True
    return step > (_BLANK_LINE * large if pitch is None else _WIDER_PITCH * max(pitch, _LEAST_PITCH * large))


def _flowing(run: list[Line], edge: float, words: Container[str]) -> Iterator[_Paragraph]:
    """Yields the paragraphs of a run of lines; code, verse and other text that is not running text keeps its lines."""
    # A long run shows its own right edge; a short one may end before the block's.
    right = max(line.right for line in run) if len(run) >= 5 else edge
    full = [_is_full(before, after, right) for before, after in pairwise(run)]
    pairs = zip(full, run, strict=False)
    ends = sum(not is_full and _SENTENCE_END.search(line.text) is not None for is_full, line in pairs)
    is_running = sum(full) >= _RUNNING_SHARE * (len(full) - ends)
    text = run[0].text
    for index, line in enumerate(run[1:]):
        before = run[index].text
        # Full lines in other text may still be a wrapped sentence; a single one is full only because it is the longest.
        is_sentence = len(before.split()) >= _RUNNING_WORDS and before[-1] not in ";{}" and line.text[0].islower()
        is_wrapped = full[index] and (is_running or (sum(full) > 1 and is_sentence))
        if is_running and _is_indented(run, index + 1, full[index]):
            yield _Paragraph(text, run[index].size, False)
            text = line.text
        elif is_wrapped and not _LIST_ITEM.match(line.text):
            text = join_lines(text, line.text, words)
        else:
            text = f"{text}\n{line.text}"
    yield _Paragraph(text, run[-1].size, is_running and run[-1].right > right - 4 * run[-1].size)


def _is_full(before: Line, after: Line, right: float) -> bool:
    """Returns whether a line is full: the first word of the next line would not have fitted on it."""
    if _is_tabular(before.text) or _is_tabular(after.text):
        return False
    return before.right + 0.25 * before.size + after.first_width > right - _MARGIN * before.size


def _is_tabular(text: str) -> bool:
    label = _LABEL.match(text)
    return _TABULAR.search(text, label.end() if label else 0) is not None


def _is_indented(run: list[Line], index: int, is_full: bool) -> bool:
    """Returns whether a line begins a paragraph because it is indented more than its neighbours."""
    before, line = run[index - 1], run[index]
    indent = (line.left - min(before.left, run[index + 1].left if index + 1 < len(run) else before.left)) / line.size
    if not _LEAST_INDENT <= indent <= _WIDEST_INDENT or line.left <= before.left + _MARGIN * line.size:
        return False
    # In lists and references the further lines are indented below their label.
    return not is_full or (_SENTENCE_END.search(before.text) is not None and not _LIST_ITEM.match(before.text))
