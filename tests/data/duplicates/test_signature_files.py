from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sheepop.core.errors import DataError
from sheepop.data.documents import Document
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.signatures import PartSignatures, SignatureWriter, document_signature

CONFIG = NearDuplicatesConfig()
Sign = Callable[..., list[PartSignatures]]


def documents(count: int) -> list[Document]:
    return [Document.of(f"document {i} has these few words, and é" * (i % 3), "file", i) for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 19])
def test_what_was_written_is_read_column_by_column(sign: Sign, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("sheepop.data.duplicates.signatures.BLOCK_DOCUMENTS", 8)
    [part] = sign([documents(count)], CONFIG)
    assert (part.num_documents, part.num_bands, part.protected) == (count, 16, False)
    signatures = [document_signature(document.text, document.kind, CONFIG) for document in documents(count)]

    def column(first: int, last: int) -> list[list[int]]:
        return [row for block in part.blocks(*range(first, last)) for row in block.T.tolist()]

    assert [f"{high:016x}{low:016x}" for high, low in column(0, 2)] == [document.id for document in documents(count)]
    assert column(2, 3) == [[document.num_bytes] for document in documents(count)]
    assert column(3, 4) == [[signature.num_shingles] for signature in signatures]
    assert column(4, 20) == [signature.bands.tolist() for signature in signatures]
    assert column(11, 12) == [[int(signature.bands[7])] for signature in signatures]


def test_without_settings_only_ids_and_lengths_are_written(sign: Sign) -> None:
    [part] = sign([documents(3)], None)
    assert part.num_bands == 0
    assert np.concatenate(list(part.blocks(2, 3)), axis=1).tolist() == [[0, 38, 76], [0, 0, 0]]


def test_a_file_that_an_error_ended_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with pytest.raises(ZeroDivisionError), SignatureWriter(path, CONFIG) as writer:
        writer.add(documents(1)[0])
        raise ZeroDivisionError
    with pytest.raises(DataError, match="is damaged"):
        PartSignatures.open(path, CONFIG)


def test_damage_and_other_settings_are_named(sign: Sign) -> None:
    [part] = sign([documents(5)], CONFIG)
    with pytest.raises(DataError, match=r"00000.signatures has signatures made with other settings"):
        PartSignatures.open(part.path, CONFIG.replace(min_words=3))
    # The threshold decides over signatures, it does not change them.
    assert PartSignatures.open(part.path, CONFIG.replace(threshold=0.9)) == part
    whole = part.path.read_bytes()
    for damaged in (whole[:-8], whole + b"\0", whole[:3], b"", b"x" * len(whole)):
        part.path.write_bytes(damaged)
        with pytest.raises(DataError, match="is damaged"):
            PartSignatures.open(part.path, CONFIG)
    part.path.write_bytes(whole[:64])
    with pytest.raises(DataError, match="got shorter"):
        list(part.blocks(0, 1))
    part.path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        PartSignatures.open(part.path, CONFIG)
