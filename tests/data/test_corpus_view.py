"""What became of a file, and how two builds differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from sheepop.core.console import Console
from sheepop.core.errors import DataError
from sheepop.data import Corpus, DataConfig, build_corpus
from sheepop.data.corpus_view import difference, file_record
from sheepop.tokenizer import TokenizerConfig

FILES = {
    "a.txt": "The first file says that it rains.\n",
    "copy.txt": "The first file says that it rains.\n",
    "mail.txt": "Write to ann@wool.org about it.\n",
    "rows.jsonl": '{"text": "a row of words"}\nbroken\n{"text": "another row of words"}\n',
}


def built(folder: Path, output: Path) -> Corpus:
    clean = {"stages": ["pii", "exact_duplicates"]}
    config = DataConfig.model_validate({"paths": [str(folder)], "clean": clean, "validation_fraction": 0})
    return build_corpus(config, TokenizerConfig(algorithm="char"), output, seed=0, console=Console.silent())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for name, text in FILES.items():
        (tmp_path / "in" / name).write_text(text)
    return tmp_path / "in"


def test_what_became_of_a_file_is_shown_by_its_name(folder: Path, tmp_path: Path) -> None:
    corpus = built(folder, tmp_path / "corpus")
    rows = file_record(corpus, "rows.jsonl")
    assert [(record["place"], record["what"], record.get("text")) for record in rows] == [
        ("line 1", "kept in train", "a row of words"),
        ("line 2", "left out", None),
        ("line 3", "kept in train", "another row of words"),
    ]
    (removed,) = file_record(corpus, "copy.txt")
    assert (removed["what"], removed["detail"]) == (
        "removed by exact_duplicates",
        "exact copy: an equal document: a.txt",
    )
    with pytest.raises(DataError, match=r"nothing of a file 'row.jsonl'. Did you mean rows.jsonl"):
        file_record(corpus, "row.jsonl")


def test_a_path_is_read_again_stage_by_stage(folder: Path, tmp_path: Path) -> None:
    corpus = built(folder, tmp_path / "corpus")
    kept, read, changed = file_record(corpus, str(folder / "mail.txt"))
    assert kept["text"] == changed["text"] != read["text"] == FILES["mail.txt"]
    assert (read["what"], changed["what"]) == ("read now", "pii changes it")


def test_two_builds_are_compared_document_by_document(folder: Path, tmp_path: Path) -> None:
    old = built(folder, tmp_path / "old")
    (folder / "a.txt").write_text("The first file says that the sun shines.\n")
    (folder / "mail.txt").unlink()
    (folder / "new.txt").write_text("New.\n")
    new = built(folder, tmp_path / "new")
    # The text that a.txt had is now that of its copy, which is no copy any more.
    assert difference(old, new) == {
        "counts": {"kept": 3, "changed": 0, "lost": 1, "new": 2},
        "examples": {"changed": [], "lost": ["mail.txt"], "new": ["copy.txt", "new.txt"]},
    }
    (folder / "copy.txt").write_text("Something else.\n")
    (folder / "rows.jsonl").write_text(FILES["rows.jsonl"].replace("another", "some other"))
    third = built(folder, tmp_path / "third")
    assert difference(new, third)["counts"] == {"kept": 3, "changed": 2, "lost": 0, "new": 0}
    assert difference(new, third)["examples"]["changed"] == ["copy.txt", "rows.jsonl, line 3"]
