"""The weights of any model directory, ours or another program's: one safetensors file, or shards with an index."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from sheepop.checkpoint.lazy_tensor import LazyTensor, total_bytes
from sheepop.checkpoint.safetensors_file import open_safetensors, safetensors_content, write_safetensors
from sheepop.checkpoint.source_directory import read_table, refuse_pickles, source_file
from sheepop.core.errors import CheckpointError, first_few
from sheepop.core.files import write_json

_METADATA = {"format": "pt"}  # required by transformers
STEM = "model"
MAX_SHARD_BYTES = 5 * 10**9
"""The default limit of a weight file."""
WEIGHTS, INDEX = f"{STEM}.safetensors", f"{STEM}.safetensors.index.json"


@dataclass(frozen=True)
class Part:
    """One of the `count` files that hold a set of tensors; `number` counts from 0."""

    number: int = 0
    count: int = 1

    def file(self, stem: str) -> str:
        """Returns its name: `stem` alone, with the part's number and count if there are several files."""
        if self.count == 1:
            return f"{stem}.safetensors"
        return f"{stem}-{self.number + 1:05}-of-{self.count:05}.safetensors"


WHOLE = Part()


def open_weights(directory: Path) -> dict[str, LazyTensor]:
    """Returns all tensors of the directory by name, without reading their values.

    Raises `CheckpointError` if there are none, if index and shards contradict each other, or for a damaged file.
    """
    single, index = source_file(directory, WEIGHTS), read_table(directory, INDEX)
    if single is not None and index is not None:
        raise CheckpointError(
            f"{directory} contains both {WEIGHTS} and {INDEX}. Remove the one that does not belong there."
        )
    if single is not None:
        return open_safetensors(single)
    if index is None:
        refuse_pickles(directory)
        others = sorted(path.name for path in directory.glob("*.safetensors"))
        hint = f" It has {others[0]}, but no index that lists the model's files." if others else ""
        raise CheckpointError(
            f"{directory} has neither {WEIGHTS} nor {INDEX}.{hint} Give the directory of a complete model."
        )
    return _open_shards(directory, index)


def read_all_weights(directory: Path) -> dict[str, Tensor]:
    """Returns all tensors of the directory, memory-mapped; raises `CheckpointError` like `open_weights`."""
    return {name: tensor.read() for name, tensor in open_weights(directory).items()}


def write_weights(directory: Path, tensors: Mapping[str, LazyTensor], max_shard_bytes: int) -> None:
    """Writes `tensors`, one in memory at a time, to one file, or above `max_shard_bytes` to several with an index."""
    shards = _named_shards(tensors, max_shard_bytes)
    for name, shard in shards.items():
        write_safetensors(directory / name, shard)
    if len(shards) > 1:
        places = {name: file for file, shard in shards.items() for name in shard}
        write_index(directory, places, total_bytes(tensors))


def weight_checksums(tensors: Mapping[str, LazyTensor], max_shard_bytes: int) -> dict[str, str]:
    """Returns the hexadecimal SHA-256 of each file that `write_weights` would write, without writing it."""
    found = {}
    for name, shard in _named_shards(tensors, max_shard_bytes).items():
        digest = hashlib.sha256()
        for part in safetensors_content(shard):
            digest.update(part)
        found[name] = digest.hexdigest()
    return found


def _named_shards(tensors: Mapping[str, LazyTensor], max_shard_bytes: int) -> dict[str, dict[str, LazyTensor]]:
    shards = list(_shards(tensors, max_shard_bytes))
    return {Part(number, len(shards)).file(STEM): shard for number, shard in enumerate(shards)}


def write_part(directory: Path, stem: str, tensors: Mapping[str, Tensor], part: Part) -> None:
    """Writes one part of a set of tensors that are in memory."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / part.file(stem), _METADATA)


def write_index(directory: Path, places: Mapping[str, str], num_bytes: int) -> None:
    """Writes the index, which names the file of each tensor."""
    write_json(directory / INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": dict(places)})


def listed(problems: list[str], most: int = 20) -> str:
    """Joins the first `most` problems, and adds the number of the others."""
    return first_few(problems, most, separator="; ")


def _open_shards(directory: Path, index: dict[str, object]) -> dict[str, LazyTensor]:
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(
            f"{directory / INDEX} is damaged: its weight_map does not map tensors to files. Copy or download it again."
        )
    tensors: dict[str, LazyTensor] = {}
    problems: list[str] = []
    for shard in sorted(set(places.values())):
        path = source_file(directory, shard)
        if path is None:
            raise CheckpointError(f"{directory / shard}, which {INDEX} lists, is missing. Download it too.")
        found = open_safetensors(path)
        indexed = {name for name, place in places.items() if place == shard}
        problems += [f"{name} is not in {shard}" for name in sorted(indexed - found.keys())]
        problems += [f"{name} in {shard} is not in the index" for name in sorted(found.keys() - indexed)]
        tensors.update(found)
    if problems:
        raise CheckpointError(
            f"{directory / INDEX} does not match its files: {listed(problems)}. Copy or download all of them again."
        )
    return tensors


def _shards(tensors: Mapping[str, LazyTensor], max_shard_bytes: int) -> Iterator[dict[str, LazyTensor]]:
    """Yields shards of at most `max_shard_bytes`, in the order of the tensors; a larger tensor gets its own shard."""
    shard: dict[str, LazyTensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.num_bytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.num_bytes
    yield shard
