"""A family of models as other programs store it: one table of configuration keys and one of tensor names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sheepop.checkpoint.exchange.fields import Field, Settings
from sheepop.checkpoint.exchange.given import Given
from sheepop.checkpoint.exchange.shared_keys import SHARED
from sheepop.checkpoint.exchange.tensor_rules import TensorRule
from sheepop.core.config import validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.model.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """What ``config.json`` and the tensors of one `model_type` mean.

    `architecture` is transformers' class of the language model. `implied` are our settings that every member has.
    `prefix` begins the names of all tensors but the output projection, and is missing in some published files.
    `renamed` maps names that some versions write to those of the table. `buffers` are endings of names that hold no
    weights, but tables which follow from the configuration. Where `whole_heads`, transformers refuses a width that is
    no multiple of the number of heads.
    """

    model_type: str
    architecture: str
    implied: Mapping[str, Any]
    fields: tuple[Field, ...]
    tensors: tuple[TensorRule, ...]
    prefix: str = "model."
    renamed: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)
    whole_heads: bool = False

    @property
    def keys(self) -> frozenset[str]:
        """Every key of ``config.json`` that this family accounts for."""
        return frozenset(key for entry in (*self.fields, *SHARED) for key in entry.keys)

    def read_config(self, keys: Mapping[str, Any], where: str) -> ModelConfig:
        """Our configuration. Raises `CheckpointError` naming each key that is unknown, or the first not computed."""
        given = Given(keys, where)
        settings: Settings = dict(self.implied)
        for entry in (*SHARED, *self.fields):
            _put(settings, entry.read(given, settings))
        self._check_architecture(given)
        if left := given.unread():
            raise CheckpointError(
                f"{where}: SheepOp does not know what {', '.join(left)} means for {self.model_type}, and so "
                "cannot tell whether it would compute the same. Remove a key that is without influence."
            )
        try:
            return validate(ModelConfig, settings)
        except ConfigError as error:
            raise CheckpointError(f"{where} describes a model that SheepOp does not build: {error}") from None

    def write_config(self, config: ModelConfig) -> Settings:
        """The keys of ``config.json``; what this family cannot express shows when they are read again."""
        written: Settings = {"model_type": self.model_type, "architectures": [self.architecture]}
        for entry in (*self.fields, *SHARED):
            written.update(entry.write(config))
        return written

    def _check_architecture(self, given: Given) -> None:
        given.take("model_type", None)
        classes = given.take("architectures", None)
        # The bare model is the language model where the output projection is the embedding.
        bare = self.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
        known = isinstance(classes, list) and (self.architecture in classes or bare in classes)
        if classes is not None and not known:
            raise given.problem("architectures", f"is not the language model {self.architecture}")


def _put(settings: Settings, found: Settings) -> None:
    for name, value in found.items():
        section, _, key = name.rpartition(".")
        if section:
            settings.setdefault(section, {})[key] = value
        else:
            settings[name] = value
