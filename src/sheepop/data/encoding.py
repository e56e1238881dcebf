"""Documents to token ids, as a function that a worker process can run."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sheepop.data.documents import Document, StoredDocument
from sheepop.data.infilling import Infilling, Special, encode_segments, sentinel_ids
from sheepop.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class DocumentEncoder:
    """Encodes documents with the tokenizer in `tokenizer_directory` and ends each with ``<eos>``.

    A tokenizer whose makers begin every text with a token, such as ``<bos>``, begins every document with it.
    With `infilling` documents of code are re-ordered as it says. A callable that can be sent to a worker process: it
    carries a path, and each process loads the tokenizer once.
    """

    tokenizer_directory: str
    infilling: Infilling | None = None

    def __call__(self, documents: list[StoredDocument]) -> list[tuple[NDArray[np.uint32], int]]:
        """For each document its token ids with what stands around them, and its length in UTF-8 bytes.

        Raises `TokenizerError` when the tokenizer has no ``<eos>``, or not the special tokens of `infilling`.
        """
        tokenizer = _load(self.tokenizer_directory)
        prefix_ids, eos_id = tokenizer.prefix_ids, tokenizer.eos_id
        ids = sentinel_ids(tokenizer) if self.infilling is not None else {}
        encoded = encode_segments(tokenizer, [self._segments(document.document()) for document in documents], ids)
        return [
            (np.array([*prefix_ids, *token_ids, eos_id], dtype=np.uint32), document.num_bytes)
            for document, token_ids in zip(documents, encoded, strict=True)
        ]

    def _segments(self, document: Document) -> list[str | Special]:
        if self.infilling is None or document.kind != "code":
            return [document.text]
        return self.infilling.segments(document.id, document.text)


@functools.lru_cache(maxsize=1)
def _load(directory: str) -> Tokenizer:
    return load_tokenizer(directory)
