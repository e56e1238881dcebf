"""What the settings of another program mean for our `ModelConfig`, in both directions, whatever file they stand in.

A family of transformers, or an architecture of llama.cpp, lists a field for every key that it can have, so that each is
read, known to be without influence, or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sheepop.checkpoint.given import LARGEST_CONTEXT, LARGEST_COUNT, LARGEST_NUMBER, REQUIRED, Given, shown
from sheepop.core.config import validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.model.config import ModelConfig

Settings = dict[str, Any]


class Field:
    """Something that another program says of a network, by keys, by its tensors, or by calling it what it is.

    As it stands here it says nothing; those below override what they mean.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        """Their keys that this field accounts for: `theirs`, if it has one."""
        theirs = getattr(self, "theirs", None)
        return () if theirs is None else (theirs,)

    @property
    def covers(self) -> tuple[str, ...]:
        """The settings of `ModelConfig` that this field accounts for: `ours`, one or several, if it has any."""
        ours = getattr(self, "ours", ())
        return ours if isinstance(ours, tuple) else (ours,)

    def read(self, given: Given, settings: Settings) -> Settings:
        """Our settings, of which ``experts.count`` is one in a section; `settings` are those of the fields before.

        Raises `CheckpointError` for what our network does not compute.
        """
        return {}

    def write(self, config: ModelConfig) -> Settings:
        """Their keys. What they cannot express shows when they are read again, or is among the refusals."""
        return {}

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Why they would compute something else than `config` says."""
        return iter(())


def read_fields(fields: Iterable[Field], given: Given, settings: Settings, what: str) -> None:
    """Adds to `settings` what all fields read of a `what`.

    Raises `CheckpointError` for a key that none of them knows.
    """
    for field in fields:
        for name, value in field.read(given, settings).items():
            section, _, key = name.rpartition(".")
            (settings.setdefault(section, {}) if section else settings)[key] = value
    if left := given.unread():
        named = ", ".join(given.prefix + name for name in left[:20])
        raise CheckpointError(
            f"{given.where}: {named} might change what the network computes: SheepOp knows no such key of {what}. "
            "Remove what has no effect."
        )


def write_fields(fields: Iterable[Field], config: ModelConfig) -> Settings:
    """Their keys of all fields."""
    return {key: value for field in fields for key, value in field.write(config).items()}


def described(settings: Settings, where: str) -> ModelConfig:
    """The configuration of these settings; raises `CheckpointError` for one that we do not build."""
    try:
        return validate(ModelConfig, settings)
    except ConfigError as error:
        raise CheckpointError(f"{where} describes a model that SheepOp does not build: {error}") from None


@dataclass(frozen=True)
class Value(Field):
    """A key whose value stands in one or several settings of ours.

    `default` is what its absence means. `optional` allows null.
    """

    theirs: str
    ours: tuple[str, ...]
    kind: type
    default: Any = REQUIRED
    aliases: tuple[str, ...] = ()
    optional: bool = False
    largest: int = LARGEST_NUMBER

    @property
    def keys(self) -> tuple[str, ...]:
        """The key and its other spellings."""
        return (self.theirs, *self.aliases)

    def read(self, given: Given, settings: Settings) -> Settings:
        """The same value under each of our keys."""
        value = given.typed(
            self.theirs, self.kind, self.default, *self.aliases, optional=self.optional, largest=self.largest
        )
        return dict.fromkeys(self.ours, value)

    def write(self, config: ModelConfig) -> Settings:
        """The value of the first of our keys, if the model has its section."""
        holder, name = _holder(config, self.ours[0])
        return {} if holder is None else {self.theirs: getattr(holder, name)}


def size(theirs: str, ours: str, default: Any = REQUIRED, *aliases: str) -> Value:
    """A key for a whole number."""
    return Value(theirs, (ours,), int, default, aliases)


def count(theirs: str, ours: str, default: int, *aliases: str) -> Value:
    """A key for a number of layers or experts."""
    return Value(theirs, (ours,), int, default, aliases, largest=LARGEST_COUNT)


def context(theirs: str, default: int, *aliases: str) -> Value:
    """A key for the length of the longest text."""
    return Value(theirs, ("max_seq_len",), int, default, aliases, largest=LARGEST_CONTEXT)


def number(theirs: str, ours: str, default: Any = REQUIRED) -> Value:
    """A key for a real number."""
    return Value(theirs, (ours,), float, default)


def optional_size(theirs: str, ours: str, default: int | None) -> Value:
    """A whole number, or null for the derived one."""
    return Value(theirs, (ours,), int, default, optional=True)


def optional_number(theirs: str, ours: str, default: float | None) -> Value:
    """A real number, or null for none."""
    return Value(theirs, (ours,), float, default, optional=True)


def switch(theirs: str, *ours: str, default: Any = REQUIRED) -> Value:
    """A key that is true or false."""
    return Value(theirs, ours, bool, default)


@dataclass(frozen=True)
class Fixed(Field):
    """A key that changes numbers, of which we compute these values only; the first is what its absence means."""

    theirs: str
    values: tuple[Any, ...]
    reason: str = "which SheepOp's network does not compute"

    def read(self, given: Given, settings: Settings) -> Settings:
        """Refuses every other value."""
        value = given.take(self.theirs, self.values[0])
        if not any(value == allowed and type(value) is type(allowed) for allowed in self.values):
            raise given.problem(self.theirs, f"asks for something other than {shown(self.values[0])}, {self.reason}")
        return {}


def fixed(theirs: str, *values: Any) -> Fixed:
    """A key of which we compute these values only."""
    return Fixed(theirs, values)


@dataclass(frozen=True)
class Refused(Field):
    """A key that may only be absent or empty, for the reason given."""

    theirs: str
    reason: str

    def read(self, given: Given, settings: Settings) -> Settings:
        """Refuses a key that says something."""
        if given.take(self.theirs, None):
            raise given.problem(self.theirs, self.reason)
        return {}


@dataclass(frozen=True)
class WithoutInfluence(Field):
    """Their keys, and our settings, that change neither the logits and the loss nor the tokens of these networks."""

    keys: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()

    def read(self, given: Given, settings: Settings) -> Settings:
        """Whatever the keys hold is as good."""
        for name in self.keys:
            given.take(name, None)
        return {}


def unread(*keys: str) -> WithoutInfluence:
    """Keys of theirs without influence."""
    return WithoutInfluence(keys)


@dataclass(frozen=True)
class Implied(Field):
    """A setting of ours without a key: their networks have one of these values, and are read as having the first."""

    ours: str
    values: tuple[Any, ...]

    def read(self, given: Given, settings: Settings) -> Settings:
        """The value that a file is read as having."""
        return {self.ours: self.values[0]}

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """A value that their networks do not have."""
        holder, name = _holder(config, self.ours)
        value = None if holder is None else getattr(holder, name)
        if value not in self.values:
            yield f"{self.ours} = {value}, but it computes {' or '.join(map(str, self.values))}"


def _holder(config: ModelConfig, ours: str) -> tuple[Any, str]:
    """The section that has a setting of ours, None where the model lacks it, and the name of the setting there."""
    section, _, name = ours.rpartition(".")
    return (getattr(config, section) if section else config), name


def implied(**settings: Any) -> tuple[Implied, ...]:
    """One value of each of these settings."""
    return tuple(Implied(name, (value,)) for name, value in settings.items())


class EmbeddingRoot(Field):
    """Embeddings are multiplied by the root of the model's width (Gemma). It stands behind the sizes."""

    covers = ("embedding_scale",)

    def read(self, given: Given, settings: Settings) -> Settings:
        """The scale; a width that has no root is refused with the whole configuration."""
        return {"embedding_scale": max(1, settings["d_model"]) ** 0.5}

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Embeddings that are scaled otherwise, or not at all."""
        root, own = config.d_model**0.5, config.embedding_scale or 1.0
        if not is_close(own, root):
            yield f"embedding_scale = {own:g}, but it multiplies embeddings by {root:g}"


def score_scale(config: ModelConfig) -> float:
    """What scores are multiplied by, the usual 1 / sqrt(head_dim) included."""
    return config.score_scale or config.head_size**-0.5


def sliding(config: ModelConfig) -> list[bool]:
    """Whether each layer has a sliding window."""
    return [config.window(layer) is not None for layer in range(config.num_layers)]


def all_but_every(period: int, num_layers: int) -> list[bool]:
    """Whether each layer has a window where all but every `period`-th have."""
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def window_settings(window: int | None, slides: list[bool]) -> Settings:
    """The window and its layers; nothing where no layer has one."""
    layers = tuple(layer for layer, slide in enumerate(slides) if slide)
    return {"sliding_window": window, "sliding_layers": None if all(slides) else layers} if layers else {}


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """What YaRN multiplies cosines and sines by (Peng et al. 2023, section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def is_close(value: float, other: float) -> bool:
    """Whether single precision hardly tells the two apart."""
    return abs(value - other) <= 2.0**-21 * abs(other)
