"""What an architecture of llama.cpp says of the network: each aspect accounts for some fields of our configuration.

An aspect refuses what llama.cpp would compute otherwise, writes the rest as metadata, and reads that back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from sheepop.checkpoint.gguf.keys import Keys
from sheepop.checkpoint.gguf.values import Value, f32, flag, u32
from sheepop.model.config import ModelConfig

Settings = dict[str, Any]
Entries = dict[str, Value]
# Whether the tensors are there as the model has them, always (zeros stand for what a model lacks), or never.
Presence = Literal["optional", "always", "never"]


class Aspect(Protocol):
    """One row of an architecture's table."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of `ModelConfig` that this aspect accounts for."""

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Why llama.cpp would compute something else than `config` says."""

    def write(self, config: ModelConfig) -> Entries:
        """Metadata below the name of the architecture."""

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """Our settings; `settings` are those of the aspects before, `tensors` the names in the file."""


@dataclass(frozen=True)
class Fixed:
    """A field that has no key: llama.cpp computes these values, and a file is read as the first."""

    field: str
    values: tuple[Any, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """The field."""
        return (self.field,)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Another value."""
        value = getattr(config, self.field)
        if value not in self.values:
            yield f"{self.field} = {value}, and it computes {' or '.join(map(str, self.values))}"

    def write(self, config: ModelConfig) -> Entries:
        """Nothing."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The first value."""
        return {self.field: self.values[0]}


@dataclass(frozen=True)
class WithoutInfluence:
    """Fields that change neither logits nor tokens of the networks that this architecture has."""

    fields: tuple[str, ...]

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """None."""
        return iter(())

    def write(self, config: ModelConfig) -> Entries:
        """Nothing."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class Keyed:
    """A whole number, at most `most`, or true or false, under a key."""

    field: str
    key: str
    kind: Literal["size", "truth"] = "size"
    most: int | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The field."""
        return (self.field,)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """A larger number."""
        value = getattr(config, self.field)
        if self.most is not None and value > self.most:
            yield f"{self.field} = {value}, and it has {self.most} at most"

    def write(self, config: ModelConfig) -> Entries:
        """The value."""
        value = getattr(config, self.field)
        return {self.key: u32(value) if self.kind == "size" else flag(value)}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The value."""
        if self.kind == "truth":
            return {self.field: keys.truth(self.key)}
        value = keys.size(self.key)
        if self.most is not None and value > self.most:
            raise keys.problem(self.key, f"is more than the {self.most} that llama.cpp has at most")
        return {self.field: value}


@dataclass(frozen=True)
class Norm:
    """The kinds of norm that the tensors can express, and epsilon under `key`. A file is read as the first kind.

    A scale of 1 + weight is written as that sum.
    """

    kinds: tuple[str, ...]
    key: str
    fields: tuple[str, ...] = ("norm", "norm_eps")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Another kind."""
        if config.norm not in self.kinds:
            yield f"norm = {config.norm}, and it has {' or '.join(self.kinds)}"

    def write(self, config: ModelConfig) -> Entries:
        """Epsilon."""
        return {self.key: f32(config.norm_eps)}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The kind and epsilon."""
        return {"norm": self.kinds[0], "norm_eps": keys.number(self.key)}


@dataclass(frozen=True)
class Heads:
    """The heads and their width, which `square` architectures take from the width of the model."""

    square: bool = False
    fields: tuple[str, ...] = ("num_heads", "num_kv_heads", "head_dim", "value_head_dim")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Values of another width than keys, and heads that do not fill the width of the model where they must."""
        if config.value_size != config.head_size:
            yield f"value_head_dim = {config.value_size} differs from head_dim = {config.head_size}"
        if self.square and config.num_heads * config.head_size != config.d_model:
            yield f"num_heads = {config.num_heads} of head_dim = {config.head_size} are not d_model = {config.d_model}"

    def write(self, config: ModelConfig) -> Entries:
        """Two numbers, and the width."""
        entries = {"attention.head_count": u32(config.num_heads), "attention.head_count_kv": u32(config.kv_heads)}
        if not self.square:
            entries["attention.key_length"] = u32(config.head_size)
            entries["attention.value_length"] = u32(config.value_size)
        return entries

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The same; without a width the heads share that of the model."""
        heads = keys.size("attention.head_count")
        if not heads:
            raise keys.problem("attention.head_count", "is no number of heads")
        shared = settings["d_model"] // heads
        return {
            "num_heads": heads,
            "num_kv_heads": keys.size("attention.head_count_kv", heads),
            "head_dim": keys.size("attention.key_length", shared),
            "value_head_dim": keys.size("attention.value_length", shared),
        }


@dataclass(frozen=True)
class ScoreScale:
    """The scale of the scores: 1 / sqrt(head_dim), or for a model of `odd_layers` layers 1 / sqrt(d_model / num_heads).

    The second is how llama.cpp tells the largest Gemma from the others. muP would scale scores and logits by factors
    that no key expresses.
    """

    odd_layers: int | None = None
    fields: tuple[str, ...] = ("attention_scale", "mup_base_d_model", "mup_base_head_dim")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Another scale of scores, or a scale of logits."""
        scale = self._scale(config.num_layers, config.d_model, config.num_heads, config.head_size)
        own = config.score_scale or 1 / math.sqrt(config.head_size)
        if not is_close(own, scale):
            yield f"the scores are multiplied by {own:g}, and it multiplies them by {scale:g}"
        if config.width_multiplier != 1.0:
            yield f"mup_base_d_model = {config.mup_base_d_model} scales the logits"

    def write(self, config: ModelConfig) -> Entries:
        """Nothing."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The scale where it is not the usual one."""
        num_layers, heads = settings["num_layers"], settings["num_heads"]
        if num_layers != self.odd_layers:
            return {}
        return {"attention_scale": self._scale(num_layers, settings["d_model"], heads, settings["head_dim"])}

    def _scale(self, num_layers: int, d_model: int, num_heads: int, head_dim: int) -> float:
        width = d_model // num_heads if num_layers == self.odd_layers else head_dim
        return 1 / math.sqrt(max(1, width))


