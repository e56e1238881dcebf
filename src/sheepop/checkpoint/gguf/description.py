"""A configuration as the metadata of a GGUF file, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from sheepop.checkpoint.gguf.architectures import ARCHITECTURES, DIVISORS, EMBEDDING_NAME, Architecture
from sheepop.checkpoint.gguf.container import Container
from sheepop.checkpoint.gguf.keys import Keys
from sheepop.checkpoint.gguf.llama3_scaling import find_llama3_scaling
from sheepop.checkpoint.gguf.values import Value, text, u32
from sheepop.core.config import validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.model.config import ModelConfig

ARCHITECTURE_KEY = "general.architecture"
# The configuration as SheepOp has it, so that what llama.cpp has no key for (dropout, initialisation) comes back too.
CONFIG_KEY = "sheepop.model"


def choose_architecture(config: ModelConfig, name: str | None = None) -> Architecture:
    """The first architecture of llama.cpp that computes what `config` says, or the one of that `name`.

    Raises `CheckpointError` with the reason for every one that does not.
    """
    if name is not None and name not in ARCHITECTURES:
        raise CheckpointError(f"{name!r} is no architecture that SheepOp writes: {', '.join(ARCHITECTURES)}.")
    candidates = list(ARCHITECTURES.values()) if name is None else [ARCHITECTURES[name]]
    refusals = {candidate.name: list(candidate.refusals(config)) for candidate in candidates}
    for candidate in candidates:
        if not refusals[candidate.name]:
            return candidate
    nearest_first = sorted(refusals.items(), key=lambda item: len(item[1]))
    reasons = "\n".join(f"  {name}: {'; '.join(reasons)}" for name, reasons in nearest_first)
    raise CheckpointError(f"llama.cpp has no architecture that computes what this model does:\n{reasons}")


def config_metadata(architecture: Architecture, config: ModelConfig) -> dict[str, Value]:
    """The keys for `config`, which `architecture` expresses."""
    entries: dict[str, Value] = {ARCHITECTURE_KEY: text(architecture.name)}
    for aspect in architecture.aspects:
        entries |= {f"{architecture.name}.{key}": value for key, value in aspect.write(config).items()}
    entries[f"{architecture.name}.vocab_size"] = u32(config.vocabulary)
    return {**entries, CONFIG_KEY: text(json.dumps(config.model_dump(mode="json")))}


def read_config(container: Container) -> tuple[Architecture, ModelConfig]:
    """What a file describes: the configuration it was written from, where it holds one and still says the same.

    Raises `CheckpointError` for an architecture, a key or a value that SheepOp's network does not compute.
    """
    value = container.metadata.get(ARCHITECTURE_KEY)
    name = value.content if value is not None else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{container.path}: {ARCHITECTURE_KEY} = {name!r} is no architecture that SheepOp reads. It reads "
            f"{', '.join(ARCHITECTURES)}."
        )
    architecture = ARCHITECTURES[name]
    rows = _embedding_rows(container)
    stored = _stored_config(container.metadata)
    if stored is not None and stored.vocab_size == rows and _says_the_same(container.metadata, architecture, stored):
        return architecture, stored
    settings = _read_settings(container, architecture, rows)
    try:
        return architecture, validate(ModelConfig, settings)
    except ConfigError as error:
        raise CheckpointError(f"{container.path} describes no network that SheepOp can build: {error}") from None


def _embedding_rows(container: Container) -> int:
    embedding = container.tensors.get(EMBEDDING_NAME)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{container.path} has no embedding: the tensor {EMBEDDING_NAME}, with two dimensions.")
    return embedding.shape[0]


def _read_settings(container: Container, architecture: Architecture, rows: int) -> dict[str, Any]:
    keys = Keys(container.metadata, architecture.name, container.path)
    settings: dict[str, Any] = {"vocab_size": rows, "dropout": 0.0}
    for aspect in architecture.aspects:
        settings |= aspect.read(keys, settings, container.tensors.keys())
    settings["bias"] = settings["attention_bias"]
    if keys.size("vocab_size", rows) != rows:
        raise keys.problem("vocab_size", f"contradicts the {rows:,} rows of the embedding")
    if not keys.truth("attention.causal", True):
        raise keys.problem("attention.causal", "is false: the model is no language model")
    if unread := keys.unread():
        named = ", ".join(unread[:10])
        raise CheckpointError(
            f"{container.path}: {named} might change what the network computes; SheepOp does not read it."
        )
    if DIVISORS in container.tensors:
        scaling = _read_divisors(container, settings)
        settings |= {} if scaling is None else {"rotary_scaling": scaling}
    return settings


def _read_divisors(container: Container, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    if settings.get("rotary_scaling") is not None:
        raise CheckpointError(f"{container.path}: {DIVISORS} stands beside another scaling of positions.")
    found = container.read(DIVISORS).to(torch.float64).flatten()
    turned = int(
        settings["head_dim"] * settings.get("rotary_fraction", ModelConfig.model_fields["rotary_fraction"].default)
    )
    if 2 * len(found) != turned:
        raise CheckpointError(f"{container.path}: {DIVISORS} has {len(found)} numbers for {turned} turned columns.")
    if bool((found == 1).all()):
        return None
    scaling = find_llama3_scaling(found, settings["position_base"], settings["max_seq_len"])
    if scaling is None:
        raise CheckpointError(
            f"{container.path}: {DIVISORS} divides angles otherwise than Llama 3's scaling, which is all SheepOp reads."
        )
    return scaling


def _stored_config(metadata: Mapping[str, Value]) -> ModelConfig | None:
    value = metadata.get(CONFIG_KEY)
    if value is None or not isinstance(value.content, str):
        return None
    try:
        stored = json.loads(value.content)
        return validate(ModelConfig, stored) if isinstance(stored, dict) else None
    except (ValueError, RecursionError, ConfigError):
        return None


def _says_the_same(metadata: Mapping[str, Value], architecture: Architecture, stored: ModelConfig) -> bool:
    """Whether a file for the stored configuration would have exactly the keys of the architecture that this one has."""
    if any(architecture.refusals(stored)):
        return False
    prefix = f"{architecture.name}."
    wanted = {key: value for key, value in config_metadata(architecture, stored).items() if key.startswith(prefix)}
    return wanted == {key: value for key, value in metadata.items() if key.startswith(prefix)}
