"""Reads and writes model directories: configuration, weights, tokenizer, provenance, checksums."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sheepop.adapt.lora import merged
from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.quantization import dequantized
from sheepop.adapt.scalar_head import REWARD_HEAD, add_scalar_head, is_of_values
from sheepop.adapt.stored_weight import GROUP, Format, StoredWeight, is_stored_weight, name_of
from sheepop.checkpoint.card_text import EVALUATIONS, model_card
from sheepop.checkpoint.changes import put_changes
from sheepop.checkpoint.expected_tensors import expected_tensors, tensor_problems
from sheepop.checkpoint.generation_settings import GENERATION, end_ids, read_generation
from sheepop.checkpoint.lazy_tensor import ForeignModel, LazyTensor, Shape
from sheepop.checkpoint.run_directory import CARD, damaged_model, resolve_model_directory
from sheepop.checkpoint.vocabulary import require_fit
from sheepop.checkpoint.weight_files import WEIGHTS, listed, open_weights, read_all_weights, write_weights
from sheepop.core.config import Config, validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.core.files import atomic_directory, read_json, write_atomic, write_json
from sheepop.model import ModelConfig, Transformer, blank_model
from sheepop.model.config import ACTIVATION_NAMES
from sheepop.tokenizer import Tokenizer, load_tokenizer

FORMAT = "sheepop-model"
FORMAT_VERSION = 5
"""The newest version, used for weights that are quantised in several ways or in groups with offsets. Reward models have
version 4, directories with an adapter version 3, those with other quantised weights version 2, all others version 1."""
ADAPTER = "adapter.safetensors"
Provenance = Mapping[str, Any]
C = TypeVar("C", bound=Config)
_STORED: dict[torch.dtype, Format] = {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "fp8"}
PROVENANCE = "provenance.json"
_SCALE, _OFFSET = "_scale", "_offset"  # suffixes of a quantised weight's name for its scales and offsets


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode; `end_ids` are tokens that end a text, in addition to the tokenizer's own."""

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    provenance: dict[str, Any]
    directory: Path
    end_ids: tuple[int, ...]


def write_model(
    directory: Path, config: ModelConfig, weights: Mapping[str, Tensor], tokenizer: Tokenizer, provenance: Provenance
) -> None:
    """Writes the files of a model directory into `directory`, which the caller makes durable and checksums.

    `weights` are the result of `unique_weights`.
    """
    plain: dict[str, Tensor] = {}
    for name, weight in weights.items():
        parts = weight.parts if isinstance(weight, StoredWeight) else (weight,)
        for suffix, part in zip(("", _SCALE, _OFFSET), parts, strict=False):
            if part is not None:
                plain[name + suffix] = part
    plain = {name: tensor.cpu().contiguous() for name, tensor in plain.items()}
    save_file(plain, directory / WEIGHTS, metadata={"format": "pt"})
    judges = f"{REWARD_HEAD}.weight" in weights
    describe_model(directory, config, tokenizer, provenance, _quantization(weights), has_reward_head=judges)


def write_foreign_model(directory: Path, model: ForeignModel, provenance: Provenance, max_shard_bytes: int) -> None:
    """Writes an imported model like `write_model`, with one tensor in memory at a time.

    Weights larger than `max_shard_bytes` are split into several files with an index.
    """
    write_weights(directory, model.tensors, max_shard_bytes)
    describe_model(directory, model.config, model.tokenizer, provenance)
    if model.generation:
        write_json(directory / GENERATION, dict(model.generation))


def save_model(
    target: str | Path, model: Transformer, tokenizer: Tokenizer, provenance: Provenance, *, replace: bool = False
) -> None:
    """Writes a model directory atomically; raises `CheckpointError` if `target` exists and `replace` is false.

    Scores in `provenance` are left out, since they were measured with the weights of another directory.
    """
    target = Path(target)
    if target.exists() and not replace:
        raise CheckpointError(f"{target} already exists. Choose another directory or remove it.")
    made = {key: value for key, value in provenance.items() if key != EVALUATIONS}
    with atomic_directory(target, replace=replace) as directory:
        write_model(directory, model.config, unique_weights(model), tokenizer, made)


