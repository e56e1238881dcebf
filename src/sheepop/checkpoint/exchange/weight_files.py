"""The weights of a foreign directory: one safetensors file, or shards with an index."""

from __future__ import annotations

from pathlib import Path

from sheepop.checkpoint.exchange.source_directory import INDEX, WEIGHTS, read_table, refuse_pickles, source_file
from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.safetensors_file import open_safetensors
from sheepop.core.errors import CheckpointError


def open_weights(directory: Path) -> dict[str, LazyTensor]:
    """Every tensor of the directory under its name there, unread.

    Raises `CheckpointError` when there are none, when index and shards contradict each other, or for a damaged file.
    """
    single, index = source_file(directory, WEIGHTS), read_table(directory, INDEX)
    if single is not None and index is not None:
        raise CheckpointError(f"{directory} holds both {WEIGHTS} and {INDEX}. Remove the one that is not meant.")
    if single is not None:
        return open_safetensors(single)
    if index is None:
        refuse_pickles(directory)
        others = sorted(path.name for path in directory.glob("*.safetensors"))
        beside = f" It holds {others[0]}, but no index that would say what belongs to the model." if others else ""
        raise CheckpointError(f"{directory} holds no {WEIGHTS} and no {INDEX}.{beside}")
    return _open_shards(directory, index)


def _open_shards(directory: Path, index: dict[str, object]) -> dict[str, LazyTensor]:
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(
            f"{directory / INDEX} is damaged: its weight_map does not say which tensor is in which file."
        )
    tensors: dict[str, LazyTensor] = {}
    problems: list[str] = []
    for shard in sorted(set(places.values())):
        path = source_file(directory, shard)
        if path is None:
            raise CheckpointError(f"{directory / shard} is missing, which {INDEX} names.")
        found = open_safetensors(path)
        indexed = {name for name, place in places.items() if place == shard}
        problems += [f"{name} is not in {shard}" for name in sorted(indexed - found.keys())]
        problems += [f"{name} in {shard} is not in the index" for name in sorted(found.keys() - indexed)]
        tensors.update(found)
    if problems:
        raise CheckpointError(f"{directory / INDEX} does not fit its files: {listed(problems)}.")
    return tensors


def listed(problems: list[str], most: int = 20) -> str:
    """The first of many problems, and how many there are beside them."""
    more = len(problems) - most
    return "; ".join(problems[:most]) + (f"; and {more} more" if more > 0 else "")
