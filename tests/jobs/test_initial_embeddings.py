"""A new network that begins with vectors of words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.core.config import validate
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.task.corpus import set_initial_embeddings, words_of
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import Tokenizer, TokenizerConfig, train_tokenizer

from ..running import train

TEXT = "Sheep number {} jumps over the fence, and the sheep of the farm jump again in the morning, unlike dogs.\n"
VECTORS = {"the": 1.0, "fence": 2.0, "Sheep": 3.0, "unheard": 4.0, "ump": 5.0}


def tokenizer(algorithm: str, size: int) -> Tokenizer:
    return train_tokenizer(TokenizerConfig(algorithm=algorithm, vocab_size=size), [TEXT * 9], console=Console.silent())


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    path = tmp_path / "vectors.txt"
    path.write_text("".join(f"{word} " + " ".join([str(value)] * 16) + "\n" for word, value in VECTORS.items()))
    return path


@pytest.mark.parametrize(("algorithm", "size"), [("bpe", 300), ("wordpiece", 195), ("unigram", 370)])
def test_a_word_is_a_token_where_its_text_alone_is_one(algorithm: str, size: int):
    ours = tokenizer(algorithm, size)
    found = words_of(ours)
    for word, ids in found.items():
        texts = {ours.token_bytes(token_id) for token_id in ids}
        assert texts <= {word, b" " + word}
        assert all(ours.encode(text.decode()) == [i] for i in ids if (text := ours.token_bytes(i)) != b" " + word)
    single = [token_id for ids in found.values() for token_id in ids]
    assert len(single) == len(set(single)) and not set(single) & {0, 1, 2, 3}
    assert b"the" in found and b"unheard" not in found
    if algorithm == "wordpiece":  # a piece inside words is not the word of these letters
        inside = [i for i in range(ours.vocab_size) if (text := ours.token_bytes(i)) and not text.startswith(b" ")]
        assert not set(single) & {i for i in inside if ours.encode(ours.token_bytes(i).decode()) != [i]}


def test_tokens_that_are_words_begin_with_their_vectors_and_the_others_as_they_were(vectors: Path):
    ours = tokenizer("bpe", 300)
    config = ModelConfig(vocab_size=ours.vocab_size, d_model=16, num_layers=1, num_heads=2, max_seq_len=32)
    model, before = build_model(config, 0), build_model(config, 0).embedding.weight
    set_initial_embeddings(model, ours, vectors, Console.silent())
    expected = before.detach().clone()
    for word, value in VECTORS.items():
        for text in (word, f" {word}"):
            if len(ids := ours.encode(text)) == 1:
                expected[ids[0]] = value
    assert not torch.equal(expected, before)
    assert torch.equal(model.embedding.weight, expected)


def test_words_that_are_there_twice_are_counted(vectors: Path, capsys: pytest.CaptureFixture[str]):
    ours = tokenizer("bpe", 300)
    config = ModelConfig(vocab_size=ours.vocab_size, d_model=16, num_layers=1, num_heads=2, max_seq_len=32)
    first = build_model(config, 0)
    set_initial_embeddings(first, ours, vectors, Console.silent())
    with vectors.open("a") as file:
        file.write("the " + " ".join(["7"] * 16) + "\n" + "unheard " + " ".join(["7"] * 16) + "\n")
    again = build_model(config, 0)
    set_initial_embeddings(again, ours, vectors, Console())
    assert torch.equal(again.embedding.weight, first.embedding.weight)
    assert "has 1 further vector for words it already had; the first vector" in capsys.readouterr().err


def run_config(notes: Path, output: Path, path: Path, *, d_model: int = 16, **training: Any) -> SheepOpConfig:
    tree = {
        "data": {"paths": [str(notes)], "validation_fraction": 0.0},
        "tokenizer": {"algorithm": "unigram", "vocab_size": 365},
        "model": {"d_model": d_model, "num_layers": 1, "num_heads": 2, "max_seq_len": 32},
        "training": {
            "max_steps": 1,
            "global_batch_size": 2,
            "precision": "fp32",
            "warmup_steps": 0,
            "sinks": [],
            "initial_embeddings": str(path),
            **training,
        },
        "device": "cpu",
        "output_dir": str(output),
    }
    return validate(SheepOpConfig, tree)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number:02}.txt").write_text(TEXT.format(number) * 3)
    return folder


def test_a_run_begins_with_them_and_goes_on_without_the_file(notes: Path, vectors: Path, tmp_path: Path):
    train(run_config(notes, tmp_path / "run", vectors))
    run = RunDirectory(tmp_path / "run")
    first = load_model(run.checkpoint(0))
    ids = words_of(first.tokenizer)
    known = [(token_id, value) for word, value in VECTORS.items() for token_id in ids.get(word.encode(), [])]
    assert known
    for token_id, value in known:
        assert torch.equal(first.model.embedding.weight[token_id], torch.full((16,), value))
    vectors.unlink()
    train(run_config(notes, tmp_path / "run", vectors, max_steps=2), resume=True)
    assert run.steps()[-1] == 2


def test_a_size_that_does_not_fit_and_a_missing_file_are_refused_before_a_step(
    notes: Path, vectors: Path, tmp_path: Path
):
    with pytest.raises(ConfigError, match=r"have 16 numbers, but the model's have 32 .* Set model\.d_model=16"):
        train(run_config(notes, tmp_path / "run", vectors, d_model=32))
    with pytest.raises(DataError, match="absent cannot be read"):
        train(run_config(notes, tmp_path / "run", tmp_path / "absent"))
    assert not (tmp_path / "run").exists()


def test_vectors_of_no_token_and_a_fork_are_refused(notes: Path, vectors: Path, tmp_path: Path):
    other = tmp_path / "other.txt"
    other.write_text("xyzzy" + " 1.0" * 16 + "\n")
    with pytest.raises(ConfigError, match=r"other\.txt has 1 word, none of which is a token"):
        train(run_config(notes, tmp_path / "run", other))
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is for a new network, but the weights of .*parent already have embeddings"):
        train(run_config(notes, tmp_path / "fork", vectors), fork=parent)


def test_a_run_that_was_killed_before_it_had_saved_them_begins_with_them_again(
    notes: Path, vectors: Path, tmp_path: Path
):
    train(run_config(notes, tmp_path / "run", vectors))
    run = RunDirectory(tmp_path / "run")
    before = load_model(run.checkpoint(1)).model.embedding.weight
    shutil.rmtree(run.checkpoints)
    train(run_config(notes, tmp_path / "run", vectors), resume=True)
    assert torch.equal(load_model(run.checkpoint(1)).model.embedding.weight, before)
