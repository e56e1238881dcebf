"""What a key of a foreign ``config.json`` means for our configuration, in both directions.

A family lists one field for every key that its configuration can have, so that each is read, known to be without
influence on numbers, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sheepop.checkpoint.exchange.given import LARGEST_CONTEXT, LARGEST_COUNT, LARGEST_NUMBER, Given, shown
from sheepop.model.config import ModelConfig

Settings = dict[str, Any]


class Field(Protocol):
    """One or several keys that are read and written together."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The foreign keys that this field accounts for."""

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """Our settings; `settings` are those of the fields before. Raises `CheckpointError` for what we lack."""

    def write(self, config: ModelConfig) -> Settings:
        """The foreign keys for `config`; what they cannot express shows when they are read again."""


@dataclass(frozen=True)
class Value:
    """A key whose value stands in one or several of ours; ``experts.count`` is a key within a section.

    `default` is what transformers takes when the key is absent. `optional` allows null.
    """

    theirs: str
    ours: tuple[str, ...]
    kind: type
    default: Any
    aliases: tuple[str, ...] = ()
    optional: bool = False
    largest: int = LARGEST_NUMBER

    @property
    def keys(self) -> tuple[str, ...]:
        """The key and its other spellings."""
        return (self.theirs, *self.aliases)

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """The same value under each of our keys."""
        value = given.typed(
            self.theirs, self.kind, self.default, *self.aliases, optional=self.optional, largest=self.largest
        )
        return dict.fromkeys(self.ours, value)

    def write(self, config: ModelConfig) -> Settings:
        """The value of the first of our keys."""
        section, _, name = self.ours[0].rpartition(".")
        holder = getattr(config, section) if section else config
        return {} if holder is None else {self.theirs: getattr(holder, name)}


def size(theirs: str, ours: str, default: int, *aliases: str) -> Value:
    """A whole number."""
    return Value(theirs, (ours,), int, default, aliases)


def count(theirs: str, ours: str, default: int, *aliases: str) -> Value:
    """A number of layers or experts."""
    return Value(theirs, (ours,), int, default, aliases, largest=LARGEST_COUNT)


def context(theirs: str, default: int, *aliases: str) -> Value:
    """The longest text."""
    return Value(theirs, ("max_seq_len",), int, default, aliases, largest=LARGEST_CONTEXT)


def number(theirs: str, ours: str, default: float) -> Value:
    """A real number."""
    return Value(theirs, (ours,), float, default)


def optional_size(theirs: str, ours: str, default: int | None) -> Value:
    """A whole number, or null for the derived one."""
    return Value(theirs, (ours,), int, default, optional=True)


def optional_number(theirs: str, ours: str, default: float | None) -> Value:
    """A real number, or null for none."""
    return Value(theirs, (ours,), float, default, optional=True)


def switch(theirs: str, *ours: str, default: bool) -> Value:
    """True or false."""
    return Value(theirs, ours, bool, default)


@dataclass(frozen=True)
class Fixed:
    """A key that changes numbers, of which we compute these values only; the first is what its absence means."""

    theirs: str
    values: tuple[Any, ...]
    reason: str = "which SheepOp's network does not compute"

    @property
    def keys(self) -> tuple[str, ...]:
        """The key."""
        return (self.theirs,)

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """Nothing, when the value is one of those that our network computes."""
        value = given.take(self.theirs, self.values[0])
        if not any(value == allowed and type(value) is type(allowed) for allowed in self.values):
            raise given.problem(self.theirs, f"asks for something else than {shown(self.values[0])}, {self.reason}")
        return {}

    def write(self, config: ModelConfig) -> Settings:
        """Nothing."""
        return {}


def fixed(theirs: str, *values: Any) -> Fixed:
    """A key of which we compute these values only."""
    return Fixed(theirs, values)


@dataclass(frozen=True)
class Refused:
    """A key that may only be absent or empty, for the reason given."""

    theirs: str
    reason: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The key."""
        return (self.theirs,)

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """Nothing, when the key is absent or empty."""
        if given.take(self.theirs, None):
            raise given.problem(self.theirs, self.reason)
        return {}

    def write(self, config: ModelConfig) -> Settings:
        """Nothing."""
        return {}


@dataclass(frozen=True)
class Unread:
    """Keys that are known to be without influence on the logits, the loss and the tokens of a language model."""

    keys: tuple[str, ...]

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """Nothing; the keys count as read."""
        for name in self.keys:
            given.take(name, None)
        return {}

    def write(self, config: ModelConfig) -> Settings:
        """Nothing."""
        return {}


def unread(*keys: str) -> Unread:
    """Keys without influence."""
    return Unread(keys)


GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_python": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "gelu_fast": "geglu_tanh",
}
PLAIN_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}


@dataclass(frozen=True)
class Activation:
    """The key that names the activation function; of several names for one function the first is written."""

    theirs: str
    names: Mapping[str, str]
    default: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The key."""
        return (self.theirs,)

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """Our name of the same function."""
        name = given.typed(self.theirs, str, self.default)
        if name not in self.names:
            raise given.problem(
                self.theirs, f"is an activation that SheepOp lacks here. It has {', '.join(self.names)}"
            )
        return {"activation": self.names[name]}

    def write(self, config: ModelConfig) -> Settings:
        """The foreign name, or nothing when there is none."""
        found = [theirs for theirs, ours in self.names.items() if ours == config.activation]
        return {self.theirs: found[0]} if found else {}


@dataclass(frozen=True)
class Dropouts:
    """The dropout rates of a family by place; None where it has no dropout. We have one rate for all three places."""

    embedding: str | None
    attention: str | None
    residual: str | None
    default: float = 0.0

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all places, each once."""
        return tuple(dict.fromkeys(key for key in (self.embedding, self.attention, self.residual) if key))

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """The one rate, when it is the same everywhere."""
        rates = {key: given.typed(key, float, self.default, optional=True) or 0.0 for key in self.keys}
        places = [0.0 if key is None else rates[key] for key in (self.embedding, self.attention, self.residual)]
        if len(set(places)) > 1:
            key = max(rates, key=lambda name: rates[name])
            raise given.problem(
                key,
                "is not the rate of embedding, attention and residual dropout alike, of which SheepOp has one. "
                f"Set {', '.join(self.keys)} to 0 in the file: it changes nothing outside training",
            )
        return {"dropout": places[0]}

    def write(self, config: ModelConfig) -> Settings:
        """Our rate where every place has a key; elsewhere 0, since a part of it would be another regularisation."""
        whole = None not in (self.embedding, self.attention, self.residual)
        return dict.fromkeys(self.keys, config.dropout if whole else 0.0)
