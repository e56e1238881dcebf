"""How a checkpoint stores a network in training: all of its weights, or a LoRA adapter and its base model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file
from torch import Tensor

from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.scalar_head import REWARD_HEAD, is_of_values
from sheepop.checkpoint.changes import changes_of, copy_changes
from sheepop.checkpoint.generation_settings import read_generation, with_ends
from sheepop.checkpoint.linked_weights import LINK
from sheepop.checkpoint.model_description import Provenance, describe_model, read_quantization
from sheepop.checkpoint.model_directory import (
    ADAPTER,
    load_weights,
    read_weights,
    stored_tensors,
    unique_weights,
    write_model,
)
from sheepop.checkpoint.weight_files import INDEX, MAX_SHARD_BYTES, WEIGHTS, read_all_weights, write_weights
from sheepop.core.files import atomic_directory, link_or_copy, read_json
from sheepop.model import Transformer
from sheepop.tokenizer import Tokenizer, load_tokenizer

VALUES = "values.safetensors"
Weights = Mapping[str, Tensor]


class ModelForm(Protocol):
    """A way to store the weights of a network."""

    is_divisible: bool
    """Whether its tensors may be split over several files."""

    def weights(self, model: Transformer) -> dict[str, Tensor]:
        """Returns the stored weights of `model` by name; the tensors are shared with the network."""

    def write(self, directory: Path, weights: Weights, tokenizer: Tokenizer, provenance: Provenance) -> None:
        """Writes a complete model directory, which the caller makes durable and checksums."""

    def describe(self, directory: Path, tokenizer: Tokenizer, provenance: Provenance) -> None:
        """Writes all files except the weights, which several processes write in parts."""
        raise ValueError("these weights cannot be split over several files")

    def read(self, directory: Path) -> dict[str, Tensor]:
        """Reads the weights back from such a directory."""

    def put(self, model: Transformer, weights: dict[str, Tensor], source: Path) -> None:
        """Loads the weights into a network; raises `CheckpointError` naming each that is missing or does not fit."""


@dataclass(frozen=True)
class WholeModel(ModelForm):
    """Stores all weights; `generation` are the keys of the model's ``generation_config.json``."""

    model: Transformer
    generation: Mapping[str, Any] = field(default_factory=dict)
    is_divisible = True

    def weights(self, model: Transformer) -> dict[str, Tensor]:
        """Returns all weights, tied ones once."""
        return unique_weights(model)

    def write(self, directory: Path, weights: Weights, tokenizer: Tokenizer, provenance: Provenance) -> None:
        """Writes all weights and the other files."""
        write_model(directory, self.model.config, weights, tokenizer, provenance, self.generation)

    def describe(self, directory: Path, tokenizer: Tokenizer, provenance: Provenance) -> None:
        """Writes configuration, tokenizer, generation settings and provenance."""
        judges, config = hasattr(self.model, REWARD_HEAD), self.model.config
        describe_model(directory, config, tokenizer, provenance, self.generation, has_reward_head=judges)

    def read(self, directory: Path) -> dict[str, Tensor]:
        """Reads all weights."""
        return read_all_weights(directory)

    def put(self, model: Transformer, weights: dict[str, Tensor], source: Path) -> None:
        """Loads all weights."""
        load_weights(model, weights, source)


@dataclass(frozen=True)
class AdaptedModel(ModelForm):
    """Stores a LoRA adapter and links the weights of `base`, a model directory whose files all checkpoints share.

    `end_ids` end a text, in addition to the tokens that end those of the base.
    """

    base: Path
    model: Transformer
    config: LoraConfig
    end_ids: Sequence[int] = ()
    is_divisible = False

    def weights(self, model: Transformer) -> dict[str, Tensor]:
        """Returns the weights of the adapter."""
        return changes_of(model)

    def write(self, directory: Path, weights: Weights, tokenizer: Tokenizer, provenance: Provenance) -> None:
        """Writes the adapter, and the base's weights as hard links if the file system supports them."""
        link_weights(self.base, directory)
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, directory / ADAPTER)
        judges, quantization = hasattr(self.model, REWARD_HEAD), read_quantization(self.base)
        describe_model(
            directory,
            self.model.config,
            tokenizer,
            provenance,
            with_ends(read_generation(self.base), self.end_ids),
            quantization,
            self.config,
            has_reward_head=judges,
        )

    def read(self, directory: Path) -> dict[str, Tensor]:
        """Reads the weights of the adapter."""
        return read_weights(directory / ADAPTER)

    def put(self, model: Transformer, weights: dict[str, Tensor], source: Path) -> None:
        """Copies the weights into the adapter."""
        copy_changes(weights, changes_of(model), source)


@dataclass(frozen=True)
class WithValues(ModelForm):
    """Stores a policy in the form `policy`, and its value head or value model, which only training needs."""

    policy: ModelForm
    is_divisible = False

    def weights(self, model: Transformer) -> dict[str, Tensor]:
        """Returns the weights of the policy and of the values."""
        return {**self.policy.weights(model), **_of_values(model)}

    def write(self, directory: Path, weights: Weights, tokenizer: Tokenizer, provenance: Provenance) -> None:
        """Writes the policy as a model directory, and the value weights to a separate file."""
        policy = {name: tensor for name, tensor in weights.items() if not is_of_values(name)}
        self.policy.write(directory, policy, tokenizer, provenance)
        values = {name: tensor.cpu().contiguous() for name, tensor in weights.items() if is_of_values(name)}
        save_file(values, directory / VALUES)

    def read(self, directory: Path) -> dict[str, Tensor]:
        """Reads the weights of the policy and of the values."""
        return {**self.policy.read(directory), **read_weights(directory / VALUES)}

    def put(self, model: Transformer, weights: dict[str, Tensor], source: Path) -> None:
        """Loads the weights of both."""
        self.policy.put(model, {name: each for name, each in weights.items() if not is_of_values(name)}, source)
        values = {name: each for name, each in weights.items() if is_of_values(name)}
        copy_changes(values, _of_values(model), source)


def _of_values(model: Transformer) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.named_parameters() if is_of_values(name)}


def copy_base(source: Path, target: Path) -> None:
    """Copies a model directory to `target`, with hard links for its own weights if the file system supports them."""
    is_linked = (source / LINK).is_file()
    left = {LINK} if is_linked else _weight_files(source)
    with atomic_directory(target, replace=True) as place:
        for file in sorted(source.iterdir()):
            if file.is_file() and file.name not in left:
                shutil.copyfile(file, place / file.name)
        if is_linked:
            write_weights(place, stored_tensors(source), MAX_SHARD_BYTES)
            load_tokenizer(source).save(place)
        else:
            link_weights(source, place)


def link_weights(source: Path, target: Path) -> None:
    """Links the weight files of `source` into `target`, or copies them if linking fails."""
    for name in sorted(_weight_files(source)):
        link_or_copy(source / name, target / name)


def _weight_files(directory: Path) -> set[str]:
    index = directory / INDEX
    return {INDEX, *read_json(index)["weight_map"].values()} if index.is_file() else {WEIGHTS}
