"""Which blocks of a page are its own content: as the page declares it, or where trafilatura finds its main text.

A page that marks its main part or its one article is believed. Elsewhere trafilatura says where the main text begins
and ends, unless it finds nothing, or clearly too little of the page. Within these borders everything is kept as it
stands on the page, but for lists of links and boxes beside the text that trafilatura leaves out too; so signatures,
definitions, repeated lines and code survive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sheepop.data.extract.page_blocks import Block

if TYPE_CHECKING:
    from lxml.html import HtmlElement

_WORD = re.compile(r"\w+")
_MARKUP = re.compile(r"[ >]*(?:```+\S*\n|-?\d+\. )?")
# A run of this many words that occurs in the main text shows that a block is part of it.
_RUN = 4
# Blocks of at least this many words can mark a border; shorter ones ("Home", "About") may stand anywhere.
_ANCHOR_WORDS = 8
_SHARE_FOUND = 0.6
# Up to which share of links an item of a list, or a paragraph, is more than a menu.
_SHARE_LINKS = {"item": 0.6, "text": 0.9}
# Borders that leave out more than this of the words that trafilatura finds are not those of the main text.
_LEAST_WITHIN = 0.9
_LEAST_OF_MAIN = 0.5
_LEAST_OF_PAGE = 0.25
_LEAST_DECLARED_CHARS = 100
# Pages of more blocks are books or listings, for which the search would take minutes and gigabytes.
_MOST_BLOCKS = 20_000


def main_blocks(blocks: Sequence[Block], page: HtmlElement) -> list[Block]:
    """The blocks of `page` that are its content; `page` itself is changed by the search and useless afterwards."""
    declared = _declared(blocks)
    if _chars(declared) < _LEAST_DECLARED_CHARS:
        declared = []
    if declared and _chars(declared) >= _LEAST_OF_MAIN * _chars(blocks) and not any(map(_is_doubtful, declared)):
        # Whatever the search found, it would be no better.
        return _with_title(blocks, declared)
    text = _MainText(_trafilatura_lines(page) if len(blocks) <= _MOST_BLOCKS else ())
    found = _between_borders(blocks, text)
    if declared and _chars(declared) >= _LEAST_OF_MAIN * _chars(found):
        return _with_title(blocks, _without_links(declared, text))
    shown = _without_surroundings(blocks)
    return _with_title(blocks, found) if _chars(found) >= _LEAST_OF_PAGE * _chars(shown) else shown


class _MainText:
    """The lines that trafilatura takes for the main text, to look blocks up in."""

    def __init__(self, lines: Iterable[str]) -> None:
        words = [_WORD.findall(line) for line in lines]
        self.num_words = sum(map(len, words))
        self._lines = {tuple(line) for line in words}
        self._runs = _runs([word for line in words for word in line])

    def holds(self, block: Block) -> bool:
        words = _words(block)
        if len(words) < _RUN:
            return bool(words) and tuple(words) in self._lines
        runs = _runs(words)
        return len(runs & self._runs) >= _SHARE_FOUND * len(runs)


def _declared(blocks: Sequence[Block]) -> list[Block]:
    """What stands in the page's main part, or in the one article that fills it; nothing where neither is marked."""
    main = [block for block in blocks if block.in_main]
    around = main or blocks
    articles = {block.article for block in around} - {0}
    if len(articles) == 1:
        article = [block for block in around if block.article]
        if not main or _chars(article) >= _LEAST_OF_MAIN * _chars(main):
            return article
    return main


def _between_borders(blocks: Sequence[Block], text: _MainText) -> list[Block]:
    """What stands between the first and the last block of main text.

    Long blocks show the borders best; where much of the text would be outside of these, shorter ones have to.
    """
    sizes = [len(_words(block)) for block in blocks]
    found = [text.holds(block) for block in blocks]
    kept: list[int] = []
    for least in (_ANCHOR_WORDS, _RUN, 1):
        anchors = [at for at, size in enumerate(sizes) if found[at] and size >= least]
        if not anchors:
            continue
        first, last = anchors[0], anchors[-1]
        # What is set as code or in a table is hardly ever around a text.
        while first > 0 and (found[first - 1] or blocks[first - 1].kind in ("heading", "code", "table")):
            first -= 1
        while last + 1 < len(blocks) and (found[last + 1] or blocks[last + 1].kind in ("code", "table")):
            last += 1
        kept = [at for at in range(first, last + 1) if found[at] or not _is_doubtful(blocks[at])]
        if sum(sizes[at] for at in kept) >= _LEAST_WITHIN * text.num_words:
            break
    return [blocks[at] for at in kept]


def _without_links(blocks: list[Block], text: _MainText) -> list[Block]:
    """The blocks without lists of links that are not main text, unless hardly anything is left without them."""
    inner = [block for block in blocks if not _is_doubtful(block) or text.holds(block)]
    return inner if _chars(inner) >= _LEAST_OF_PAGE * _chars(blocks) else blocks


def _without_surroundings(blocks: Sequence[Block]) -> list[Block]:
    """All that is neither beside the text nor a list of links, or everything when that leaves hardly anything."""
    inner = [block for block in blocks if not _is_doubtful(block)]
    return inner if _chars(inner) >= _LEAST_OF_PAGE * _chars(blocks) else list(blocks)


def _with_title(blocks: Sequence[Block], kept: list[Block]) -> list[Block]:
    """The title of the page put in front where it stands above the main text, apart from it."""
    titles = [block for block in blocks if block.text.startswith("# ")]
    if kept and len(titles) == 1 and titles[0] not in kept:
        above = next(at for at, block in enumerate(blocks) if block is titles[0])
        if above < next(at for at, block in enumerate(blocks) if block is kept[0]):
            return [titles[0], *kept]
    return kept


def _words(block: Block) -> list[str]:
    """The words of the page in a block, without what marks it as an item, a quotation or code."""
    return _WORD.findall(_MARKUP.sub("", block.text, count=1))


def _runs(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + _RUN]) for at in range(len(words) - _RUN + 1)}


def _is_doubtful(block: Block) -> bool:
    """Whether it looks like a menu, or stands beside the text."""
    return block.beside or block.link_chars > _SHARE_LINKS.get(block.kind, 1.0) * block.chars


def _chars(blocks: Iterable[Block]) -> int:
    return sum(block.chars for block in blocks)


def _trafilatura_lines(page: HtmlElement) -> list[str]:
    """The lines of text that trafilatura takes for the main text; none when it gives up."""
    import logging

    from trafilatura import bare_extraction

    # It reports pages without main text as warnings, which is no news here.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    try:
        found = bare_extraction(page, include_comments=True, include_tables=True, with_metadata=False)
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        # What trips over odd markup has found nothing; all of the page is then rendered instead.
        return []
    body = getattr(found, "body", None)
    bodies = [part for part in (body, getattr(found, "commentsbody", None)) if part is not None]
    return [text for part in bodies for text in _lines(part)]


def _lines(body: HtmlElement) -> list[str]:
    """The text of each element of the extracted tree that holds a line of its own."""
    lines: list[str] = []
    for element in body.iter("p", "head", "item", "cell", "code", "quote"):
        lines += "".join(element.itertext()).splitlines()
    return lines
