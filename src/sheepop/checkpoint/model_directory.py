"""A model on disk, complete in itself: configuration, weights, tokenizer, provenance, checksums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sheepop.checkpoint.run_directory import resolve_model_directory
from sheepop.core.config import validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.core.files import atomic_directory, damaged_files, read_json, write_json
from sheepop.model import ModelConfig, Transformer
from sheepop.tokenizer import Tokenizer, load_tokenizer

FORMAT = "sheepop-model"
FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class LoadedModel:
    """A model read back from disk, in evaluation mode, with the tokenizer it was trained with."""

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    provenance: dict[str, Any]
    directory: Path


def write_model(
    directory: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    provenance: Mapping[str, Any],
) -> None:
    """Writes the files of a model directory into `directory`, which the caller makes durable and checksums.

    `weights` are what `unique_weights` gives, on the CPU.
    """
    write_json(
        directory / "config.json",
        {"format": FORMAT, "format_version": FORMAT_VERSION, "model": config.model_dump(mode="json")},
    )
    save_file(dict(weights), directory / WEIGHTS, metadata={"format": "pt"})
    tokenizer.save(directory)
    write_json(directory / "provenance.json", dict(provenance))


def save_model(
    target: str | Path,
    model: Transformer,
    tokenizer: Tokenizer,
    provenance: Mapping[str, Any],
    *,
    replace: bool = False,
) -> None:
    """Writes a model directory atomically; raises `CheckpointError` when `target` exists and `replace` is false."""
    target = Path(target)
    if target.exists() and not replace:
        raise CheckpointError(f"{target} exists already. Choose another directory or remove it.")
    with atomic_directory(target, replace=replace) as directory:
        weights = {name: tensor.cpu().contiguous() for name, tensor in unique_weights(model).items()}
        write_model(directory, model.config, weights, tokenizer, provenance)


def load_model(path: str | Path, device: str = "cpu") -> LoadedModel:
    """Reads and verifies the model that `path` means (see `resolve_model_directory`).

    Raises `CheckpointError` naming the file that is missing, damaged, foreign or of a newer format.
    """
    directory = resolve_model_directory(path)
    config = read_model_config(directory)
    problems = damaged_files(directory)
    if problems:
        raise CheckpointError(f"The model in {directory} cannot be used: {'; '.join(problems)}.")
    tokenizer = load_tokenizer(directory)
    if tokenizer.vocab_size > config.vocabulary:
        raise CheckpointError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens but the model only "
            f"{config.vocabulary} embedding rows. They do not belong together."
        )
    with torch.device("meta"):
        model = Transformer(config)
    load_weights(model, read_weights(directory / WEIGHTS), directory / WEIGHTS)
    model.to(device).eval()
    provenance = read_json(directory / "provenance.json")
    return LoadedModel(model, tokenizer, config, provenance, directory)


def read_model_config(directory: Path) -> ModelConfig:
    """The configuration of a model directory, after checking that its format is ours and not newer."""
    found = read_json(directory / "config.json")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(f"{directory / 'config.json'} does not describe a SheepOp model.")
    version = found.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has model format version {version}; this SheepOp reads up to {FORMAT_VERSION}. "
            "Install a newer SheepOp."
        )
    try:
        return validate(ModelConfig, found.get("model", {}))
    except ConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'} is not valid: {error}") from None


def unique_weights(model: Transformer) -> dict[str, Tensor]:
    """The state dict without the second name of tied weights."""
    state = model.state_dict()
    if model.config.tie_weights:
        del state["lm_head.weight"]
    return {name: tensor.detach() for name, tensor in state.items()}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file; raises `CheckpointError` when it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None


def load_weights(model: Transformer, weights: dict[str, Tensor], source: Path) -> None:
    """Puts `weights` into `model`; names every tensor that is missing, unexpected or of another shape."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_weights:
        del expected["lm_head.weight"]
    problems = [f"{name} is missing" for name in expected.keys() - weights.keys()]
    problems += [f"{name} is unexpected" for name in weights.keys() - expected.keys()]
    problems += [
        f"{name} has shape {tuple(tensor.shape)}, expected {expected[name]}"
        for name, tensor in weights.items()
        if name in expected and tuple(tensor.shape) != expected[name]
    ]
    if problems:
        raise CheckpointError(f"{source} does not fit its configuration: {'; '.join(sorted(problems))}.")
    model.load_state_dict(weights, strict=False, assign=any(tensor.is_meta for tensor in model.parameters()))
    model.tie()
