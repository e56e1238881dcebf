from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from sheepop.core.errors import DataError, UsageError
from sheepop.core.files import write_checksums
from sheepop.data import Corpus, DataConfig, build_corpus, is_corpus
from sheepop.data.corpus import trace_tokens
from sheepop.data.report import _largest
from sheepop.tokenizer import CharTokenizer, TokenizerConfig

Tree = Callable[..., Path]
Build = Callable[..., Corpus]


@pytest.fixture
def corpus(tree: Tree, build: Build) -> Corpus:
    return build(tree({f"{i}.txt": f"text number {i}\n" for i in range(40)}))


def change_manifest(corpus: Corpus, **changes: object) -> None:
    path = corpus.directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    write_checksums(corpus.directory)


def test_a_corpus_opens_as_it_was_built(corpus: Corpus) -> None:
    opened = Corpus.open(corpus.directory)
    assert opened.manifest == corpus.manifest
    assert opened.fingerprint == corpus.fingerprint
    assert (
        opened.train.tokens(0, opened.train.num_tokens).tolist()
        == corpus.train.tokens(0, corpus.train.num_tokens).tolist()
    )
    assert is_corpus(corpus.directory)


@pytest.mark.parametrize(
    "name",
    [
        "tokens/train-00000.bin",
        "tokens/val.idx",
        "documents/train-00000.jsonl.zst",
        "manifest.json",
        "tokenizer/tokenizer.json",
    ],
)
def test_a_flipped_bit_is_found_and_the_file_named(corpus: Corpus, name: str) -> None:
    path = corpus.directory / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        Corpus.open(corpus.directory)
    assert name.rsplit("/", 1)[-1] in str(caught.value)


def test_a_missing_shard_is_named_even_without_checksums(corpus: Corpus) -> None:
    (corpus.directory / "tokens/train-00000.bin").unlink()
    for verify in (True, False):
        with pytest.raises(DataError, match=r"train-00000.bin is missing"):
            Corpus.open(corpus.directory, verify=verify)


def test_a_newer_format_is_refused(corpus: Corpus) -> None:
    change_manifest(corpus, format_version=4)
    with pytest.raises(DataError, match=r"has corpus format 4, but this SheepOp reads formats up to 3. Upgrade"):
        Corpus.open(corpus.directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": "1"},
        {"format_version": 0},
        {"format_version": True},
        {"tokens": {}},
        {"tokens": None},
        {"tokenizer": []},
        {"format": "something else"},
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(corpus: Corpus, changes: dict[str, object]) -> None:
    change_manifest(corpus, **changes)
    with pytest.raises(DataError, match=r"damaged|not the manifest"):
        Corpus.open(corpus.directory)


def test_a_folder_of_text_is_no_corpus(tree: Tree) -> None:
    root = tree({"a.txt": "x"})
    assert not is_corpus(root)
    with pytest.raises(DataError, match=r"is not a corpus directory: it has no manifest.json"):
        Corpus.open(root)


def test_another_programs_manifest_is_no_corpus(tree: Tree) -> None:
    assert not is_corpus(tree({"manifest.json": '{"name": "extension"}'}))
    assert not is_corpus(tree({"manifest.json/x": "1"}, "folder"))


def test_the_tokenizer_must_be_the_one_it_was_built_with(corpus: Corpus) -> None:
    corpus.require_tokenizer(corpus.tokenizer())
    other = CharTokenizer("é")
    with pytest.raises(DataError) as caught:
        corpus.require_tokenizer(other)
    assert other.fingerprint()[:16] in str(caught.value)
    assert corpus.tokenizer().fingerprint()[:16] in str(caught.value)


def test_the_fingerprint_knows_the_tokenizer_and_the_tokens(corpus: Corpus, build: Build, tree: Tree) -> None:
    same_text = {f"{i}.txt": f"text number {i}\n" for i in range(40)}
    assert build(tree(same_text, "same"), output="b").fingerprint == corpus.fingerprint
    changed = {**same_text, "0.txt": "text number O\n"}
    assert build(tree(changed, "changed"), output="c").fingerprint != corpus.fingerprint


@pytest.mark.parametrize(
    "changed",
    [
        ("tokenizer", "fingerprint"),
        *(("tokens", "splits", split, "index", "sha256") for split in ("train", "validation")),
        *(
            ("tokens", "splits", split, "shards", number, "sha256")
            for split in ("train", "validation")
            for number in (0, 1)
        ),
    ],
)
def test_the_fingerprint_changes_with_any_file_that_is_trained_on_or_scored(
    corpus: Corpus, changed: tuple[str | int, ...]
) -> None:
    manifest = copy.deepcopy(corpus.manifest)
    for split, name in (("train", "train"), ("validation", "val")):
        (corpus.directory / "tokens" / f"{name}-00001.bin").touch()
        shard = {"file": f"{name}-00001.bin", "tokens": 0, "sha256": "of an empty file"}
        manifest["tokens"]["splits"][split]["shards"].append(shard)
    other = copy.deepcopy(manifest)
    *path, last = changed
    place = other
    for key in path:
        place = place[key]
    place[last] = "0" * 64
    assert Corpus(corpus.directory, other).fingerprint != Corpus(corpus.directory, manifest).fingerprint


def test_one_language_beyond_those_drawn_is_called_so() -> None:
    counts = {f"l{place:02d}": 100 - place for place in range(26)}
    assert list(_largest(counts).items())[-2:] == [("l24", 76), ("1 other", 75)]
    assert list(_largest({**counts, "l26": 1}).items())[-1] == ("2 others", 76)


def test_licences_are_counted_that_origins_state(tmp_path: Path) -> None:
    repository, plain = tmp_path / "project", tmp_path / "plain"
    for folder in (repository, plain):
        folder.mkdir()
        for number in range(3):
            (folder / f"{number}.txt").write_text(f'{folder.name} {number}: "license" is a word here.\n' * 3)
    (repository / "LICENSE").write_text(
        "MIT License\n\nPermission is hereby granted, free of charge, to any person obtaining a copy of this software\n"
        "The above copyright notice and this permission notice shall be included in all copies.\n"
    )
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=repository, check=True)
    data = DataConfig(paths=(f"git+{repository}", str(plain)), validation_fraction=0)
    corpus = build_corpus(data, TokenizerConfig(algorithm="char"), tmp_path / "corpus", seed=0)
    stated = [document.facts.get("license") for document in corpus.documents("train")]
    assert corpus.train.num_documents == len(stated) == 7
    assert corpus.licenses == {"MIT": stated.count("MIT")} == {"MIT": 4}


