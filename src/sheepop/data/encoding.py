"""Documents to token ids, as a function that a worker process can run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sheepop.data.documents import Document, StoredDocument
from sheepop.data.extract.pair import KIND
from sheepop.data.infilling import Infilling, Special, sentinel_ids
from sheepop.data.pairs import Pair, require_parted
from sheepop.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class DocumentEncoder:
    """Encodes documents with the tokenizer in `tokenizer_directory` and ends each with ``<eos>``.

    A tokenizer whose makers begin every text with a token, such as ``<bos>``, begins every document with it, but not
    the pairs, which become what `sheepop.data.pairs` says. With `infilling` documents of code are re-ordered as it
    says. A callable that can be sent to a worker process: it carries a path, and each process loads the tokenizer once.
    """

    tokenizer_directory: str
    infilling: Infilling | None = None

    def __call__(self, documents: list[StoredDocument]) -> list[tuple[NDArray[np.uint32], int]]:
        """For each document its token ids with what stands around them, and its length in UTF-8 bytes.

        Raises `TokenizerError` when the tokenizer has no ``<eos>``, no ``<bos>`` where there are pairs, or not the
        special tokens of `infilling`, and when it encodes text of a pair as ``<eos>``.
        """
        tokenizer = _load(self.tokenizer_directory)
        eos_id = tokenizer.eos_id
        ids = sentinel_ids(tokenizer) if self.infilling is not None else {}
        read = [document.document() for document in documents]
        encoded = _encode(tokenizer, [self._segments(document, tokenizer, ids) for document in read])
        for document, token_ids in zip(read, encoded, strict=True):
            if document.kind == KIND:
                require_parted(token_ids, tokenizer)
        return [
            (np.array([*token_ids, eos_id], dtype=np.uint32), document.num_bytes)
            for document, token_ids in zip(read, encoded, strict=True)
        ]

    def _segments(self, document: Document, tokenizer: Tokenizer, ids: dict[Special, int]) -> list[str | int]:
        """The document as texts and special tokens, in the order in which they are encoded."""
        if document.kind == KIND:
            return Pair.of(document).segments(tokenizer)
        if self.infilling is None or document.kind != "code":
            return [*tokenizer.prefix_ids, document.text]
        parts = self.infilling.segments(document.id, document.text)
        return [*tokenizer.prefix_ids, *(part if isinstance(part, str) else ids[part] for part in parts)]


def _encode(tokenizer: Tokenizer, documents: Sequence[Sequence[str | int]]) -> list[list[int]]:
    """The token ids of each document: its texts encoded apart, and the special tokens between them."""
    texts = [segment for document in documents for segment in document if isinstance(segment, str)]
    encoded = iter(tokenizer.encode_batch(texts))
    return [
        [token_id for segment in document for token_id in (next(encoded) if isinstance(segment, str) else (segment,))]
        for document in documents
    ]


@functools.lru_cache(maxsize=1)
def _load(directory: str) -> Tokenizer:
    return load_tokenizer(directory)