def load_model(
    path: str | Path, device: str = "cpu", dtype: torch.dtype | None = None, *, merge: bool = True
) -> LoadedModel:
    """Reads and verifies the model at `path` (see `resolve_model_directory`).

    A LoRA adapter in the directory is merged into the weights, unless they are quantised or `merge` is false.

    The parameters have the stored dtype, or `dtype`, and the network computes in it. If several dtypes are stored, such
    as float32 norms and bfloat16 matrices, all parameters get the one that represents every number. Raises
    `CheckpointError` naming the file that is missing, damaged, foreign or of a newer format.
    """
    directory, config, tokenizer = _verified(path)
    with torch.device("meta"):
        model = blank_model(config)
    adapter = read_adapter_config(directory)
    if has_reward_head(directory) and adapter is None:
        add_scalar_head(model, REWARD_HEAD)
    weights = read_all_weights(directory)
    if torch.device(device).type == "cpu":
        # Copy out of the memory map: in large memory pages a token takes 3 to 6 percent less time, and later changes of
        # the file do no harm.
        weights = {name: tensor.clone() for name, tensor in weights.items()}
    if (quantization := read_quantization(directory)) is not None:
        weights = quantization.assembled(weights, dtype, directory)
    load_weights(model, weights, directory)
    common = dtype or reduce(torch.promote_types, [parameter.dtype for parameter in model.parameters()])
    for parameter in model.parameters():  # buffers, such as position tables, keep their precision
        if not isinstance(parameter, StoredWeight):
            parameter.data = parameter.data.to(common)
    if adapter is not None:
        put_changes(model, adapter, read_weights(directory / ADAPTER), directory / ADAPTER)
        model = merged(model) if merge and quantization is None else model
    ends = end_ids(read_generation(directory), config.vocabulary, str(directory / GENERATION))
    made = read_json(directory / PROVENANCE)
    return LoadedModel(model.to(device).eval(), tokenizer, config, made, directory, ends)


def open_model(path: str | Path) -> ForeignModel:
    """Verifies the model at `path` and returns it without reading the weights, for export to another format.

    Quantised weights are dequantised, and an adapter is merged.
    """
    directory, config, tokenizer = _verified(path)
    if config.architecture != "decoder":
        raise CheckpointError(f"{directory} is an encoder-decoder, which none of SheepOp's export formats supports.")
    if has_reward_head(directory):
        raise CheckpointError(f"{directory} is a reward model, which none of SheepOp's export formats supports.")
    tensors = open_weights(directory)
    if read_adapter_config(directory) is not None:
        weights = unique_weights(merged(dequantized(load_model(directory, merge=False).model)))
        tensors = {name: LazyTensor.of(tensor) for name, tensor in weights.items()}
    elif (quantization := read_quantization(directory)) is not None:
        tensors = quantization.dequantized(tensors, directory)
    expected = expected_tensors(config)
    _check_fit({name: tensor.shape for name, tensor in tensors.items()}, expected, directory)
    tensors = {name: tensors[name] for name in expected}
    return ForeignModel(config, tensors, tokenizer, read_generation(directory), read_json(directory / PROVENANCE))


def _verified(path: str | Path) -> tuple[Path, ModelConfig, Tokenizer]:
    """Verifies all checksums of the model at `path`; returns its directory, its configuration and its tokenizer."""
    directory = resolve_model_directory(path)
    config = read_model_config(directory)
    if problems := damaged_model(directory):
        raise CheckpointError(f"The model in {directory} cannot be used: {'; '.join(problems)}.")
    tokenizer = load_tokenizer(directory)
    require_fit(tokenizer, config, directory)
    return directory, config, tokenizer


def describe_model(
    directory: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    provenance: Provenance,
    quantization: Quantization | None = None,
    adapter: LoraConfig | None = None,
    *,
    has_reward_head: bool = False,
) -> None:
    """Writes all files except the weights; `adapter` is the configuration of a LoRA adapter stored with them."""
    found: dict[str, Any] = {"format": FORMAT, "format_version": 1, "model": config.model_dump(mode="json")}
    versions = [1]
    if quantization is not None:
        found["quantization"] = quantization.model_dump(mode="json", exclude_defaults=True)
        versions.append(FORMAT_VERSION if quantization.is_mixed else 2)
    if adapter is not None:
        found["adapter"] = adapter.model_dump(mode="json")
        versions.append(3)
    if has_reward_head:
        found["reward_head"] = True
        versions.append(4)
    found["format_version"] = max(versions)
    write_json(directory / "config.json", found)
    tokenizer.save(directory)
    write_json(directory / PROVENANCE, dict(provenance))
    write_atomic(directory / CARD, model_card(config, tokenizer, provenance, stored=found))