def test_every_token_is_traced_to_the_document_that_holds_it(tree: Tree, build: Build) -> None:
    files = {f"{n:02}.txt": f"This is text {n}.\n" * (1 + n % 3) for n in range(40)}
    corpus = build(tree(files), clean={"preset": "none"}, validation_fraction=0.2)
    tokens = corpus.train
    origins = list(trace_tokens(corpus, "train", 0, tokens.num_tokens))
    assert [origin.document for origin in origins] == list(range(tokens.num_documents))
    assert origins[0].start == 0 and origins[-1].stop == tokens.num_tokens
    assert all(a.stop == b.start for a, b in pairwise(origins))
    eos = corpus.tokenizer().decode([corpus.tokenizer().eos_id])
    for origin in origins:
        assert origin.text == files[origin.file] + eos
        assert (origin.pages, origin.place, origin.kind) == ((), "", "prose")


def test_a_range_inside_documents_gives_their_parts(tree: Tree, build: Build) -> None:
    corpus = build(tree({f"{n:02}.txt": f"text {n:02}\n" for n in range(30)}), validation_fraction=0)
    # Characters are tokens: eight of text and the end of each document.
    first, second = trace_tokens(corpus, "train", 5, 9 + 4)
    assert (first.file, first.text.startswith("00\n"), first.start, first.stop) == ("00.txt", True, 5, 9)
    assert (second.file, second.text, second.start, second.stop) == ("01.txt", "text", 9, 13)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (3, 3), (0, 10**9)])
def test_a_range_outside_of_the_split_is_refused(tree: Tree, build: Build, start: int, stop: int) -> None:
    corpus = build(tree({"a.txt": "one\ntwo\n"}))
    with pytest.raises(UsageError, match="Give a range A:B"):
        list(trace_tokens(corpus, "train", start, stop))


def test_a_slide_is_named(tree: Tree, build: Build, tmp_path: Path) -> None:
    pptx = pytest.importorskip("pptx")
    presentation = pptx.Presentation()
    for words in ("Sheep graze in the meadow", "Wool keeps people warm"):
        slide = presentation.slides.add_slide(presentation.slide_layouts[5])
        slide.shapes.title.text = words
    root = tree({"a.txt": "plain\n"})
    presentation.save(str(root / "talk.pptx"))
    corpus = build(root, validation_fraction=0)
    text = next(d.text for d in corpus.documents("train") if d.source == "talk.pptx")
    begin = 7 + text.index("Wool")  # after the six characters of the first document and its end
    (origin,) = trace_tokens(corpus, "train", begin, begin + 4)
    assert (origin.file, origin.pages, origin.text) == ("talk.pptx", ("slide 2",), "Wool")
