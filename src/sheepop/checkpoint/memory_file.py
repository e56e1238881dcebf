"""The memory of a corpus in a model directory: ``memory.safetensors``, beside the weights of its model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sheepop.checkpoint.model_card import only_writer
from sheepop.core.errors import CheckpointError
from sheepop.core.files import CHECKSUMS, atomic_file, read_json, sha256_file, write_json
from sheepop.model.corpus_index import LONGEST, CorpusIndex
from sheepop.model.corpus_memory import CorpusMemory

MEMORY = "memory.safetensors"
FORMAT_VERSION = 2  # of version 1, the gate saw nothing of the row
# The one key of the metadata, with the version: of several keys, safetensors writes no fixed order.
_FORMAT = "sheepop-corpus-memory"
_FOLLOWING, _LONGEST, _ROW = "following", "longest", "row_length"
_SMALL = 2**16  # tokens below this are stored in 16 bits


def write_memory(directory: Path, memory: CorpusMemory) -> None:
    """Adds a memory to a finished model directory, or replaces the one there; readers see it when it is complete.

    Tokens are stored in 16 bits if the largest one fits, else in 32.
    """
    tokens = memory.index.following.cpu()
    stored = tokens.to(torch.uint16) if int(tokens.max()) < _SMALL else tokens.to(torch.int32)
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in memory.gate.state_dict(prefix="gate.").items()
    }
    numbers = {_LONGEST: memory.index.longest, _ROW: memory.row_length}
    tensors |= {_FOLLOWING: stored, **{name: torch.tensor([number]) for name, number in numbers.items()}}
    with only_writer(directory):
        with atomic_file(directory / MEMORY, replace=True) as place:
            save_file(tensors, place, metadata={_FORMAT: str(FORMAT_VERSION)})
        sums = {**read_json(directory / CHECKSUMS), MEMORY: sha256_file(directory / MEMORY)}
        write_json(directory / CHECKSUMS, sums)


def has_memory(directory: Path) -> bool:
    """Whether a model directory has a complete memory."""
    return (directory / MEMORY).is_file() and MEMORY in read_json(directory / CHECKSUMS)


def read_memory(directory: Path, vocabulary: int) -> CorpusMemory | None:
    """The memory in a model directory whose checksums were verified; None if it has none.

    Raises `CheckpointError` for a file of a newer or another format, and for one that does not fit `vocabulary`.
    """
    if not has_memory(directory):
        return None
    path = directory / MEMORY
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    version = about.get(_FORMAT, "")
    if not version.isdecimal():
        raise CheckpointError(f"{path} is not the memory of a corpus.")
    if int(version) > FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {version}; this SheepOp reads up to {FORMAT_VERSION}. Install a newer SheepOp."
        )
    following, numbers = tensors.pop(_FOLLOWING, None), [tensors.pop(name, None) for name in (_LONGEST, _ROW)]
    longest, row_length = (int(each) if each is not None and each.numel() == 1 else 0 for each in numbers)
    if not 1 <= longest <= LONGEST or row_length < 0 or not _are_tokens(following, vocabulary):
        raise CheckpointError(
            f"{path} is damaged: it does not list tokens of the model's vocabulary of {vocabulary:,}."
        )
    assert following is not None
    memory = CorpusMemory(CorpusIndex(following.to(torch.int32), longest), row_length)
    gate = {name.removeprefix("gate."): tensor for name, tensor in tensors.items()}
    expected = {name: tensor.shape for name, tensor in memory.gate.state_dict().items()}
    if {name: tensor.shape for name, tensor in gate.items()} != expected:
        raise CheckpointError(f"{path} is damaged: its gate does not have the expected weights.")
    memory.gate.load_state_dict(gate)
    return memory.eval().requires_grad_(False)


def _are_tokens(following: Tensor | None, vocabulary: int) -> bool:
    if (
        following is None
        or following.ndim != 1
        or following.dtype not in (torch.uint16, torch.int32)
        or not len(following)
    ):
        return False
    numbers = following.long()
    return int(numbers.min()) >= 0 and int(numbers.max()) < vocabulary
