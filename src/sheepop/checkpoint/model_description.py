"""The files of a model directory except its weights: configuration, tokenizer, generation settings, provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.stored_weight import Format, StoredWeight
from sheepop.adapt.tiles import GROUP
from sheepop.checkpoint.card_text import model_card
from sheepop.checkpoint.generation_settings import GENERATION
from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.model_kind import FORMAT
from sheepop.checkpoint.run_directory import CARD
from sheepop.checkpoint.source_directory import CONFIG
from sheepop.core.config import Config, validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.core.files import read_json, write_atomic, write_json
from sheepop.core.native import name_of
from sheepop.model import ModelConfig
from sheepop.model.options import ACTIVATION_NAMES
from sheepop.tokenizer import Tokenizer

FORMAT_VERSION = 5
"""The newest version, used for weights that are quantised in several ways or in groups with offsets. Reward models have
version 4, directories with an adapter version 3, those with other quantised weights version 2, all others version 1."""
PROVENANCE = "provenance.json"
PARTS = ("", "_scale", "_offset")
"""The suffixes of a quantised weight's name for its numbers, its scales and its offsets."""
_, SCALE, OFFSET = PARTS
Provenance = Mapping[str, Any]
C = TypeVar("C", bound=Config)
_STORED: dict[torch.dtype, Format] = {torch.int8: "int8", torch.uint8: "int4", torch.float8_e4m3fn: "fp8"}


def describe_model(
    directory: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    provenance: Provenance,
    generation: Mapping[str, Any],
    quantization: Quantization | None = None,
    adapter: LoraConfig | None = None,
    *,
    has_reward_head: bool = False,
    is_linked: bool = False,
) -> None:
    """Writes all files except the weights.

    `generation` are the keys of ``generation_config.json``, which is not written if there are none. `adapter` is the
    configuration of a LoRA adapter that is stored with the weights. The directory of a linked model has no card,
    and of a tokenizer with tables only these (see `Tokenizer.save`).
    """
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
    write_json(directory / CONFIG, found)
    tokenizer.save(directory, only_tables=is_linked)
    write_json(directory / PROVENANCE, dict(provenance))
    if generation:
        write_json(directory / GENERATION, dict(generation))
    if not is_linked:
        write_atomic(directory / CARD, model_card(config, tokenizer, provenance, stored=found))


class Quantization(Config):
    """How a directory's matrices are quantised, and their data type before quantisation.

    `is_mixed`: some are stored in another way than `weights`, or in groups with offsets.
    """

    weights: Literal["int8", "int4", "fp8"]
    dtype: Literal["float32", "bfloat16", "float16"]
    is_mixed: bool = False

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor | LazyTensor], dtype: torch.dtype) -> Quantization | None:
        """How these stored tensors are quantised, described by the smallest format among them; None if they are not."""
        numbers = {name: tensor for name, tensor in tensors.items() if name + SCALE in tensors}
        if not numbers:
            return None
        formats = {_STORED[tensor.dtype] for tensor in numbers.values()}
        smallest: Literal["int4", "int8", "fp8"] = (
            "int4" if "int4" in formats else "int8" if "int8" in formats else "fp8"
        )
        shapes = [(tensor.shape, tensors[name + SCALE].shape) for name, tensor in numbers.items()]
        is_usual = all(
            2 * shape[-1] == GROUP * scales[-1] if smallest == "int4" else shape[:-1] == scales
            for shape, scales in shapes
        )
        is_mixed = len(formats) > 1 or not is_usual or any(name + OFFSET in tensors for name in numbers)
        return cls(weights=smallest, dtype=name_of(dtype), is_mixed=is_mixed)

    def matrix(
        self, name: str, parts: Sequence[Tensor], dtype: torch.dtype | None, directory: Path, *, in_place: bool = False
    ) -> StoredWeight:
        """Combines numbers with their scales and offsets; it computes in `dtype`, or in the original type if None.

        All parts may be arranged anew `in_place`.
        """
        numbers, scales, *rest = parts
        offsets, stored = next(iter(rest), None), _STORED.get(numbers.dtype, self.weights)
        if not (self.is_mixed or (stored == self.weights and offsets is None)) or not is_stored_weight(
            stored, numbers, scales, offsets
        ):
            raise CheckpointError(f"{name} in {directory} is not a {self.weights} matrix with fitting scales.")
        return StoredWeight(stored, numbers, scales, dtype or getattr(torch, self.dtype), offsets, in_place=in_place)

    def dequantized(self, tensors: Mapping[str, LazyTensor], directory: Path) -> dict[str, LazyTensor]:
        """Returns the matrices in their original data type, each dequantised when it is read."""

        def read(name: str, parts: Sequence[LazyTensor]) -> Tensor:
            return self.matrix(name, [part.read() for part in parts], None, directory).rows()

        whole: dict[str, LazyTensor] = {}
        for name, parts in with_parts(tensors).items():
            whole[name] = tensor = parts[0]
            if len(parts) > 1:
                shape = (*tensor.shape[:-1], tensor.shape[-1] * (2 if tensor.dtype == torch.uint8 else 1))
                whole[name] = LazyTensor(shape, getattr(torch, self.dtype), partial(read, name, parts))
        return whole


