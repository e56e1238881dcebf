"""Converts a configuration to the metadata of a GGUF file and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from sheepop.checkpoint.expected_tensors import refuse_own_parts
from sheepop.checkpoint.gguf.architectures import Architecture
from sheepop.checkpoint.gguf.container import Container
from sheepop.checkpoint.gguf.hybrid import ARCHITECTURES
from sheepop.checkpoint.gguf.metadata import Metadata, Value, value_of
from sheepop.checkpoint.gguf.rotary import DIVISORS, find_llama3_scaling, find_proportional_scaling
from sheepop.checkpoint.gguf.rows import EMBEDDING_NAME
from sheepop.checkpoint.mapping import REASONS, Fixed, described, read_fields, refuse_unread, write_fields
from sheepop.core.config import validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.model.config import ModelConfig

ARCHITECTURE_KEY = "general.architecture"
# SheepOp's own configuration, which preserves settings without a key in llama.cpp (dropout, initialisation).
CONFIG_KEY = "sheepop.model"
_CAUSAL = Fixed("attention.causal", (True,), "so the model is not a language model")


def choose_architecture(config: ModelConfig, preferred: str | None = None) -> Architecture:
    """Returns the first architecture of llama.cpp that computes the same as `config`; tries `preferred` first.

    Raises `CheckpointError` with the reasons if none does.
    """
    refuse_own_parts(config, "llama.cpp")
    refusals: dict[str, list[str]] = {}
    for candidate in sorted(ARCHITECTURES.values(), key=lambda architecture: architecture.name != preferred):
        refusals[candidate.name] = list(candidate.refusals(config))
        if not refusals[candidate.name]:
            return candidate
    nearest_first = sorted(refusals.items(), key=lambda item: len(item[1]))
    reasons = "\n".join(f"  {name}: {'; '.join(reasons)}" for name, reasons in nearest_first)
    raise CheckpointError(f"llama.cpp has no architecture that computes the same as this model:\n{reasons}")


def config_metadata(architecture: Architecture, config: ModelConfig) -> dict[str, Value]:
    """Returns the keys for `config`, which `architecture` can express."""
    keys = write_fields(architecture.fields, config) | {"vocab_size": config.vocabulary}
    return {
        ARCHITECTURE_KEY: value_of(architecture.name),
        **{f"{architecture.name}.{key}": value_of(value) for key, value in keys.items() if value is not None},
        CONFIG_KEY: value_of(json.dumps(config.model_dump(mode="json"))),
    }


def read_config(container: Container) -> tuple[Architecture, ModelConfig]:
    """Returns the architecture and configuration of a file: SheepOp's stored one if it agrees with the other keys.

    Raises `CheckpointError` for an architecture, a key or a value that SheepOp does not support.
    """
    value = container.metadata.get(ARCHITECTURE_KEY)
    name = value.content if value is not None else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        reason = REASONS.get(str(name), "")
        raise CheckpointError(
            f"{container.path}: {ARCHITECTURE_KEY} = {name!r} is not an architecture that SheepOp reads{reason}. It "
            f"reads {', '.join(ARCHITECTURES)}."
        )
    architecture = ARCHITECTURES[name].of_file(container.tensors.keys())
    embedding = container.tensors.get(EMBEDDING_NAME)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{container.path} has no embedding, the tensor {EMBEDDING_NAME} with two dimensions.")
    rows = embedding.shape[0]
    stored = _stored_config(container.metadata)
    if stored is not None and stored.vocab_size == rows and _says_the_same(container.metadata, architecture, stored):
        return architecture, stored
    return architecture, described(_read_settings(container, architecture, rows), str(container.path))


def _read_settings(container: Container, architecture: Architecture, rows: int) -> dict[str, Any]:
    metadata = Metadata(container.metadata, architecture.name, container.path, container.tensors.keys())
    settings: dict[str, Any] = {"vocab_size": rows, "dropout": 0.0}
    if metadata.typed("vocab_size", int, rows) != rows:
        raise metadata.problem("vocab_size", f"contradicts the {rows:,} rows of the embedding")
    read_fields((*architecture.fields, _CAUSAL), metadata, settings)
    refuse_unread(metadata, architecture.name, "which might change what the network computes")
    settings["bias"] = settings["attention_bias"]
    if DIVISORS in container.tensors:
        scaling = _read_divisors(container, settings)
        settings |= {} if scaling is None else {"rotary_scaling": scaling}
    return settings


def _read_divisors(container: Container, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    given = settings.get("rotary_scaling")
    proportional = given is not None and given["kind"] == "proportional"
    if given is not None and not proportional:
        raise CheckpointError(f"{container.path}: {DIVISORS} is given together with another scaling of positions.")
    found = container.read(DIVISORS).to(torch.float64).flatten()
    turned = int(
        settings["head_dim"] * settings.get("rotary_fraction", ModelConfig.model_fields["rotary_fraction"].default)
    )
    if 2 * len(found) != turned:
        raise CheckpointError(f"{container.path}: {DIVISORS} has {len(found)} numbers for {turned} rotated columns.")
    if proportional:
        scaling = find_proportional_scaling(found)
    elif bool((found == 1).all()):
        return None
    else:
        scaling = find_llama3_scaling(found, settings["position_base"], settings["max_seq_len"])
    if scaling is None:
        name = "Gemma 4" if proportional else "Llama 3"
        raise CheckpointError(
            f"{container.path}: {DIVISORS} does not follow {name}'s scaling, the only one that SheepOp reads here."
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
    """Whether writing the stored configuration would give exactly the architecture keys of this file."""
    if any(architecture.refusals(stored)):
        return False
    prefix = f"{architecture.name}."
    wanted = {key: value for key, value in config_metadata(architecture, stored).items() if key.startswith(prefix)}
    return wanted == {key: value for key, value in metadata.items() if key.startswith(prefix)}
