"""Pages to documents: their lines become one text with a mark for every page; lines that run through them go."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Extracted, Refused
from sheepop.data.extract.markdown import marked
from sheepop.data.extract.page_lines import Line, Page, is_right_to_left, mirrored, reading_blocks, runs
from sheepop.data.extract.paragraphs import WORDS, paragraphs

# A running line stands on so many pages at least, and on this share of the pages from the first to the last that has
# it: odd and even pages may have heads of their own.
_LEAST_PAGES = 5
_LEAST_SHARE = 0.4
# With fewer letters a line only counts pages, and is left out even the first time.
_LEAST_LETTERS = 8
# Of the height of the page, at either end; and how far, in the size of its letters, a line may stray from page to page.
_EDGE = 0.15
_STRAY = 0.5
_MOST_EDGE_LINES = 6
_LONGEST_LINE = 200
_NUMBER = re.compile(r"\d{1,9}")


def documents(
    pages: Iterable[Page | Refused], facts: Mapping[str, str], config: ExtractConfig
) -> Iterator[Extracted | Refused]:
    """The pages of one file as one document, or several where one would be too long; what is refused passes through.

    `facts` become metadata of each document.
    """
    gathered: list[Page] = []
    size, is_whole = 0, True
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


def _document(
    pages: Sequence[Page], facts: Mapping[str, str], config: ExtractConfig, *, is_whole: bool
) -> Iterator[Extracted]:
    """The document of these pages, if they hold any text."""
    gone = running_lines(pages) if config.strip_running_lines else set()
    words = frozenset(word.lower() for page in pages for line in page.lines for word in WORDS.findall(line.text))
    text, marks = marked((f"page {page.number}", _text(page, gone, words)) for page in pages)
    if text:
        first, last = pages[0].number, pages[-1].number
        place = "" if is_whole else f"page {first}" if first == last else f"pages {first} to {last}"
        yield Extracted(text, place=place, marks=marks, metadata={**facts, **_facts(pages, len(gone))})


def _text(page: Page, gone: set[int], words: frozenset[str]) -> str:
    lines = [line for line in page.lines if id(line) not in gone]
    if is_right_to_left(lines):
        lines = mirrored(lines)
    return "\n\n".join(filter(None, [paragraphs(reading_blocks(lines), words), *(line.text for line in page.others)]))


def _facts(pages: Sequence[Page], running: int) -> dict[str, str]:
    """What the reader of a document may want to know about how it was read; what is 0 is not mentioned."""
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
    """A line at the head or foot of a page, and the numbers in it."""

    page: int
    line: Line
    numbers: tuple[int, ...]


def running_lines(pages: Sequence[Page]) -> set[int]:
    """The ``id`` of every line that repeats one of an earlier page, and of every line that only counts the pages.

    Such a line stands among the outermost of its page, on at least five pages and on 40 percent of those from the
    first to the last of them, at the same height and with the same words; its numbers stay the same or count with
    the pages, as figures in a table do not.
    """
    groups: defaultdict[tuple[bool, str], list[_EdgeLine]] = defaultdict(list)
    for page in pages:
        for is_head, line in _edge_lines(page):
            numbers = tuple(map(int, _NUMBER.findall(line.text)))
            groups[is_head, _NUMBER.sub("#", line.text)].append(_EdgeLine(page.number, line, numbers))
    found: set[int] = set()
    for (_, words), group in groups.items():
        is_said_once = sum(map(str.isalpha, words)) >= _LEAST_LETTERS
        for level in runs(sorted(group, key=lambda edge: edge.line.bottom), _is_level):
            kept = sorted(_counting(level), key=lambda edge: edge.page)
            had = {edge.page for edge in kept}
            if len(had) >= max(_LEAST_PAGES, _LEAST_SHARE * (max(had) - min(had) + 1)):
                found.update(id(edge.line) for edge in kept[is_said_once:])
    return found


def _edge_lines(page: Page) -> list[tuple[bool, Line]]:
    """The outermost lines at the head and at the foot of a page; tables are none."""
    lines = [line for line in page.lines if not line.rigid and len(line.text) <= _LONGEST_LINE]
    lines.sort(key=lambda line: (line.top, line.left))
    heads = [(True, line) for line in lines if line.bottom <= _EDGE * page.height]
    feet = [(False, line) for line in reversed(lines) if line.top >= (1 - _EDGE) * page.height]
    return heads[:_MOST_EDGE_LINES] + feet[:_MOST_EDGE_LINES]


def _is_level(level: list[_EdgeLine], other: _EdgeLine) -> bool:
    return other.line.bottom - level[-1].line.bottom <= _STRAY * other.line.size


def _counting(level: list[_EdgeLine]) -> list[_EdgeLine]:
    """Those whose every number is the usual one, or is usual when counted from the number of the page."""
    kept = level
    for place in range(len(level[0].numbers)):
        ((constant, often),) = Counter(edge.numbers[place] for edge in kept).most_common(1)
        ((counting, as_often),) = Counter(edge.numbers[place] - edge.page for edge in kept).most_common(1)
        if as_often >= often:
            kept = [edge for edge in kept if edge.numbers[place] - edge.page == counting]
        else:
            kept = [edge for edge in kept if edge.numbers[place] == constant]
    return kept
