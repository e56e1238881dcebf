"""Encodes documents as token ids, in a worker process or in the main one.

A pair becomes ``source <eos> <bos> target <eos>``, with no prefix; its text must not encode to ``<eos>``, so that the
first ``<eos>`` separates source and target. A document of code may be cut into three parts and reordered so that the
middle comes last (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle", section 3:
whole documents, cut at characters before tokenization).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import TokenizerError
from sheepop.core.random import derive_seed
from sheepop.data.config import FimConfig
from sheepop.data.documents import Document, Pair, StoredDocument
from sheepop.data.extract.template import PAIR
from sheepop.tokenizer import Tokenizer, load_tokenizer

# Exact as a float and above every seed, so a rate of 1 selects every document and a rate of 0 none.
_SEEDS = 2.0**63


class Special(Enum):
    """The sentinels: special tokens that announce a part of the document."""

    PREFIX = "<|fim_prefix|>"
    SUFFIX = "<|fim_suffix|>"
    MIDDLE = "<|fim_middle|>"


SENTINELS: tuple[str, ...] = tuple(special.value for special in Special)


@dataclass(frozen=True, slots=True)
class Infilling:
    """Decides from the document id and `seed` alone whether and how a document is reordered."""

    config: FimConfig
    seed: int

    def segments(self, document_id: str, text: str) -> list[str | Special]:
        """The text and sentinels of a document in the order of encoding; no character is lost.

        Two uniformly drawn offsets cut the text into prefix p, middle m and suffix s, each possibly empty. PSM is
        ``PREFIX p SUFFIX s MIDDLE m``. SPM is ``PREFIX SUFFIX s MIDDLE p m``: it looks like PSM with an empty prefix,
        so that a model learns both as one format (section 3.1).
        """
        if self._draw(document_id, "document") >= self.config.rate * _SEEDS:
            return [text]
        first, second = sorted(self._draw(document_id, cut) % (len(text) + 1) for cut in ("one cut", "other cut"))
        prefix, middle, suffix = text[:first], text[first:second], text[second:]
        if self._draw(document_id, "suffix first") < self.config.spm_rate * _SEEDS:
            return [Special.PREFIX, Special.SUFFIX, suffix, Special.MIDDLE, prefix, middle]
        return [Special.PREFIX, prefix, Special.SUFFIX, suffix, Special.MIDDLE, middle]

    def _draw(self, document_id: str, purpose: str) -> int:
        return derive_seed(self.seed, "infilling", purpose, document_id)


def sentinel_ids(tokenizer: Tokenizer) -> dict[Special, int]:
    """The ids of the sentinels; raises `TokenizerError` if `tokenizer` lacks one."""
    known = tokenizer.special_tokens
    missing = [name for name in SENTINELS if name not in known]
    if missing:
        raise TokenizerError(
            f"Fill-in-the-middle needs the special tokens {', '.join(SENTINELS)}, and this tokenizer lacks "
            f"{', '.join(missing)}. Leave out tokenizer.path to train one that has them, use the tokenizer of a "
            "corpus that was built with data.infilling, or set data.infilling.rate=0."
        )
    return {special: known[special.value] for special in Special}


@dataclass(frozen=True, slots=True)
class DocumentEncoder:
    """Encodes documents with the tokenizer in `tokenizer_directory` and ends each with ``<eos>``.

    Documents, but not pairs, begin with the tokenizer's prefix, such as ``<bos>``, if it has one. `infilling` reorders
    documents of code. The encoder holds only a path, so it can be sent to worker processes; each loads the tokenizer
    once. Its `fingerprint` tells it from one that was in the same directory before.
    """

    tokenizer_directory: str
    fingerprint: str
    infilling: Infilling | None = None

    def __call__(self, documents: list[StoredDocument]) -> list[tuple[NDArray[np.uint32], int]]:
        """For each document its token ids, special tokens included, and its length in UTF-8 bytes.

        Raises `TokenizerError` if the tokenizer lacks ``<eos>``, ``<bos>`` (for pairs) or the sentinels (for
        `infilling`), or if it encodes text of a pair as ``<eos>``.
        """
        tokenizer = _load(self.tokenizer_directory, self.fingerprint)
        eos_id = tokenizer.eos_id
        ids = sentinel_ids(tokenizer) if self.infilling is not None else {}
        read = [document.document() for document in documents]
        segments = [self._segments(document, tokenizer, ids) for document in read]
        texts = iter(tokenizer.encode_batch([part for parts in segments for part in parts if isinstance(part, str)]))
        encoded = []
        for document, parts in zip(read, segments, strict=True):
            token_ids = [n for part in parts for n in (next(texts) if isinstance(part, str) else (part,))]
            if document.kind == PAIR and token_ids.count(eos_id) != 1 + (tokenizer.bos_id == eos_id):
                raise TokenizerError(
                    "This tokenizer encodes some text as its eos_token, which separates the source of a pair from "
                    "its target. Leave out tokenizer.path to train one that does not."
                )
            encoded.append((np.array([*token_ids, eos_id], dtype=np.uint32), document.num_bytes))
        return encoded

    def _segments(self, document: Document, tokenizer: Tokenizer, ids: dict[Special, int]) -> list[str | int]:
        if document.kind == PAIR:
            pair = Pair.of(document)
            return [pair.source, tokenizer.eos_id, tokenizer.bos_id, pair.target]
        if self.infilling is None or document.kind != "code":
            return [*tokenizer.prefix_ids, document.text]
        parts = self.infilling.segments(document.id, document.text)
        return [*tokenizer.prefix_ids, *(part if isinstance(part, str) else ids[part] for part in parts)]


@functools.lru_cache(maxsize=1)
def _load(directory: str, _fingerprint: str) -> Tokenizer:
    return load_tokenizer(directory)
