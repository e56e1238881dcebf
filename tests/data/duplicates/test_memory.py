from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sheepop.data.documents import Document
from sheepop.data.duplicates import on_disk, signatures
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.search import find_duplicates
from sheepop.data.duplicates.shingles import shingles_of_words, word_hashes
from sheepop.data.duplicates.signatures import PartSignatures, Signature, SignatureWriter

CONFIG = NearDuplicatesConfig(bands=8, rows=5)
COUNT, FAMILY = 20_000, 50


def documents() -> Iterator[Document]:
    """Every document whose number is divisible by `FAMILY` has nearly the same text as the one after it."""
    for number in range(COUNT):
        first = number - (number % FAMILY == 1)
        text = " ".join(f"{first} {i}" for i in range(10)) + "." * (number - first)
        yield Document(text, "file", number, f"{number + 1:032x}", len(text))


def test_memory_stays_within_its_limit_however_many_documents_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 8 bands makes 480 KB of rows to sort, and so do the ids; 384 KiB are allowed for everything."""
    monkeypatch.setattr(signatures, "BLOCK_DOCUMENTS", 2**9)
    monkeypatch.setattr(on_disk, "_BLOCK_ROWS", 2**9)
    bands = np.random.default_rng(1).integers(0, 2**63, (COUNT, CONFIG.bands), dtype=np.uint64)
    path = tmp_path / "part"

    def quick_signature(text: str, *_: object) -> Signature:
        """Computing signatures would prove nothing here."""
        return Signature(bands[int(text.partition(" ")[0])], 16)

    monkeypatch.setattr(signatures, "document_signature", quick_signature)
    with SignatureWriter(path, CONFIG) as writer:
        for document in documents():
            writer.add(document)
    part, limit = PartSignatures.open(path, CONFIG), 3 * 2**17
    shingles_of_words(word_hashes("x", "prose"), "prose", 5)

    tracemalloc.start()
    found = [
        (item.index, item.kept_index)
        for item in find_duplicates([part], lambda _: documents(), CONFIG, tmp_path / "w", memory_bytes=limit)
    ]
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [(number, number + 1) for number in range(0, COUNT, FAMILY)]
    assert peak - held < 1.5 * limit, f"{(peak - held) / 2**10:.0f} KiB"
