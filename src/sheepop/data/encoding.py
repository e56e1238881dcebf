"""Documents to token ids, as a function that a worker process can run."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sheepop.data.documents import StoredDocument
from sheepop.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class DocumentEncoder:
    """Encodes documents with the tokenizer in `tokenizer_directory` and ends each with ``<eos>``.

    A callable that can be sent to a worker process: it carries a path, and each process loads the tokenizer once.
    """

    tokenizer_directory: str

    def __call__(self, documents: list[StoredDocument]) -> list[tuple[NDArray[np.uint32], int]]:
        """For each document its token ids with ``<eos>`` at the end, and its length in UTF-8 bytes."""
        tokenizer = _load(self.tokenizer_directory)
        eos_id = tokenizer.eos_id
        encoded = tokenizer.encode_batch([document.document().text for document in documents])
        return [
            (np.array([*token_ids, eos_id], dtype=np.uint32), document.num_bytes)
            for document, token_ids in zip(documents, encoded, strict=True)
        ]


@functools.lru_cache(maxsize=1)
def _load(directory: str) -> Tokenizer:
    return load_tokenizer(directory)
