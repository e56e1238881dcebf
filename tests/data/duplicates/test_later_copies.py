from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.data.documents import Document
from sheepop.data.duplicates.search import later_copies
from sheepop.data.duplicates.signatures import PartSignatures, SignatureWriter


@given(st.lists(st.integers(0, 12), max_size=60), st.lists(st.integers(0, 60), max_size=4), st.booleans())
def test_later_copies_are_found_among_all_parts(
    tmp_path_factory: pytest.TempPathFactory, texts: list[int], cuts: list[int], small: bool
) -> None:
    directory = tmp_path_factory.mktemp("copies")
    documents = [Document.of(f"text {number}", "file", place) for place, number in enumerate(texts)]
    bounds = sorted({0, len(documents), *(min(cut, len(documents)) for cut in cuts)})
    parts = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        with SignatureWriter(directory / f"{number}", None) as writer:
            for document in documents[start:end]:
                writer.add(document)
        parts.append(PartSignatures.open(directory / f"{number}", None))
    with later_copies(parts, directory / "work", memory_bytes=1 if small else 2**20) as copies:
        found = [tuple(row) for block in copies.blocks() for row in block.tolist()]
    assert found == [(n, texts.index(text)) for n, text in enumerate(texts) if texts.index(text) != n]
