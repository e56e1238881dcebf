"""From a position in the tokens back to the document, the file, and the page it came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sheepop.core.errors import UsageError
from sheepop.data.corpus import Corpus
from sheepop.data.documents import Document
from sheepop.data.split import SplitName


@dataclass(frozen=True, slots=True)
class Origin:
    """Tokens ``start:stop`` of a split that belong to one document.

    `document` is the document's number in the split; `file`, `part` and `place` say where it came from, `pages` which
    of its pages, slides or cells the tokens stand on, and `text` is what they say.
    """

    split: str
    start: int
    stop: int
    document: int
    file: str
    part: int
    place: str
    pages: tuple[str, ...]
    kind: str
    language: str
    facts: dict[str, str]
    text: str

    def as_record(self) -> dict[str, Any]:
        """The origin as JSON."""
        return asdict(self)


def trace_tokens(corpus: Corpus, split: SplitName, start: int, stop: int) -> Iterator[Origin]:
    """The origin of the tokens ``start:stop`` of a split, one for each document they touch, in order.

    Raises `UsageError` when the range does not lie in the split.
    """
    tokens = corpus.train if split == "train" else corpus.validation
    if not 0 <= start < stop <= tokens.num_tokens:
        raise UsageError(
            f"Tokens {start}:{stop} are not in the {split} split, which has {tokens.num_tokens:,} tokens. "
            f"Give a range A:B with 0 <= A < B <= {tokens.num_tokens}."
        )
    first = int(np.searchsorted(tokens.offsets, start, side="right")) - 1
    last = int(np.searchsorted(tokens.offsets, stop, side="left"))
    tokenizer = corpus.tokenizer()
    for number, document in zip(range(first, last), corpus.documents(split, first, last), strict=True):
        begin = max(start, int(tokens.offsets[number]))
        end = min(stop, int(tokens.offsets[number + 1]))
        before = len(tokenizer.decode(tokens.tokens(int(tokens.offsets[number]), begin).tolist()))
        text = tokenizer.decode(tokens.tokens(begin, end).tolist(), continues=before > 0)
        yield Origin(
            split=split,
            start=begin,
            stop=end,
            document=number,
            file=document.source,
            part=document.part,
            place=document.place,
            pages=_pages(document, before, before + len(text)),
            kind=document.kind,
            language=document.language,
            facts=dict(document.facts),
            text=text,
        )


def _pages(document: Document, start: int, stop: int) -> tuple[str, ...]:
    """The marks in force between two offsets in characters."""
    ends = [*(offset for offset, _ in document.marks[1:]), len(document.text)]
    return tuple(
        name
        for (offset, name), end in zip(document.marks, ends, strict=False)
        if offset < max(stop, start + 1) and end > start
    )
