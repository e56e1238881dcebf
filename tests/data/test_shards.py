from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.core.errors import DataError
from sheepop.core.files import write_checksums
from sheepop.data import Corpus, PackedBatches, TokenSplit, shards
from sheepop.data.shards import DocumentSources, DocumentView, TokenWriter, token_type

Tree = Callable[..., Path]
Build = Callable[..., Corpus]
documents_of_ids = st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=20), max_size=12)


def write(directory: Path, documents: list[list[int]], shard_tokens: int = 8, vocab_size: int = 65536) -> TokenSplit:
    """A split whose shards each end with the document that fills them to `shard_tokens`, as a build joins them."""
    dtype, groups = token_type(vocab_size), [[]]
    for document in documents:
        if sum(map(len, groups[-1])) >= shard_tokens:
            groups.append([])
        groups[-1].append(document)
    shards = []
    for number, group in enumerate(groups):
        with TokenWriter(directory, f"train-{number:05d}", dtype) as writer:
            for document in group:
                writer.write(document, num_bytes=len(document))
        shards += writer.summary()["shards"]
    np.cumsum([0, *map(len, documents)]).astype("<i8").tofile(directory / "train.idx")
    total = {"documents": len(documents), "bytes": sum(map(len, documents))}
    return TokenSplit.open(directory, {**total, "shards": shards, "index": {"file": "train.idx"}}, dtype)


@given(documents_of_ids, st.integers(1, 40), st.sampled_from([300, 65536, 65537]), st.data())
def test_tokens_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    shard_tokens: int,
    vocab_size: int,
    data: st.DataObject,
) -> None:
    documents = [[i % vocab_size for i in document] for document in documents]
    split = write(tmp_path_factory.mktemp("tokens"), documents, shard_tokens, vocab_size)
    flat = [token for document in documents for token in document]
    assert (split.num_documents, split.num_tokens, split.num_bytes) == (len(documents), len(flat), len(flat))
    assert [split.tokens(*bounds).tolist() for bounds in pairwise(split.offsets.tolist())] == documents
    start = data.draw(st.integers(0, len(flat)))
    stop = data.draw(st.integers(start, len(flat)))
    assert split.tokens(start, stop).tolist() == flat[start:stop]


def test_the_format_on_disk(tmp_path: Path) -> None:
    with TokenWriter(tmp_path, "train", token_type(65536)) as writer:
        for document in ([1, 2, 258], [4], [5] * 8, [6]):
            writer.write(document)
    # Little endian, two bytes a token.
    assert (tmp_path / "train.bin").read_bytes() == bytes([1, 0, 2, 0, 2, 1, 4, 0, *[5, 0] * 8, 6, 0])
    index = (tmp_path / "train.idx").read_bytes()
    assert index == b"".join(n.to_bytes(8, "little") for n in (0, 3, 4, 12, 13))


def test_the_type_follows_the_vocabulary(tmp_path: Path) -> None:
    assert token_type(65536) == np.dtype("<u2")
    assert token_type(65537) == np.dtype("<u4")
    assert write(tmp_path, [[70000]], vocab_size=70001).tokens(0, 1).tolist() == [70000]


def test_the_summary_names_files_and_hashes(tmp_path: Path) -> None:
    with TokenWriter(tmp_path, "val", np.dtype("<u2")) as writer:
        writer.write([1, 2])
    summary = writer.summary()
    assert summary["shards"] == [{"file": "val.bin", "tokens": 2, "sha256": hashlib.sha256(b"\1\0\2\0").hexdigest()}]
    assert (summary["documents"], summary["tokens"]) == (1, 2)


@pytest.mark.parametrize("bad", [[], [65536], [-1], [1.5], [[1]]])
def test_what_is_no_document_is_refused(tmp_path: Path, bad: list[object]) -> None:
    with TokenWriter(tmp_path, "train", np.dtype("<u2")) as writer, pytest.raises(ValueError, match=r"token|document"):
        writer.write(bad)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 4), (3, 2)])
def test_tokens_outside_are_refused(start: int, stop: int) -> None:
    split = TokenSplit.from_documents([[1, 2], [3]])
    with pytest.raises(IndexError, match="outside a split of 3"):
        split.tokens(start, stop)


