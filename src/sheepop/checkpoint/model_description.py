"""The files of a model directory except its weights: configuration, tokenizer, generation settings, provenance."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.stored_weight import GROUP, StoredWeight
from sheepop.checkpoint.card_text import model_card
from sheepop.checkpoint.generation_settings import GENERATION
from sheepop.checkpoint.model_kind import FORMAT
from sheepop.checkpoint.run_directory import CARD
from sheepop.checkpoint.source_directory import CONFIG
from sheepop.core.config import Config, validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.core.files import read_json, write_atomic, write_json
from sheepop.model import ModelConfig
from sheepop.model.config import ACTIVATION_NAMES
from sheepop.tokenizer import Tokenizer

FORMAT_VERSION = 4
"""The newest version, used for reward models. Directories with an adapter have version 3, those with quantised weights
and no adapter version 2, and all others version 1."""
PROVENANCE = "provenance.json"
SCALE = "_scale"
"""The suffix of a quantised weight's name for its scales."""
Provenance = Mapping[str, Any]
C = TypeVar("C", bound=Config)


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
) -> None:
    """Writes all files except the weights.

    `generation` are the keys of ``generation_config.json``, which is not written if there are none. `adapter` is the
    configuration of a LoRA adapter that is stored with the weights.
    """
    found: dict[str, Any] = {"format": FORMAT, "format_version": 1, "model": config.model_dump(mode="json")}
    if quantization is not None:
        found |= {"format_version": 2, "quantization": quantization.model_dump(mode="json")}
    if adapter is not None:
        found |= {"format_version": 3, "adapter": adapter.model_dump(mode="json")}
    if has_reward_head:
        found |= {"format_version": FORMAT_VERSION, "reward_head": True}
    write_json(directory / CONFIG, found)
    tokenizer.save(directory)
    write_json(directory / PROVENANCE, dict(provenance))
    if generation:
        write_json(directory / GENERATION, dict(generation))
    write_atomic(directory / CARD, model_card(config, tokenizer, provenance, stored=found))


class Quantization(Config):
    """The format of a directory's quantised matrices, and their data type before quantisation."""

    weights: Literal["int8", "int4", "fp8"]
    dtype: Literal["float32", "bfloat16", "float16"]

    def assembled(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None, directory: Path) -> dict[str, Tensor]:
        """Combines weights with their scales; they compute in `dtype`, or in the original data type if None."""
        kinds = {
            "int8": (torch.int8, torch.float32),
            "int4": (torch.uint8, torch.bfloat16),
            "fp8": (torch.float8_e4m3fn, torch.float32),
        }[self.weights]
        whole: dict[str, Tensor] = {}
        for name, values in weights.items():
            scales = weights.get(name + SCALE)
            if scales is None:
                if not (name.endswith(SCALE) and name.removesuffix(SCALE) in weights):
                    whole[name] = values
                continue
            per_row = (values.shape[-1] * 2 // GROUP,) if self.weights == "int4" else ()
            shape = (*values.shape[:-1], *per_row)
            if (values.dtype, scales.dtype) != kinds or values.ndim not in (2, 3) or scales.shape != shape:
                raise CheckpointError(f"{name} in {directory} is not a {self.weights} matrix with fitting scales.")
            made = StoredWeight(self.weights, values, scales, dtype or getattr(torch, self.dtype))
            whole[name] = nn.Parameter(made, requires_grad=False)
        return whole


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
