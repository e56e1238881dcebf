"""A memory comes back from a model directory exactly, and one that cannot be used is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sheepop.checkpoint import load_model, save_model
from sheepop.checkpoint.memory_file import MEMORY, write_memory
from sheepop.checkpoint.model_card import record_scores
from sheepop.core.errors import CheckpointError
from sheepop.core.files import CHECKSUMS, read_json, write_checksums, write_json
from sheepop.model import ModelConfig, build_model
from sheepop.model.corpus_index import CorpusIndex
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.tokenizer import CharTokenizer

SIZES: dict[str, Any] = {"d_model": 16, "num_layers": 1, "num_heads": 2}


def made_memory(vocab_size: int = 128, row_length: int = 5) -> CorpusMemory:
    tokens = torch.randint(0, vocab_size, (200,), generator=torch.Generator().manual_seed(0))
    tokens[0] = vocab_size - 1
    torch.manual_seed(0)
    return CorpusMemory(CorpusIndex.build(tokens.to(torch.int32), vocab_size, 7), row_length)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A finished model directory with a memory."""
    save_model(tmp_path / "m", build_model(ModelConfig(vocab_size=128, **SIZES), seed=1), CharTokenizer(), {})
    write_memory(tmp_path / "m", made_memory())
    return tmp_path / "m"


@pytest.mark.parametrize("vocab_size", [128, 70_000])  # the tokens of the second need more than 16 bits
def test_a_memory_comes_back_as_it_was(tmp_path: Path, vocab_size: int) -> None:
    model, memory = build_model(ModelConfig(vocab_size=vocab_size, **SIZES), seed=1), made_memory(vocab_size)
    save_model(tmp_path / "m", model, CharTokenizer(), {})
    assert load_model(tmp_path / "m").memory is None
    write_memory(tmp_path / "m", memory)
    found = load_model(tmp_path / "m").memory
    assert found is not None
    assert (found.index.longest, found.row_length) == (7, 5)
    for name, tensor in memory.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    rows = torch.randint(0, vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    depths = torch.arange(1, 10).expand(2, 9)
    for one, other in zip(memory.recall(rows, depths), found.recall(rows, depths), strict=True):
        assert torch.equal(one, other)


def test_a_memory_of_version_1_sees_nothing_of_the_row(place: Path) -> None:
    old = made_memory(row_length=0)
    write_memory(place, old)
    tensors = load_file(place / MEMORY)
    del tensors["row_length"]
    save_file(tensors, place / MEMORY, metadata={"sheepop-corpus-memory": "1"})
    write_checksums(place)
    found = load_model(place).memory
    assert found is not None and found.row_length == 0
    rows, depths = torch.randint(0, 128, (2, 9)), torch.arange(1, 10).expand(2, 9)
    for one, other in zip(old.recall(rows, depths), found.recall(rows, depths), strict=True):
        assert torch.equal(one, other)


def test_writing_again_replaces_it_and_recording_scores_keeps_it(place: Path) -> None:
    first = (place / MEMORY).read_bytes()
    write_memory(place, made_memory())
    assert (place / MEMORY).read_bytes() == first
    record_scores(place, [{"kind": "k", "name": "n", "measure": "m", "value": 1.0}])
    assert load_model(place).memory is not None


def test_a_damaged_memory_is_named(place: Path) -> None:
    content = bytearray((place / MEMORY).read_bytes())
    content[-1] ^= 1
    (place / MEMORY).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"memory\.safetensors is damaged: its checksum differs"):
        load_model(place)


def test_a_memory_that_was_never_finished_is_none(place: Path) -> None:
    """A kill between the file and its checksum leaves a file that nothing vouches for."""
    sums = read_json(place / CHECKSUMS)
    del sums[MEMORY]
    write_json(place / CHECKSUMS, sums)
    assert load_model(place).memory is None


def altered(tensors: dict[str, torch.Tensor], about: dict[str, str], change: str) -> None:
    if change == "newer":
        about["sheepop-corpus-memory"] = "3"
    elif change == "foreign":
        about.clear()
    elif change == "too long":
        tensors["longest"] = torch.tensor([65])
    elif change == "other tokens":
        tensors["following"][3] = 128
    elif change == "negative":
        tensors["following"] = tensors["following"].to(torch.int32)
        tensors["following"][3] = -1
    elif change == "no tokens":
        del tensors["following"]
    else:
        tensors["gate.0.weight"] = tensors["gate.0.weight"][:, 1:].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("newer", "format version 3; this SheepOp reads up to 2. Install a newer SheepOp"),
        ("foreign", "is not the memory of a corpus"),
        ("too long", "does not list tokens of the model's vocabulary of 128"),
        ("other tokens", "does not list tokens of the model's vocabulary of 128"),
        ("negative", "does not list tokens of the model's vocabulary of 128"),
        ("no tokens", "does not list tokens of the model's vocabulary of 128"),
        ("other gate", "its gate does not have the expected weights"),
    ],
)
def test_a_memory_that_does_not_fit_is_refused(place: Path, change: str, message: str) -> None:
    with safe_open(place / MEMORY, "pt") as file:
        about = dict(file.metadata())
    tensors = load_file(place / MEMORY)
    altered(tensors, about, change)
    save_file(tensors, place / MEMORY, metadata=about)
    write_checksums(place)
    with pytest.raises(CheckpointError, match=message):
        _ = load_model(place).memory
