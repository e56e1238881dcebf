from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.errors import DataError
from sheepop.core.files import write_checksums
from sheepop.data import Corpus
from sheepop.data.shards import DocumentSources

Tree = Callable[..., Path]
Build = Callable[..., Corpus]


@given(st.lists(st.lists(st.sampled_from(["a", "b", "c\n", "ü"]), max_size=8), max_size=5))
def test_parts_one_after_the_other_are_the_whole(parts: list[list[str]]) -> None:
    whole = [name for part in parts for name in part]
    joined = DocumentSources.joined(DocumentSources.of_names(part) for part in parts)
    assert [joined.names[number] for number in joined.numbers] == whole
    assert joined.names == list(dict.fromkeys(whole))


@pytest.fixture
def corpus(tree: Tree, build: Build) -> Corpus:
    files = {
        f"{name}{number}.txt": f"{name} {number} one\n{name} {number} two\n" for name in "ab" for number in range(9)
    }
    return build(tree(files), documents="line", validation_fraction=0.2, clean={"preset": "none"})


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_corpus_knows_the_file_of_every_document(corpus: Corpus, split: str) -> None:
    found = corpus.sources(split)  # type: ignore[arg-type]
    expected = [document.source for document in corpus.documents(split)]  # type: ignore[arg-type]
    assert [found.names[number] for number in found.numbers] == expected
    assert len(set(expected)) > 1


def test_a_corpus_of_format_2_is_read_through_for_them(corpus: Corpus) -> None:
    expected = corpus.sources("train")
    manifest = json.loads((corpus.directory / "manifest.json").read_text())
    manifest["format_version"] = 2
    for split in manifest["tokens"]["splits"].values():
        del split["sources"]
    (corpus.directory / "manifest.json").write_text(json.dumps(manifest))
    for name in ("train.src", "train.sources.json", "val.src", "val.sources.json"):
        (corpus.directory / "tokens" / name).unlink()
    write_checksums(corpus.directory)
    older = Corpus.open(corpus.directory)
    assert older.fingerprint == corpus.fingerprint
    found = older.sources("train")
    assert (found.names, found.numbers.tolist()) == (expected.names, expected.numbers.tolist())


@pytest.mark.parametrize(
    ("name", "content"),
    [("train.src", b"\0\0"), ("train.src", None), ("train.sources.json", b"[]"), ("train.sources.json", b"{")],
)
def test_damaged_files_are_named(corpus: Corpus, name: str, content: bytes | None) -> None:
    path = corpus.directory / "tokens" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"train\.s.* (damaged|cannot be read)"):
        corpus.sources("train")
