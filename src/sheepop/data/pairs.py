"""Pairs of a source and a target: as documents with two marks, and as the tokens of one document.

The text of such a document is the source and the target, one after the other. Its tokens are
``source <eos> <bos> target <eos>``: the encoder reads up to the first ``<eos>``, the decoder from ``<bos>`` on. No text
may be encoded as ``<eos>``, and nothing stands in front, so the first one parts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import DataError, TokenizerError
from sheepop.data.documents import Document
from sheepop.data.extract.pair import sides
from sheepop.data.views import TokenSource
from sheepop.tokenizer import Tokenizer

_BLOCK_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class Pair:
    """What is read and what is to be written."""

    source: str
    target: str

    @classmethod
    def of(cls, document: Document) -> Pair:
        """The pair that a document of this kind holds; raises `DataError` when its marks do not say so."""
        found = sides(document.text, document.marks)
        if found is None:
            raise DataError(f"{document.source}, {document.place}: it is not a pair of source and target.")
        return cls(*found)

    @property
    def texts(self) -> tuple[str, str]:
        """Both sides."""
        return self.source, self.target

    def segments(self, tokenizer: Tokenizer) -> list[str | int]:
        """Texts and special tokens in order, without the ``<eos>`` that every document ends with.

        Raises `TokenizerError` when the tokenizer lacks one of them.
        """
        return [self.source, tokenizer.eos_id, tokenizer.bos_id, self.target]


def require_parted(token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Raises `TokenizerError` when the tokens of a pair hold an ``<eos>`` that does not part source and target."""
    roles = [tokenizer.eos_id, tokenizer.bos_id]
    if list(token_ids).count(tokenizer.eos_id) != roles.count(tokenizer.eos_id):
        raise TokenizerError(
            "This tokenizer encodes some text as its eos_token, which separates the source of a pair from its "
            "target. Leave out tokenizer.path to train one that does not."
        )


@dataclass(frozen=True, eq=False)
class PairBounds:
    """Where the pairs of a split lie, (N,) each: sources with their ``<eos>`` at ``begins:targets``, targets behind."""

    begins: NDArray[np.int64]
    targets: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, split: TokenSource, eos_id: int) -> PairBounds:
        """Reads through the split, one block in memory at a time; raises `DataError` for a document that is no pair."""
        begins, ends = split.offsets[:-1], split.offsets[1:]
        targets = np.zeros(len(begins), dtype=np.int64)
        for start in range(0, split.num_tokens, _BLOCK_TOKENS):
            block = split.tokens(start, min(start + _BLOCK_TOKENS, split.num_tokens))
            places = start + np.flatnonzero(block == eos_id)
            documents = np.searchsorted(split.offsets, places, side="right") - 1
            is_new = targets[documents] == 0
            found, first = np.unique(documents[is_new], return_index=True)
            targets[found] = places[is_new][first] + 1
        # Behind the source there are at least <bos> and <eos>.
        (broken,) = np.nonzero((targets == 0) | (ends - targets < 2))
        if broken.size:
            raise DataError(f"Document {broken[0]} of the corpus is not a pair of source and target. Build it again.")
        return cls(begins, targets, ends)

    @property
    def source_lengths(self) -> NDArray[np.int64]:
        """Tokens that the encoder reads, ``<eos>`` included."""
        return self.targets - self.begins

    @property
    def target_lengths(self) -> NDArray[np.int64]:
        """Tokens that the decoder reads, ``<bos>`` included, and as many that it writes, ``<eos>`` included."""
        return self.ends - self.targets - 1