@dataclass(frozen=True)
class EmbeddingInScale:
    """No factor of its own: the embeddings are written as they enter the network, and the output projection apart."""

    fields: tuple[str, ...] = ("embedding_scale",)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """None."""
        return iter(())

    def write(self, config: ModelConfig) -> Entries:
        """Nothing: the tensors have it."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """No factor."""
        return {"embedding_scale": 1.0}


@dataclass(frozen=True)
class AddedPositions:
    """A table that is added to the embeddings; sinusoids are written as the table they are."""

    fields: tuple[str, ...] = ("position_encoding", "position_base")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Positions that are not added."""
        if config.position_encoding not in ("learned", "sinusoidal"):
            yield f"position_encoding = {config.position_encoding}, and it adds a table"

    def write(self, config: ModelConfig) -> Entries:
        """Nothing: the tensor has it."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """A table as if it were learned."""
        return {"position_encoding": "learned"}


@dataclass(frozen=True)
class EmbeddingScale:
    """The factor of the embeddings, a function of the model's width."""

    factor: Callable[[int], float]
    fields: tuple[str, ...] = ("embedding_scale",)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Another factor."""
        factor, own = self.factor(config.d_model), config.embedding_scale or 1.0
        if not is_close(own, factor):
            yield f"embedding_scale = {own:g}, and it multiplies embeddings by {factor:g}"

    def write(self, config: ModelConfig) -> Entries:
        """Nothing."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The factor."""
        return {"embedding_scale": self.factor(settings["d_model"])}


@dataclass(frozen=True)
class SoftCap:
    """A cap under `key`. Where llama.cpp always caps, `otherwise` is what it takes without the key."""

    field: str
    key: str
    otherwise: float | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The field."""
        return (self.field,)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """No cap where there always is one."""
        if self.otherwise is not None and getattr(config, self.field) is None:
            yield f"{self.field} is not set, and it always caps"

    def write(self, config: ModelConfig) -> Entries:
        """The cap."""
        cap = getattr(config, self.field)
        return {} if cap is None else {self.key: f32(cap)}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The cap; 0 is none."""
        return {self.field: keys.number(self.key, self.otherwise or 0.0) or None}


@dataclass(frozen=True)
class Biases:
    """Which linear layers and norms have biases; `probe` names a tensor that shows whether optional ones are there."""

    field: str
    presence: Presence
    probe: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """The field."""
        return (self.field,)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Biases where llama.cpp reads none."""
        if self.presence == "never" and getattr(config, self.field):
            yield f"{self.field} = True, and it adds no such biases"

    def write(self, config: ModelConfig) -> Entries:
        """Nothing: the tensors say it."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """Whether the tensors are there."""
        return {self.field: self.presence == "always" or (self.presence == "optional" and self.probe in tensors)}


@dataclass(frozen=True)
class TiedWeights:
    """Whether the file has an output projection of its own: as the model has (optional), always, or never."""

    presence: Presence
    fields: tuple[str, ...] = ("tie_weights",)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """A projection of its own where llama.cpp takes the embedding."""
        if self.presence == "never" and not config.tie_weights:
            yield "tie_weights = False, and its output projection is the embedding"

    def write(self, config: ModelConfig) -> Entries:
        """Nothing: the tensors say it."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """Tied, unless the projection is there."""
        return {"tie_weights": "output.weight" not in tensors}


def is_close(value: float, other: float) -> bool:
    """Whether single precision hardly tells the two apart."""
    return abs(value - other) <= 4 * float(np.finfo(np.float32).eps) * abs(other)
