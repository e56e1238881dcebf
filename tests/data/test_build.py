from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shlex
import sys
import zipfile
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError, OutputError, TokenizerError
from sheepop.data import Corpus, DataConfig, build_corpus
from sheepop.data.pipeline.record import left_out_in_words
from sheepop.jobs.config import load_config
from sheepop.tokenizer import CharTokenizer, TokenizerConfig

from .conftest import Growth

Tree = Callable[..., Path]
Build = Callable[..., Corpus]


def many_files(count: int = 60) -> dict[str, str]:
    return {
        f"{i % 7}/file {i:03d}.txt": f"This is file {i}.\n\tIt has é and ü.\r\n" * (1 + i % 5) for i in range(count)
    }


def content(directory: Path) -> dict[str, bytes]:
    """Every file but those that hold times, and the checksums of these."""
    timed = {"build.json", "report.html", "checksums.json"}
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name not in timed)
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def quarantine(corpus: Corpus) -> list[dict[str, Any]]:
    lines = (corpus.directory / "quarantine.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def test_tokens_are_the_documents_each_with_its_end(tree: Tree, build: Build) -> None:
    files = many_files()
    corpus = build(tree(files), validation_fraction=0.2)
    tokenizer = corpus.tokenizer()
    seen = {}
    for name, split in (("train", corpus.train), ("validation", corpus.validation)):
        documents = list(corpus.documents(name))  # type: ignore[arg-type]
        assert split.num_documents == len(documents) > 0
        assert split.num_bytes == sum(len(d.text.encode()) for d in documents)
        for number, document in enumerate(documents):
            ids = split.tokens(*split.offsets[number : number + 2]).tolist()
            assert ids == [*tokenizer.encode(document.text), tokenizer.eos_id]
            seen[document.source] = document.text
    assert seen == files


def test_the_split_is_recorded_and_known_by_content(tree: Tree, build: Build) -> None:
    files = many_files()
    corpus = build(tree(files), validation_fraction=0.2, seed=9)
    renamed = build(
        tree({f"x/{i}": t for i, t in enumerate(files.values())}, "renamed"),
        output="b",
        seed=9,
        validation_fraction=0.2,
    )
    assert {d.text for d in corpus.documents("validation")} == {d.text for d in renamed.documents("validation")}
    assert corpus.manifest["split"]["method"] == "document"
    assert (
        "20% of the documents are held out, chosen by their content and the seed 9" in corpus.manifest["split"]["words"]
    )


def test_counts_reconcile_and_every_skip_is_listed(tree: Tree, build: Build) -> None:
    root = tree(
        {
            **{f"{i}.md": f"text {i}" for i in range(30)},
            "copy.md": "text 3",
            "blank.md": " \n\t\n",
            "empty.md": "",
            "photo.raw": b"\x01\x02\x03\0\0binary",
            "latin.txt": "Où êtes-vous né ? À l'été, déjà !\n".encode("latin-1"),
            "text.bin": "text is text whatever its name",
            ".hidden": "x",
            "__pycache__/x.pyc": "x",
            "big.txt": "y" * 5000,
        }
    )
    corpus = build(root, max_file_bytes=4000)
    files, documents = corpus.manifest["files"], corpus.manifest["documents"]
    assert files["found"] == 38
    assert files["read"] == 34
    assert files["skipped"] == {"binary": 1, "empty": 1, "hidden": 1, "oversized": 1}
    assert files["folders_skipped"] == {"ignored": 1}
    assert files["encodings"] == {"cp1252": 1, "utf_8": 33}
    assert documents["in"] == 34
    assert (documents["kept"], documents["removed"], documents["empty"]) == (32, {"exact_duplicates": 1}, 1)
    splits = corpus.manifest["tokens"]["splits"].values()
    assert sum(split["documents"] for split in splits) == 32
    assert sum(split["bytes"] for split in splits) == documents["bytes"]
    assert [(line["file"], line["stage"], line["reason"]) for line in quarantine(corpus)] == [
        (".hidden", "discover", "hidden"),
        ("__pycache__/", "discover", "ignored"),
        ("big.txt", "discover", "oversized"),
        ("empty.md", "discover", "empty"),
        ("photo.raw", "extract", "binary"),
    ]


def test_the_first_of_equal_documents_is_kept(tree: Tree, build: Build) -> None:
    corpus = build(tree({"b.txt": "same\n", "a.txt": "same\n", "c.txt": "other\n"}))
    sources = [d.source for name in ("train", "validation") for d in corpus.documents(name)]  # type: ignore[arg-type]
    assert sources == ["a.txt", "c.txt"]


@pytest.mark.parametrize(
    ("mode", "expected", "empty"),
    [
        ("file", [("a.txt", 0, "one\n\n  two\nthree\n"), ("b.txt", 0, "four\nfive\n")], 0),
        (
            "line",
            [
                ("a.txt", 0, "one"),
                ("a.txt", 2, "  two"),
                ("a.txt", 3, "three"),
                ("b.txt", 0, "four"),
                ("b.txt", 1, "five"),
            ],
            1,
        ),
        ("blank_line", [("a.txt", 0, "one"), ("a.txt", 1, "  two\nthree"), ("b.txt", 0, "four\nfive")], 0),
    ],
)
def test_what_a_document_is(
    tree: Tree, build: Build, mode: str, expected: list[tuple[str, int, str]], empty: int
) -> None:
    root = tree({"a.txt": "one\n\n  two\nthree\n", "b.txt": "four\nfive\n"})
    corpus = build(root, documents=mode, validation_fraction=0)
    assert [(d.source, d.part, d.text) for d in corpus.documents("train")] == expected
    assert corpus.manifest["documents"]["empty"] == empty
    assert corpus.validation.num_tokens == 0


def test_few_documents_are_split_by_a_tail_and_the_manifest_says_so(tree: Tree, build: Build) -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    corpus = build(tree({"book.txt": text}), validation_fraction=0.1)
    (train,), (held_out,) = corpus.documents("train"), corpus.documents("validation")
    assert train.text + held_out.text == text
    assert train.text.endswith("\n") and len(held_out.text) == pytest.approx(0.1 * len(text), abs=8)
    assert corpus.manifest["split"]["method"] == "tail"
    assert corpus.manifest["split"]["cut_documents"] == 1
    assert "fewer than 20 documents (1)" in corpus.manifest["split"]["words"]


class TestSameInputSameBytes:
    def test_whatever_the_number_of_workers_and_the_place(self, tree: Tree, build: Build) -> None:
        files: dict[str, str | bytes] = {
            **many_files(),
            "latin.txt": "Ça va déjà ? L'été\n".encode("latin-1"),
            "x.gz": b"\0",
        }
        first = build(tree(files, "here"), output="a", num_workers=0)
        (first.directory.parent / "elsewhere").mkdir()
        moved = tree(files, "elsewhere/here")
        second = build(moved, output="b", num_workers=2)
        assert content(first.directory) == content(second.directory)
        assert first.fingerprint == second.fingerprint

    def test_with_a_file_that_is_read_in_parts(self, tree: Tree, build: Build) -> None:
        """Compressed files count as slow to read, so that already 1.3 MB of them are cut."""
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as members:
            for number in range(300):
                member = f".hidden/{number}.txt" if number % 50 == 0 else f"{number}.txt"
                members.writestr(member, f"This is member {number}, which says so.\n" * 125)
        root = tree({"a.txt": "One.\n", "members.zip": archive.getvalue(), "z.txt": "Last.\n"})
        first = build(root, output="a", num_workers=0)
        second = build(root, output="b", num_workers=3)
        assert content(first.directory) == content(second.directory)
        files = first.manifest["files"]
        assert (files["found"], files["read"], files["refused_parts"]) == (3, 3, {"hidden": 1})
        documents = [*first.documents("train"), *first.documents("validation")]
        numbers = [number for number in range(300) if number % 50]
        places = [f"member {number}.txt" for number in numbers]
        assert sorted(document.place for document in documents) == sorted(["", *places, ""])

    def test_with_bpe_too(self, tree: Tree, tmp_path: Path) -> None:
        root = tree(many_files(30))
        for output, workers in (("a", 0), ("b", 2)):
            config = DataConfig(paths=(str(root),), num_workers=workers)
            build_corpus(config, TokenizerConfig(vocab_size=290), tmp_path / output, seed=0, console=Console.silent())
        assert content(tmp_path / "a") == content(tmp_path / "b")

    def test_no_time_and_no_absolute_path_is_written(self, tree: Tree, build: Build, tmp_path: Path) -> None:
        corpus = build(tree(many_files()))
        text = (corpus.directory / "manifest.json").read_text()
        assert str(tmp_path) not in text
        assert corpus.manifest["inputs"] == ["input"]

    def test_another_seed_gives_another_split(self, tree: Tree, build: Build) -> None:
        root = tree(many_files())
        first, second = build(root, output="a", seed=1), build(root, output="b", seed=2)
        assert first.fingerprint != second.fingerprint


def test_a_usual_vocabulary_shrinks_with_a_warning_and_an_asked_one_is_refused(tree: Tree, tmp_path: Path) -> None:
    root = tree({f"{name}.md": "\r\n".join(f"{name} {line * line}" for line in range(60)) for name in "abc"})
    said, data = StringIO(), DataConfig(paths=(str(root),))
    rest: dict[str, Any] = {"seed": 0, "console": Console(file=said)}
    with pytest.raises(TokenizerError, match=r"tokenizer\.vocab_size=\d+ or less, or add text\. .*failed/report\.html"):
        build_corpus(data, TokenizerConfig(), tmp_path / "corpus", failed=tmp_path / "failed", **rest)
    assert not (tmp_path / "corpus").exists()
    assert json.loads((tmp_path / "failed" / "report.json").read_text())["files"]["read"] == 3
    assert "The vocabulary is larger than the corpus allows" in (tmp_path / "failed" / "report.html").read_text()
    assert (tmp_path / "failed" / "quarantine.jsonl").read_bytes() == b""
    corpus = build_corpus(
        data, TokenizerConfig(), tmp_path / "corpus", shrinks=True, failed=tmp_path / "failed", **rest
    )
    size = corpus.tokenizer().vocab_size
    assert 260 <= size < 4096 and f"The vocabulary has {size:,} tokens instead of the usual 4,096" in said.getvalue()
    assert not (tmp_path / "failed").exists()


def test_a_folder_without_text_leaves_the_list_of_what_was_left_out(tree: Tree, tmp_path: Path) -> None:
    data = DataConfig(paths=(str(tree({"a.bin": b"\x00\x01\x02" * 99})),))
    with pytest.raises(DataError, match=r"There is no text in .*failed/report\.html shows"):
        build_corpus(data, TokenizerConfig(), tmp_path / "corpus", seed=0, failed=tmp_path / "failed")
    (entry,) = map(json.loads, (tmp_path / "failed" / "quarantine.jsonl").read_text().splitlines())
    assert entry["file"] == "a.bin"
    assert "a.bin" in (tmp_path / "failed" / "report.html").read_text()


def test_the_tokenizer_learns_from_training_text_only(tree: Tree, build: Build) -> None:
    text = "".join(f"line {i}\n" for i in range(50)) + "Ωμέγα\n"
    corpus = build(tree({"a.txt": text}), validation_fraction=0.05)
    assert "Ω" not in corpus.tokenizer().decode(range(corpus.tokenizer().vocab_size))
    assert corpus.manifest["tokens"]["splits"]["validation"]["unknown"] == 5
    assert corpus.manifest["tokens"]["splits"]["train"]["unknown"] == 0


def test_a_given_tokenizer_is_used_and_named(tree: Tree, tmp_path: Path) -> None:
    tokenizer = CharTokenizer("é")
    tokenizer.save(tmp_path / "mine")
    console_text = StringIO()
    corpus = build_corpus(
        DataConfig(paths=(str(tree({"a.txt": "é\nü\n"})),), validation_fraction=0),
        TokenizerConfig(path=str(tmp_path / "mine")),
        tmp_path / "corpus",
        seed=0,
        console=Console(file=console_text),
    )
    assert corpus.manifest["tokenizer"] == {
        "fingerprint": tokenizer.fingerprint(),
        "vocab_size": 129,
        "origin": "given",
    }
    assert corpus.train.tokens(0, 5).tolist() == [128, 10, tokenizer.unk_id, 10, tokenizer.eos_id]
    assert "1 characters of the train split are not in the tokenizer's vocabulary" in console_text.getvalue()


def test_a_tokenizer_that_is_missing_is_found_out_first(tree: Tree, tmp_path: Path) -> None:
    config = DataConfig(paths=(str(tree({"a.txt": "text"})),))
    with pytest.raises(TokenizerError):
        build_corpus(config, TokenizerConfig(path=str(tmp_path / "none")), tmp_path / "corpus", seed=0)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS file systems refuse names that are not UTF-8")
def test_odd_names_go_through_every_file_that_is_written(tree: Tree, build: Build) -> None:
    root = tree({"two\nlines.txt": "first\n", "plain.txt": "second\n"})
    for name, data in ((b"caf\xe9.txt", b"third\n"), (b"caf\xe9.bin", b"\0")):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(data)
    corpus = build(root, num_workers=1)
    sources = {d.source for name in ("train", "validation") for d in corpus.documents(name)}  # type: ignore[arg-type]
    assert sources == {"two\nlines.txt", "plain.txt", "caf\\xe9.txt"}
    assert [line["file"] for line in quarantine(corpus)] == ["caf\\xe9.bin"]


class TestNothingToUse:
    def test_no_paths(self, build: Build) -> None:
        with pytest.raises(DataError, match=r"Set data.paths"):
            build()

    def test_missing_folder(self, build: Build, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"nowhere does not exist"):
            build(tmp_path / "nowhere")

    def test_empty_folder(self, build: Build, tree: Tree) -> None:
        with pytest.raises(DataError, match=r"There is no text in .*: 0 files found, 0 read\."):
            build(tree({}))

    def test_nothing_readable_lists_the_reasons(self, build: Build, tree: Tree, tmp_path: Path) -> None:
        root = tree({"a": b"\0", "b": b"\0\1", "c": "", ".d": "x", "e": "  ", "node_modules/f": "x"})
        with pytest.raises(DataError) as caught:
            build(root)
        assert (
            "5 files found, 1 read; files left out: binary 2, empty 1, hidden 1; folders left out: ignored 1, "
            "1 empty document"
        ) in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["input"], "a failed build leaves nothing behind"

    def test_a_single_line_cannot_be_split(self, build: Build, tree: Tree, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"validation_fraction=0"):
            build(tree({"a.txt": "one line"}))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["input"]


class TestOutputInTheWay:
    def test_an_existing_directory_is_kept(self, build: Build, tree: Tree, tmp_path: Path) -> None:
        root = tree({"a.txt": "1\n2\n"})
        (tmp_path / "corpus").mkdir()
        (tmp_path / "corpus/mine.txt").write_text("precious")
        for overwrite in (False, True):
            with pytest.raises(OutputError, match=r"already exists and is not a corpus"):
                build(root, overwrite=overwrite)
        assert (tmp_path / "corpus/mine.txt").read_text() == "precious"

    def test_an_empty_directory_is_filled(self, build: Build, tree: Tree, tmp_path: Path) -> None:
        (tmp_path / "corpus").mkdir()
        assert build(tree({"a.txt": "1\n2\n"})).train.num_tokens > 0

    def test_a_corpus_is_replaced_when_asked(self, build: Build, tree: Tree) -> None:
        root = tree({"a.txt": "1\n2\n"})
        build(root)
        (root / "b.txt").write_text("3\n4\n")
        with pytest.raises(DataError, match="was built from different input, with different settings"):
            build(root)
        assert build(root, overwrite=True).manifest["files"]["read"] == 2

    def test_a_corpus_of_the_same_input_and_settings_is_recognised(self, build: Build, tree: Tree) -> None:
        root = tree({"a.txt": "1\n2\n"})
        first = build(root)
        age = (first.directory / "manifest.json").stat().st_mtime_ns
        assert build(root, num_workers=2).fingerprint == first.fingerprint
        assert (first.directory / "manifest.json").stat().st_mtime_ns == age
        with pytest.raises(DataError, match="Replace it with --overwrite"):
            build(root, seed=2)
        assert sorted(path.name for path in root.parent.iterdir()) == ["corpus", "input"]

    def test_an_evaluation_set_is_recorded_and_known_by_its_content(
        self, build: Build, tree: Tree, tmp_path: Path
    ) -> None:
        question = "How many sheep graze on the meadow behind the mill when the last wagon comes home"
        evaluation = tmp_path / "questions.jsonl"
        lines = [json.dumps({"question": text}) for text in (question, "Too short to be looked for.")]
        evaluation.write_text("\n".join(lines))
        root = tree({"a.txt": "Nothing of it.\n", "b.txt": "Something else.\n", "c.txt": f"Asked: {question}?\n"})
        clean = {"stages": ["decontamination"], "decontamination": {"paths": [str(evaluation)]}}
        first = build(root, clean=clean)
        assert first.manifest["documents"]["removed"] == {"decontamination": 1}
        assert first.manifest["evaluation_sets"] == [
            {
                "path": str(evaluation),
                "sha256": hashlib.sha256(evaluation.read_bytes()).hexdigest(),
                "texts": 1,
                "too_short": 1,
            }
        ]
        os.utime(evaluation, (1, 1))
        assert build(root, clean=clean).fingerprint == first.fingerprint
        evaluation.write_text(lines[1])
        with pytest.raises(DataError, match="Replace it with --overwrite"):
            build(root, clean=clean)

    def test_a_corpus_is_not_text(self, build: Build, tree: Tree) -> None:
        root = tree({"a.txt": "1\n2\n", "b.txt": "3\n"})
        inside = build(root, output="input/corpus")
        with pytest.raises(DataError, match="is already a finished corpus"):
            build(inside.directory, output="again")
        again = build(root, output="again")
        assert [(line["file"], line["reason"]) for line in quarantine(again)] == [("corpus/", "corpus")]
        assert again.fingerprint == inside.fingerprint


def test_the_report_shows_formats_and_files_with_little_text(tree: Tree, build: Build) -> None:
    page = f"<html><body><p>Little text.</p><script>{'x' * 20_000}</script></body></html>"
    corpus = build(tree({"a.txt": "one\n" * 2000, "b.TXT": "two\n", "page.html": page, "none": "three\n"}))
    report = json.loads((corpus.directory / "report.json").read_text())
    assert report["formats"] == {
        "": {"files": 1, "bytes": 6, "text_bytes": 6},
        ".html": {"files": 1, "bytes": len(page), "text_bytes": 12},
        ".txt": {"files": 2, "bytes": 8004, "text_bytes": 8004},
    }
    assert [(found["file"], found["text_bytes"]) for found in report["little_text"]] == [("page.html", 12)]


def test_the_last_message_names_the_commonest_reasons_with_examples(tree: Tree, tmp_path: Path) -> None:
    console_text = StringIO()
    files: dict[str, str | bytes] = {f"{name}.gz": b"\x1f\x8bno" for name in "abc"} | {
        ".x": "x",
        ".y": "y",
        "e": "",
        "t.txt": "t",
    }
    files |= {"rows.jsonl": '{"text": "some words"}\n{\n'}
    build_corpus(
        DataConfig(paths=(str(tree(files)),)),
        TokenizerConfig(algorithm="char"),
        tmp_path / "corpus",
        seed=0,
        console=Console(file=console_text),
    )
    expected = "Left out most often: damaged 3 (such as a.gz); hidden 2 (such as .x); "
    assert expected in console_text.getvalue()
    assert console_text.getvalue().count("such as") == 3


def test_the_last_message_names_the_extras_that_would_read_what_was_left_out(tmp_path: Path) -> None:
    details = {
        "a.pdf": ("not_installed", "pypdfium2 is not installed: install sheepop[data]"),
        "b.png": ("not_installed", "rapidocr is not installed: install sheepop[ocr]"),
        "c.pdf": ("not_installed", "it shows a picture; to read pictures, install sheepop[ocr]"),
        "d.txt": ("damaged", "it says: install sheepop[everything]"),
    }
    lines = [{"file": name, "reason": reason, "detail": detail} for name, (reason, detail) in details.items()]
    (tmp_path / "quarantine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert left_out_in_words(tmp_path / "quarantine.jsonl") == (
        " Left out most often: not_installed 3 (such as a.pdf); damaged 1 (such as d.txt)."
        ' To read more: pip install "sheepop[data,ocr]".'
    )


def test_one_console_line_says_what_was_made(tree: Tree, tmp_path: Path) -> None:
    console_text = StringIO()
    build_corpus(
        DataConfig(paths=(str(tree({"a.txt": "one\ntwo\n", "b": b"\0"})),)),
        TokenizerConfig(algorithm="char"),
        tmp_path / "corpus",
        seed=0,
        console=Console(file=console_text),
    )
    assert (
        "Corpus: 2 files found, 1 read, 1 left out. 1 document, 1 kept. 5 training and 5 validation tokens."
    ) in console_text.getvalue()


def test_replaced_personal_data_and_keys_are_counted_with_switches_that_can_be_typed(
    tree: Tree, tmp_path: Path
) -> None:
    key = "AKIA" + "IOSFODNN7" + "EXAMPLE"  # in parts, so that no scanner takes this file for a leak
    path = str(tree({"a.txt": f"Ask ann@wool.org or bob@wool.org, who have the key {key}.\n"}))
    texts = []
    for number in range(2):
        console_text = StringIO()
        switches = shlex.split(" ".join(re.findall(r"'data\.clean\S+'", texts[0]))) if texts else []
        config = load_config(
            overrides=(f"data.paths=[{path}]", "data.validation_fraction=0", "tokenizer.algorithm=char", *switches)
        )
        output = tmp_path / str(number)
        build_corpus(config.data, config.tokenizer, output, seed=0, console=Console(file=console_text))
        texts.append(console_text.getvalue())
    assert "Personal data in 1 document became placeholders (email 2); 'data.clean.pii.kinds=[]' leaves" in texts[0]
    assert "Keys and passwords in 1 document became placeholders (" in texts[0]
    assert "'data.clean.stages=[formatting,language,quality,toxicity,pii," in texts[0]
    assert "Corpus: 1 file found" in texts[1] and "placeholders" not in texts[1]


def number_of_tokens(folder: str) -> int:
    output, tokenizer = Path(f"{folder} corpus"), TokenizerConfig(path=str(Path(folder).parent / "tokenizer"))
    corpus = build_corpus(DataConfig(paths=(folder,)), tokenizer, output, seed=0, console=Console.silent())
    return corpus.train.num_tokens + corpus.validation.num_tokens


def test_memory_does_not_grow_with_the_corpus(growth: Growth, tmp_path: Path) -> None:
    """The largest memory after a corpus of 3.4 megabytes and after one of 28."""
    spelled = str.maketrans("0123456789", "abcdefghij")
    for name, count in (("small", 4), ("large", 32)):
        (tmp_path / name).mkdir()
        for i in range(count):
            text = "".join(f"{i} {line:07d} some words\n" for line in range(40_000)).translate(spelled)
            (tmp_path / name / f"{i:03d}.txt").write_text(text)
    CharTokenizer().save(tmp_path / "tokenizer")
    tokens, grown = growth(number_of_tokens, tmp_path / "small", tmp_path / "large")
    assert tokens == 32 + sum(path.stat().st_size for path in (tmp_path / "large").iterdir()) > 25_000_000
    assert grown < 16_000_000


def test_a_config_error_is_raised_before_anything_is_read() -> None:
    with pytest.raises((ConfigError, ValueError)):
        DataConfig.model_validate({"paths": ["x"], "validation_fraction": 1})


def test_the_page_names_every_input_that_was_left_out(tree: Tree, build: Build) -> None:
    from sheepop.report.page import escaped

    files: dict[str, str | bytes] = {f"{n}.txt": f"Sheep number {n} is here.\n" for n in range(3)}
    files |= {f"scan & {n}.bin": bytes(range(256)) for n in range(40)} | {"empty.md": "", "broken.pdf": b"%PDF-1.4 no"}
    corpus = build(tree(files))
    page = (corpus.directory / "report.html").read_text()
    (rows,) = (json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page))
    assert sorted(file for file, *_ in rows) == sorted(files.keys() - {f"{n}.txt" for n in range(3)})
    assert {why for _, _, why, _ in rows} == {"binary", "empty", "damaged"}
    assert len(page) < 100_000, "no part of plotly"
    opening = page[: page.index("<dl>")]
    assert escaped("45 files found, 3 read, 42 left out") in opening
