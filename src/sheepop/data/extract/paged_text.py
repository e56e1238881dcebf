"""Pages to documents: their lines become one text with a mark for every page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sheepop.data.extract.config import ExtractConfig
from sheepop.data.extract.interface import Extracted
from sheepop.data.extract.page_lines import Page, is_right_to_left, mirrored, reading_blocks
from sheepop.data.extract.paragraphs import WORDS, paragraphs
from sheepop.data.extract.running_lines import running_lines


@dataclass(slots=True)
class Gathering:
    """Pages of one file that will be one document, or several where one would be too long."""

    config: ExtractConfig
    facts: Mapping[str, str]
    _pages: list[Page] = field(default_factory=list)
    _bytes: int = 0
    _documents: int = 0

    def add(self, page: Page) -> Iterator[Extracted]:
        """Takes the next page; yields the document of those before it when there is no room for one more."""
        size = sum(len(line.text.encode("utf-8", "replace")) + 1 for line in (*page.lines, *page.others))
        if self._pages and self._bytes + size > self.config.max_document_bytes:
            yield from self.document(is_last=False)
        self._pages.append(page)
        self._bytes += size

    def document(self, *, is_last: bool = True) -> Iterator[Extracted]:
        """The document of the pages that were taken, if they hold any text."""
        pages, self._pages, self._bytes = self._pages, [], 0
        gone = running_lines(pages) if self.config.strip_running_lines else set()
        text, marks = _text(pages, gone)
        if text:
            is_whole = is_last and self._documents == 0
            self._documents += 1
            place = "" if is_whole else _span(pages[0].number, pages[-1].number)
            yield Extracted(text, place=place, marks=marks, metadata={**self.facts, **_facts(pages, len(gone))})


def _text(pages: Sequence[Page], gone: set[int]) -> tuple[str, tuple[tuple[int, str], ...]]:
    words = frozenset(word.lower() for page in pages for line in page.lines for word in WORDS.findall(line.text))
    text, marks = [], []
    length = 0
    for page in pages:
        written = _page_text(page, gone, words)
        if written:
            marks.append((length, f"page {page.number}"))
            text.append(written)
            length += len(written) + 2
    return "\n\n".join(text), tuple(marks)


def _page_text(page: Page, gone: set[int], words: frozenset[str]) -> str:
    lines = [line for line in page.lines if id(line) not in gone]
    if is_right_to_left(lines):
        lines = mirrored(lines)
    texts = [paragraphs(reading_blocks(lines), words), *(line.text for line in page.others)]
    return "\n\n".join(filter(None, texts))


def _span(first: int, last: int) -> str:
    return f"page {first}" if first == last else f"pages {first} to {last}"


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
