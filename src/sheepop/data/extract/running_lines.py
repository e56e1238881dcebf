"""Lines that stand at the edge of most pages of a document: running heads, running feet and page numbers."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from sheepop.data.extract.page_lines import Line, Page

_LEAST_PAGES = 5
# Of the pages from the first to the last that has it: odd and even pages may have heads of their own.
_LEAST_SHARE = 0.4
# With fewer letters a line only counts pages, and is left out even the first time.
_LEAST_LETTERS = 8
# Of the height of the page, at either end; and how far, in the size of its letters, a line may stray from page to page.
_EDGE = 0.15
_STRAY = 0.5
_MOST_EDGE_LINES = 6
_LONGEST_LINE = 200
_NUMBER = re.compile(r"\d{1,9}")


class _Candidate(NamedTuple):
    page: int
    line: Line
    numbers: tuple[int, ...]


def running_lines(pages: Sequence[Page]) -> set[int]:
    """The ``id`` of every line that repeats one of an earlier page, and of every line that only counts the pages.

    Such a line stands among the outermost of its page, on at least five pages and on 40 percent of those from the
    first to the last of them, at the same height and with the same words; its numbers stay the same or count with
    the pages, as figures in a table do not.
    """
    if len(pages) < _LEAST_PAGES:
        return set()
    groups: defaultdict[tuple[bool, str], list[_Candidate]] = defaultdict(list)
    for page in pages:
        for is_head, line in _edge_lines(page):
            numbers = tuple(map(int, _NUMBER.findall(line.text)))
            groups[is_head, _NUMBER.sub("#", line.text)].append(_Candidate(page.number, line, numbers))
    found: set[int] = set()
    for (_, words), candidates in groups.items():
        is_said_once = sum(map(str.isalpha, words)) >= _LEAST_LETTERS
        for level in _levels(candidates):
            kept = sorted(_counting(level), key=lambda candidate: candidate.page)
            had = {candidate.page for candidate in kept}
            if len(had) >= max(_LEAST_PAGES, _LEAST_SHARE * (max(had) - min(had) + 1)):
                found.update(id(candidate.line) for candidate in kept[is_said_once:])
    return found


def _edge_lines(page: Page) -> list[tuple[bool, Line]]:
    """The outermost lines at the head and at the foot of a page; tables are none."""
    lines = sorted((line for line in page.lines if not line.rigid), key=lambda line: (line.top, line.left))
    lines = [line for line in lines if len(line.text) <= _LONGEST_LINE]
    heads = [(True, line) for line in lines if line.bottom <= _EDGE * page.height]
    feet = [(False, line) for line in reversed(lines) if line.top >= (1 - _EDGE) * page.height]
    return heads[:_MOST_EDGE_LINES] + feet[:_MOST_EDGE_LINES]


def _levels(candidates: list[_Candidate]) -> list[list[_Candidate]]:
    """The candidates by height on the page."""
    levels: list[list[_Candidate]] = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.line.bottom):
        if levels and candidate.line.bottom - levels[-1][-1].line.bottom <= _STRAY * candidate.line.size:
            levels[-1].append(candidate)
        else:
            levels.append([candidate])
    return levels


def _counting(level: list[_Candidate]) -> list[_Candidate]:
    """Those whose every number is the usual one, or is usual when counted from the number of the page."""
    kept = level
    for place in range(len(level[0].numbers)):
        constant = Counter(candidate.numbers[place] for candidate in kept).most_common(1)
        counting = Counter(candidate.numbers[place] - candidate.page for candidate in kept).most_common(1)
        if counting[0][1] >= constant[0][1]:
            kept = [c for c in kept if c.numbers[place] - c.page == counting[0][0]]
        else:
            kept = [c for c in kept if c.numbers[place] == constant[0][0]]
    return kept
