"""What an architecture of llama.cpp says of the network: each aspect accounts for some fields of our configuration.

An aspect refuses what llama.cpp would compute otherwise, writes the rest as metadata, and reads that back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
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


def is_close(value: float, other: float) -> bool:
    """Whether single precision hardly tells the two apart."""
    return abs(value - other) <= 4 * float(np.finfo(np.float32).eps) * abs(other)
