from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sheepop.core.errors import DataError
from sheepop.data import Corpus
from sheepop.data.documents import Document, read_documents_file, stored_file
from sheepop.data.duplicates.config import NearDuplicatesConfig
from sheepop.data.duplicates.search import find_duplicates
from sheepop.data.duplicates.signatures import PartSignatures, SignatureWriter
from sheepop.data.pipeline.passes import earlier_files, sign_file

CONFIG = NearDuplicatesConfig()
TEXT = " ".join(f"word{number}" for number in range(100))


@pytest.fixture
def corpus(tree: Callable[[Mapping[str, str]], Path], build: Callable[..., Corpus]) -> Corpus:
    files = {f"{number}.txt": f"A text about number {number} and nothing else." for number in range(30)}
    return build(tree({**files, "known.txt": TEXT}))


def test_new_documents_that_are_in_an_earlier_corpus_go(corpus: Corpus, tmp_path: Path) -> None:
    files = earlier_files([corpus.directory])
    assert [file.name for file in files] == ["train-00000.jsonl.zst", "val-00000.jsonl.zst"]
    old = [list(corpus.documents("train")), list(corpus.documents("validation"))]
    assert [list(read_documents_file(file)) for file in files] == old

    new = [Document.of(text, "new", 0) for text in (TEXT + " and more", "A text about number 7 and nothing else.", "?")]
    parts = [sign_file(file, tmp_path / f"{number}", CONFIG) for number, file in enumerate(files)]
    with SignatureWriter(tmp_path / "new", CONFIG) as writer:
        for document in new:
            writer.add(document)
    parts.append(PartSignatures.open(tmp_path / "new", CONFIG))

    documents = [*old, new]
    removed = list(find_duplicates(parts, lambda number: iter(documents[number]), CONFIG, tmp_path / "work"))
    assert [(item.part, item.index, item.reason) for item in removed] == [(2, 0, "near"), (2, 1, "exact")]
    named = [documents[item.kept_part][item.kept_index].text for item in removed]
    assert named == [TEXT, new[1].text]


def test_a_directory_that_is_no_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a corpus directory"):
        earlier_files([tmp_path])


def test_a_damaged_file_of_an_earlier_corpus_is_named_and_leaves_nothing_that_is_used(
    corpus: Corpus, tmp_path: Path
) -> None:
    [file, _] = earlier_files([corpus.directory])
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train-00000.jsonl.zst is damaged"):
        sign_file(file, tmp_path / "signatures", CONFIG)
    with pytest.raises(DataError, match="is damaged"):
        PartSignatures.open(tmp_path / "signatures", CONFIG)


def test_a_kind_that_an_earlier_corpus_should_not_have_is_named(tmp_path: Path) -> None:
    with stored_file(tmp_path, "train") as writer:
        writer.write(Document.of("Roses are red.", "file", 0, kind="poem").stored().line)
    with pytest.raises(DataError, match=r"train-00000.jsonl.zst is damaged \(unknown kind of document 'poem'"):
        sign_file(tmp_path / "train-00000.jsonl.zst", tmp_path / "signatures", CONFIG)
