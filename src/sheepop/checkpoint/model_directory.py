"""A model on disk, complete in itself: configuration, weights, tokenizer, provenance, checksums."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sheepop.checkpoint.expected_tensors import expected_tensors, tensor_problems
from sheepop.checkpoint.generation_settings import GENERATION, end_ids, read_generation
from sheepop.checkpoint.lazy_tensor import ForeignModel, Shape
from sheepop.checkpoint.run_directory import resolve_model_directory
from sheepop.checkpoint.vocabulary import require_fit
from sheepop.checkpoint.weight_files import WEIGHTS, listed, open_weights, read_all_weights, write_weights
from sheepop.core.config import validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.core.files import atomic_directory, damaged_files, read_json, write_json
from sheepop.model import ModelConfig, Transformer, blank_model
from sheepop.tokenizer import Tokenizer, load_tokenizer

FORMAT = "sheepop-model"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class LoadedModel:
    """A model read back from disk, in evaluation mode, with the tokenizer it was trained with.

    `end_ids` are tokens that end a text beside the tokenizer's own.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    provenance: dict[str, Any]
    directory: Path
    end_ids: tuple[int, ...]


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
    save_file(dict(weights), directory / WEIGHTS, metadata={"format": "pt"})
    _describe(directory, config, tokenizer, provenance)


def write_foreign_model(
    directory: Path, model: ForeignModel, provenance: Mapping[str, Any], max_shard_bytes: int
) -> None:
    """`write_model` for a model that came from elsewhere, one tensor in memory at a time.

    Weights beyond `max_shard_bytes` are divided over several files with an index.
    """
    write_weights(directory, model.tensors, max_shard_bytes)
    _describe(directory, model.config, model.tokenizer, provenance)
    if model.generation:
        write_json(directory / GENERATION, dict(model.generation))


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
        raise CheckpointError(f"{target} already exists. Choose another directory or remove it.")
    with atomic_directory(target, replace=replace) as directory:
        weights = {name: tensor.cpu().contiguous() for name, tensor in unique_weights(model).items()}
        write_model(directory, model.config, weights, tokenizer, provenance)


def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None) -> LoadedModel:
    """Reads and verifies the model that `path` means (see `resolve_model_directory`).

    The parameters have the dtype in which they are stored, or `dtype`; the network computes in it. Where several are
    stored, such as norms in float32 beside matrices in bfloat16, all take the one that holds every number. Raises
    `CheckpointError` naming the file that is missing, damaged, foreign or of a newer format.
    """
    directory, config, tokenizer = _verified(path)
    with torch.device("meta"):
        model = blank_model(config)
    weights = read_all_weights(directory)
    if torch.device(device).type == "cpu":
        # Out of the map of the file: in large pages of memory a token takes 3 to 6 percent less time, and what becomes
        # of the file does not matter any more.
        weights = {name: tensor.clone() for name, tensor in weights.items()}
    load_weights(model, weights, directory)
    stored = [parameter.dtype for parameter in model.parameters()]
    _set_dtype(model, dtype or functools.reduce(torch.promote_types, stored))
    return LoadedModel(
        model.to(device).eval(),
        tokenizer,
        config,
        read_json(directory / "provenance.json"),
        directory,
        end_ids(read_generation(directory), config.vocabulary, str(directory / GENERATION)),
    )


def open_model(path: str | Path) -> ForeignModel:
    """The verified model that `path` means with its weights unread, for writing it in another format."""
    directory, config, tokenizer = _verified(path)
    if config.architecture != "decoder":
        raise CheckpointError(f"{directory} is an encoder-decoder, which none of SheepOp's export formats can express.")
    tensors = open_weights(directory)
    expected = expected_tensors(config)
    _check_fit({name: tensor.shape for name, tensor in tensors.items()}, expected, directory)
    return ForeignModel(
        config,
        {name: tensors[name] for name in expected},
        tokenizer,
        read_generation(directory),
        read_json(directory / "provenance.json"),
    )


def _verified(path: str | Path) -> tuple[Path, ModelConfig, Tokenizer]:
    """The directory that `path` means, its configuration and its tokenizer, after every file's checksum was right."""
    directory = resolve_model_directory(path)
    config = read_model_config(directory)
    problems = damaged_files(directory)
    if problems:
        raise CheckpointError(f"The model in {directory} cannot be used: {'; '.join(problems)}.")
    tokenizer = load_tokenizer(directory)
    require_fit(tokenizer, config, directory)
    return directory, config, tokenizer


def _describe(directory: Path, config: ModelConfig, tokenizer: Tokenizer, provenance: Mapping[str, Any]) -> None:
    """Writes everything but the weights."""
    write_json(
        directory / "config.json",
        {"format": FORMAT, "format_version": FORMAT_VERSION, "model": config.model_dump(mode="json")},
    )
    tokenizer.save(directory)
    write_json(directory / "provenance.json", dict(provenance))


def _set_dtype(model: Transformer, dtype: torch.dtype) -> None:
    """Converts the parameters; tables of positions and the like keep their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def read_model_config(directory: Path) -> ModelConfig:
    """The configuration of a model directory, after checking that its format is ours and not newer."""
    found = read_json(directory / "config.json")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory / 'config.json'} does not describe a SheepOp model. Import a model of another program "
            "first: sheepop import DIR --output MODEL"
        )
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
    _check_fit({name: tuple(tensor.shape) for name, tensor in weights.items()}, expected, source)
    model.load_state_dict(weights, strict=False, assign=any(tensor.is_meta for tensor in model.parameters()))
    model.tie()


def _check_fit(found: Mapping[str, Shape], expected: Mapping[str, Shape], source: Path) -> None:
    if problems := tensor_problems(found, expected):
        raise CheckpointError(f"The weights in {source} do not fit their configuration: {listed(problems)}.")