@pytest.mark.parametrize("content", [b"\1\0", b"\1\0\2\0\3", b"\1\0\2\0\3\0\4\0"])
def test_a_shard_of_another_size_is_named(tmp_path: Path, content: bytes) -> None:
    with TokenWriter(tmp_path, "train-00000", np.dtype("<u2")) as writer:
        writer.write([1, 2, 3])
    summary = writer.summary()
    (tmp_path / "train-00000.bin").write_bytes(content)
    size = len(content)
    with pytest.raises(DataError, match=rf"train-00000.bin is damaged: it has {size} bytes where 3 entries of 2"):
        TokenSplit.open(tmp_path, summary, np.dtype("<u2"))
    (tmp_path / "train-00000.bin").unlink()
    with pytest.raises(DataError, match=r"train-00000.bin is missing"):
        TokenSplit.open(tmp_path, summary, np.dtype("<u2"))


def test_a_name_that_leads_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    with TokenWriter(tmp_path, "train-00000", np.dtype("<u2")) as writer:
        writer.write([1])
    summary = writer.summary()
    summary["shards"][0]["file"] = "../train-00000.bin"
    with pytest.raises(DataError, match="not a file name"):
        TokenSplit.open(tmp_path, summary, np.dtype("<u2"))


def test_a_shard_that_vanishes_or_shrinks_after_it_was_opened_is_named(tmp_path: Path) -> None:
    split = write(tmp_path, [[1, 2, 3], [4] * 20000, [5]], shard_tokens=4)
    assert split.tokens(2, 5).tolist() == [3, 4, 4]
    shard = tmp_path / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:1000])
    assert split.tokens(0, 4).tolist() == [1, 2, 3, 4]  # what is left of it is still right
    with pytest.raises(DataError, match=r"train-00000.bin was cut short after it was opened"):
        split.tokens(10_000, 10_010)
    shard.unlink()
    with pytest.raises(DataError, match=r"train-00000.bin has disappeared since it was opened"):
        split.tokens(0, 1)
    assert split.tokens(20_003, 20_004).tolist() == [5]
    (tmp_path / "train-00001.bin").unlink()
    (tmp_path / "train-00001.bin").mkdir()
    with pytest.raises(DataError, match=r"train-00001.bin can no longer be read: Is a directory"):
        split.tokens(20_003, 20_004)


def test_a_slice_that_the_system_gives_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_LARGEST_READ", 5)
    split = write(tmp_path, [list(range(100, 140))], shard_tokens=100)
    assert split.tokens(1, 39).tolist() == list(range(101, 139))


@pytest.mark.parametrize("offsets", [[], [0], [0, 2], [0, 4], [1, 3]])
def test_offsets_that_do_not_span_the_tokens_are_refused(offsets: list[int]) -> None:
    with pytest.raises(DataError, match="do not span the 3 tokens"):
        TokenSplit([np.array([1, 2, 3], np.uint32)], np.array(offsets, np.int64))


def test_no_documents_make_an_empty_split(tmp_path: Path) -> None:
    split = write(tmp_path, [])
    assert (split.num_documents, split.num_tokens) == (0, 0)
    assert split.tokens(0, 0).tolist() == []


few_documents = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=9)


@given(few_documents, st.data())
def test_a_view_reads_like_a_split_of_its_documents_alone(documents: list[list[int]], data: st.DataObject) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, len(documents) - 1), min_size=1)))
    split = TokenSplit.from_documents(documents)
    view = DocumentView(split, np.array(chosen))
    alone = TokenSplit.from_documents([documents[number] for number in chosen])
    assert view.offsets.tolist() == alone.offsets.tolist()
    start = data.draw(st.integers(0, view.num_tokens))
    stop = data.draw(st.integers(start, view.num_tokens))
    assert view.tokens(start, stop).tolist() == alone.tokens(start, stop).tolist()
    found = view.ranges(start, stop)
    assert [token for places in found for token in split.tokens(*places).tolist()] == alone.tokens(start, stop).tolist()
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(found))
    rows, expected = (PackedBatches(source, max_length=4, pad_id=0) for source in (view, alone))
    everything = np.arange(expected.num_samples)
    assert rows.batch(everything).labels.tolist() == expected.batch(everything).labels.tolist()


def test_what_is_not_in_a_view_is_refused() -> None:
    split = TokenSplit.from_documents([[1, 2], [3], [4]])
    for numbers in ([0, 3], [-1], [1, 1], [2, 0]):
        with pytest.raises(ValueError, match="ascend from 0 to 2"):
            DocumentView(split, np.array(numbers))
    with pytest.raises(IndexError, match="outside a view of 3"):
        DocumentView(split, np.array([0, 2])).tokens(1, 4)


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