class Quantization(Config):
    """How a directory's matrices are quantised, and their data type before quantisation.

    `is_mixed`: some are stored in another way than `weights`, or in groups with offsets.
    """

    weights: Literal["int8", "int4", "fp8"]
    dtype: Literal["float32", "bfloat16", "float16"]
    is_mixed: bool = False

    def assembled(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None, directory: Path) -> dict[str, Tensor]:
        """Combines numbers with their scales and offsets; they compute in `dtype`, or in the original type if None."""
        whole: dict[str, Tensor] = {}
        for name, numbers in weights.items():
            scales, offsets = weights.get(name + _SCALE), weights.get(name + _OFFSET)
            if scales is None:
                if not self._is_part(name, weights):
                    whole[name] = numbers
                continue
            stored = _STORED.get(numbers.dtype, self.weights)
            if not (self.is_mixed or (stored == self.weights and offsets is None)) or not is_stored_weight(
                stored, numbers, scales, offsets
            ):
                raise CheckpointError(f"{name} in {directory} is not a {self.weights} matrix with fitting scales.")
            made = StoredWeight(stored, numbers, scales, dtype or getattr(torch, self.dtype), offsets)
            whole[name] = nn.Parameter(made, requires_grad=False)
        return whole

    def dequantized(self, tensors: Mapping[str, LazyTensor], directory: Path) -> dict[str, LazyTensor]:
        """Returns the matrices in their original data type, each dequantised when it is read."""

        def read(name: str) -> Tensor:
            parts = {each: tensors[each].read() for each in (name, name + _SCALE, name + _OFFSET) if each in tensors}
            matrix = self.assembled(parts, None, directory)[name]
            assert isinstance(matrix, StoredWeight)
            return matrix.rows()

        whole: dict[str, LazyTensor] = {}
        for name, tensor in tensors.items():
            if name + _SCALE in tensors:
                shape = (*tensor.shape[:-1], tensor.shape[-1] * (2 if tensor.dtype == torch.uint8 else 1))
                whole[name] = LazyTensor(shape, getattr(torch, self.dtype), partial(read, name))
            elif not self._is_part(name, tensors):
                whole[name] = tensor
        return whole

    @staticmethod
    def _is_part(name: str, names: Container[str]) -> bool:
        """Whether this tensor holds the scales or the offsets of another one."""
        return any(name.endswith(end) and name.removesuffix(end) in names for end in (_SCALE, _OFFSET))


def read_quantization(directory: Path) -> Quantization | None:
    """Returns how the matrices of a model directory are quantised, or None if they are not."""
    return _section(directory, "quantization", Quantization)


def read_adapter_config(directory: Path) -> LoraConfig | None:
    """Returns the configuration of the LoRA adapter in a model directory, or None."""
    return _section(directory, "adapter", LoraConfig)


def _section(directory: Path, name: str, kind: type[C]) -> C | None:
    found = read_json(directory / "config.json").get(name)
    try:
        return None if found is None else validate(kind, found)
    except ConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'} is not valid: {error}") from None


def has_reward_head(directory: Path) -> bool:
    """Whether the model of a directory is a reward model, which scores answers."""
    return read_json(directory / "config.json").get("reward_head") is True


def _quantization(weights: Mapping[str, Tensor]) -> Quantization | None:
    """How these weights are quantised, described by the smallest format among them; None if they are not."""
    stored = [weight for weight in weights.values() if isinstance(weight, StoredWeight)]
    if not stored:
        return None
    (dtype,) = {weight.dtype for weight in stored}
    formats = {weight.stored for weight in stored}
    smallest = next(form for form in ("int4", "int8", "fp8") if form in formats)
    usual = {"int4": GROUP}.get(smallest)
    is_mixed = len(formats) > 1 or any(weight.offsets is not None or weight.group != usual for weight in stored)
    return Quantization(weights=smallest, dtype=name_of(dtype), is_mixed=is_mixed)


def read_model_config(directory: Path) -> ModelConfig:
    """Reads the configuration of a model directory, and checks that its format is ours and not newer."""
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
    model = found.get("model", {})
    try:
        return validate(ModelConfig, model)
    except ConfigError as error:
        own = isinstance(model, dict) and model.get("activation") not in (None, *ACTIVATION_NAMES)
        advice = ". If one of your plugins defines it, give that file with --plugin." if own else ""
        raise CheckpointError(f"{directory / 'config.json'} is not valid: {error}{advice}") from None


def unique_weights(model: Transformer) -> dict[str, Tensor]:
    """Returns the state dict without the duplicate of tied weights, and without a policy's value weights."""
    state = model.state_dict()
    if model.config.tie_weights:
        del state["lm_head.weight"]
    return {name: tensor.detach() for name, tensor in state.items() if not is_of_values(name)}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors file; raises `CheckpointError` if it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None


def load_weights(model: Transformer, weights: dict[str, Tensor], source: Path) -> None:
    """Loads `weights` into `model`; raises `CheckpointError` naming missing, unexpected and misshapen tensors."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if not is_of_values(name)}
    if model.config.tie_weights:
        del expected["lm_head.weight"]
    _check_fit({name: tuple(tensor.shape) for name, tensor in weights.items()}, expected, source)
    model.load_state_dict(weights, strict=False, assign=any(tensor.is_meta for tensor in model.parameters()))
    model.tie()


def _check_fit(found: Mapping[str, Shape], expected: Mapping[str, Shape], source: Path) -> None:
    if problems := tensor_problems(found, expected):
        raise CheckpointError(f"The weights in {source} do not fit their configuration: {listed(problems)}.")
