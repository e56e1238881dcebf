"""Which weights an adapter was trained on: adapters of two models with equal shapes are told apart by their weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from sheepop.checkpoint.foreign import foreign_tensors
from sheepop.checkpoint.linked_weights import LinkedWeights
from sheepop.checkpoint.model_description import PROVENANCE, Provenance
from sheepop.checkpoint.model_directory import ADAPTER
from sheepop.checkpoint.model_kind import BASE
from sheepop.checkpoint.weight_files import MAX_SHARD_BYTES, weight_checksums
from sheepop.core.errors import CheckpointError
from sheepop.core.files import CHECKSUMS, read_json


def identities(directory: Path) -> list[str]:
    """Returns hashes of a model directory's weights, alone and with its adapter, and of those that they came from.

    Those are the weights that integers were rounded from, the files that the model was imported from, and the model
    that a run with an adapter began with. The weights of a linked model are its files, not how SheepOp stores them.
    """
    if (link := LinkedWeights.read(directory)) is not None:
        return [link.identity(), *_origins(read_json(directory / PROVENANCE))]
    sums = read_json(directory / CHECKSUMS)
    weights = {
        name: value for name, value in sums.items() if name.endswith(".safetensors") and name.startswith("model")
    }
    found = [_hash(weights)]
    if ADAPTER in sums:
        found.append(_hash({**weights, ADAPTER: sums[ADAPTER]}))
    return list(dict.fromkeys([*found, *_origins(read_json(directory / PROVENANCE))]))


def require_base(own: Collection[str], directory: Path) -> None:
    """Raises `CheckpointError` unless an adapter of weights with one of these hashes fits the model in `directory`.

    An adapter without hashes, such as one of another program, fits by its shapes alone.
    """
    if own and set(own).isdisjoint(identities(directory)) and not _were_recorded(own, directory):
        raise CheckpointError(
            f"it was trained on other weights than those in {directory}, although their shapes are equal. Give the "
            "model that it was trained on, or one that was quantised from that."
        )


def _were_recorded(own: Collection[str], directory: Path) -> bool:
    """Whether one of these hashes is of the weights of a linked model as they are recorded elsewhere.

    Former versions copied them as an import does, or let the names of files count. An import may also have no record of
    its source. To find the hash of such a copy, all weights are read.
    """
    if (link := LinkedWeights.read(directory)) is None:
        return False
    return link.former_identity() in own or _hash(weight_checksums(foreign_tensors(link), MAX_SHARD_BYTES)) in own


def _origins(provenance: Provenance) -> list[str]:
    quantized = provenance.get("quantized")
    known = quantized.get(BASE) if isinstance(quantized, dict) else None
    both = [*(known or []), *(provenance.get(BASE) or [])] if isinstance(known, list | None) else []
    return [each for each in both if isinstance(each, str)]


def _hash(sums: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