def with_parts(tensors: Mapping[str, LazyTensor]) -> dict[str, list[LazyTensor]]:
    """The numbers of each matrix with its scales and offsets, if it has any."""
    matrices = {name for name in tensors if name + SCALE in tensors}
    others = {name + suffix for name in matrices for suffix in (SCALE, OFFSET)}
    return {
        name: [tensors[name + suffix] for suffix in PARTS[: 3 if name in matrices else 1] if name + suffix in tensors]
        for name in tensors
        if name not in others
    }


def formats_of(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """The formats of stored matrices and the data types of other tensors, sorted."""
    dtypes = (parts[0].dtype for parts in with_parts(tensors).values())
    return sorted({_STORED.get(dtype) or name_of(dtype) for dtype in dtypes})


def read_quantization(directory: Path) -> Quantization | None:
    """Returns how the matrices of a model directory are quantised, or None if they are not."""
    return _section(directory, "quantization", Quantization)


def read_adapter_config(directory: Path) -> LoraConfig | None:
    """Returns the configuration of the LoRA adapter in a model directory, or None."""
    return _section(directory, "adapter", LoraConfig)


def _section(directory: Path, name: str, kind: type[C]) -> C | None:
    found = read_json(directory / CONFIG).get(name)
    try:
        return None if found is None else validate(kind, found)
    except ConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'} is not valid: {error}") from None


def has_reward_head(directory: Path) -> bool:
    """Whether the model of a directory is a reward model, which scores answers."""
    return read_json(directory / CONFIG).get("reward_head") is True


def read_model_config(directory: Path) -> ModelConfig:
    """Reads the configuration of a model directory, and checks that its format is ours and not newer."""
    found = read_json(directory / CONFIG)
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


def is_stored_weight(stored: Format, numbers: Tensor, scales: Tensor, offsets: Tensor | None) -> bool:
    """Whether these parts have the shapes and data types of a `StoredWeight` in a format of 8 or 4 bits."""
    length = numbers.shape[-1] * (2 if stored == "int4" else 1)
    fits = numbers.ndim in (2, 3) and _STORED.get(numbers.dtype) == stored
    fits &= scales.dtype in (torch.float32, torch.bfloat16)
    fits &= offsets is None or (offsets.shape, offsets.dtype) == (scales.shape, scales.dtype)
    if scales.shape == numbers.shape[:-1]:
        return fits and stored != "int4" and scales.dtype == torch.float32 and offsets is None
    if scales.shape[:-1] != numbers.shape[:-1] or not scales.shape[-1] or length % scales.shape[-1]:
        return False
    return (
        fits and stored != "fp8" and (stored != "int4" or (length % GROUP == 0 and length // scales.shape[-1] <= GROUP))
    )
