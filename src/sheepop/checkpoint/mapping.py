"""Maps the settings of other programs to our `ModelConfig` and back, independent of the file format.

A family of transformers, or an architecture of llama.cpp, lists a field for every key that the other program reads, so
that each key is read, known to have no effect, or refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sheepop.checkpoint.given import LARGEST_CONTEXT, LARGEST_COUNT, LARGEST_NUMBER, REQUIRED, Given, shown
from sheepop.core.config import validate
from sheepop.core.errors import CheckpointError, ConfigError, first_few
from sheepop.model.config import ModelConfig

Settings = dict[str, Any]
# Why a family or an architecture is not read.
_GEMMA3N = ", because it mixes several residual streams (AltUp) and has branches of low rank (Laurel)"
REASONS = {"gemma3n": _GEMMA3N, "gemma3n_text": _GEMMA3N}


class Field:
    """A property of a network in another program's format, given by keys, by tensors, or implied by the format.

    This base class reads and writes nothing; subclasses override what applies to them.
    """

    @property
    def covers(self) -> tuple[str, ...]:
        """The settings of `ModelConfig` that this field handles: `ours`, if it has any."""
        ours = getattr(self, "ours", ())
        return ours if isinstance(ours, tuple) else (ours,)

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns our settings, ``experts.count`` for one in a section; `settings` are those of earlier fields.

        Raises `CheckpointError` for a value that our network does not support.
        """
        return {}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the foreign keys. `refusals` or reading them back reveals what they cannot express."""
        return {}

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields the reasons why the other program would compute something other than `config`."""
        return iter(())


def read_fields(fields: Iterable[Field], given: Given, settings: Settings) -> None:
    """Adds the settings that all fields read to `settings`."""
    for field in fields:
        for name, value in field.read(given, settings).items():
            section, _, key = name.rpartition(".")
            (settings.setdefault(section, {}) if section else settings)[key] = value


def refuse_unread(given: Given, what: str, reason: str) -> None:
    """Raises `CheckpointError` if a key was not read; `what` names the kind of model, and `reason` why it matters."""
    if left := given.unread():
        named = first_few(left, 20, written=lambda name: given.prefix + name)
        raise CheckpointError(
            f"{given.where}: SheepOp does not know the key {named} of {what}, {reason}. Remove it if it has no effect."
        )


def write_fields(fields: Iterable[Field], config: ModelConfig) -> Settings:
    """Returns the foreign keys of all fields."""
    return {key: value for field in fields for key, value in field.write(config).items()}


def described(settings: Settings, where: str) -> ModelConfig:
    """Returns the configuration for these settings; raises `CheckpointError` if they are not valid for our network."""
    try:
        return validate(ModelConfig, settings)
    except ConfigError as error:
        raise CheckpointError(f"{where} describes a model that SheepOp does not support: {error}") from None


@dataclass(frozen=True)
class Value(Field):
    """A key with the value of one or several of our settings; `default` if it is absent; `optional` allows null."""

    theirs: str
    ours: tuple[str, ...]
    kind: type
    default: Any = REQUIRED
    aliases: tuple[str, ...] = ()
    optional: bool = False
    largest: int = LARGEST_NUMBER

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the value for each of our settings."""
        value = given.typed(
            self.theirs, self.kind, self.default, *self.aliases, optional=self.optional, largest=self.largest
        )
        return dict.fromkeys(self.ours, value)

    def write(self, config: ModelConfig) -> Settings:
        """Returns the value of the first of our settings, if the model has its section."""
        holder, name = _holder(config, self.ours[0])
        return {} if holder is None else {self.theirs: getattr(holder, name)}


def size(theirs: str, ours: str, default: Any = REQUIRED, *aliases: str, optional: bool = False) -> Value:
    """Returns a field for an integer key; `optional` allows null, the derived size."""
    return Value(theirs, (ours,), int, default, aliases, optional)


def count(theirs: str, ours: str, default: int, *aliases: str) -> Value:
    """Returns a field for a key with a number of layers or experts."""
    return Value(theirs, (ours,), int, default, aliases, largest=LARGEST_COUNT)


def context(theirs: str, default: int, *aliases: str) -> Value:
    """Returns a field for the key of the context length."""
    return Value(theirs, ("max_seq_len",), int, default, aliases, largest=LARGEST_CONTEXT)


def number(theirs: str, ours: str, default: Any = REQUIRED, *, optional: bool = False) -> Value:
    """Returns a field for a real-number key; `optional` allows null for none."""
    return Value(theirs, (ours,), float, default, optional=optional)


def switch(theirs: str, *ours: str, default: Any = REQUIRED) -> Value:
    """Returns a field for a boolean key."""
    return Value(theirs, ours, bool, default)


@dataclass(frozen=True)
class Fixed(Field):
    """A key that affects the results, for which we support only these values; the first one is the default."""

    theirs: str
    values: tuple[Any, ...]
    reason: str = "which SheepOp's network does not support"

    def read(self, given: Given, settings: Settings) -> Settings:
        """Refuses every other value."""
        value = given.take(self.theirs, self.values[0])
        if not any(value == allowed and type(value) is type(allowed) for allowed in self.values):
            raise given.problem(self.theirs, f"is not {shown(self.values[0])}, {self.reason}")
        return {}


def fixed(theirs: str, *values: Any) -> Fixed:
    """Returns a field for a key with only these supported values."""
    return Fixed(theirs, values)


@dataclass(frozen=True)
class Refused(Field):
    """A key that must be absent or empty, for the given reason."""

    theirs: str
    reason: str

    def read(self, given: Given, settings: Settings) -> Settings:
        """Refuses a key with a value."""
        if given.take(self.theirs, None):
            raise given.problem(self.theirs, self.reason)
        return {}


@dataclass(frozen=True)
class WithoutInfluence(Field):
    """Foreign keys, and our settings, that do not affect the logits, the loss or the tokens of these networks."""

    keys: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()

    def read(self, given: Given, settings: Settings) -> Settings:
        """Accepts any value of the keys."""
        for name in self.keys:
            given.take(name, None)
        return {}


def unread(*keys: str) -> WithoutInfluence:
    """Returns a field for foreign keys without an effect."""
    return WithoutInfluence(keys)


@dataclass(frozen=True)
class Implied(Field):
    """One of our settings that has no foreign key: their networks have one of these values; reading gives the first."""

    ours: str
    values: tuple[Any, ...]

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the first value."""
        return {self.ours: self.values[0]}

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal of a value that their networks do not have."""
        holder, name = _holder(config, self.ours)
        value = None if holder is None else getattr(holder, name)
        if value not in self.values:
            theirs = " or ".join("none" if each is None else str(each) for each in self.values)
            yield f"{self.ours} = {value}, but it {'has' if self.values == (None,) else 'computes'} {theirs}"


def _holder(config: ModelConfig, ours: str) -> tuple[Any, str]:
    """Returns the section that has one of our settings (None if the model lacks it), and the setting's name there."""
    section, _, name = ours.rpartition(".")
    return (getattr(config, section) if section else config), name


def implied(**settings: Any) -> tuple[Implied, ...]:
    """Returns a field with a single value for each of these settings."""
    return tuple(Implied(name, (value,)) for name, value in settings.items())


class EmbeddingRoot(Field):
    """Embeddings are multiplied by the root of the model's width (Gemma). This field must follow the sizes."""

    covers = ("embedding_scale",)

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the scale; validation of the whole configuration later refuses an invalid width."""
        return {"embedding_scale": max(1, settings["d_model"]) ** 0.5}

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal if the embeddings have another scale, or no scale."""
        root, own = config.d_model**0.5, config.embedding_scale or 1.0
        if not is_close(own, root):
            yield f"embedding_scale = {own:g}, but it multiplies embeddings by {root:g}"


@dataclass(frozen=True)
class Converted(Field):
    """A key that holds some of our settings in another form; null is allowed if it is the default.

    `to_ours` gives our settings for a value and the settings of earlier fields; its `ValueError` says why it refuses a
    value. `to_theirs` gives the value for a configuration.
    """

    theirs: str
    kind: type
    default: Any
    to_ours: Callable[[Any, Settings], Settings]
    to_theirs: Callable[[ModelConfig], Any]
    covers: tuple[str, ...] = ()

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns our settings for the value."""
        try:
            return self.to_ours(
                given.typed(self.theirs, self.kind, self.default, optional=self.default is None), settings
            )
        except ValueError as error:
            raise given.problem(self.theirs, str(error)) from None

    def write(self, config: ModelConfig) -> Settings:
        """Returns the value for our settings."""
        return {self.theirs: self.to_theirs(config)}


def output_scale(theirs: str, default: float, *, divides: bool = False) -> Converted:
    """Returns a field for the factor of the logits, with that of muP; they are divided by it if it `divides`."""

    def to_ours(value: float, settings: Settings) -> Settings:
        if value <= 0:
            raise ValueError("is not a factor above 0")
        return {"logit_scale": 1 / value if divides else value}

    def to_theirs(config: ModelConfig) -> float:
        return 1 / config.output_scale if divides else config.output_scale

    return Converted(theirs, float, default, to_ours, to_theirs, ("logit_scale",))


def without(fields: Iterable[Field], *keys: str) -> tuple[Field, ...]:
    """Returns the fields except those of these keys."""
    return tuple(field for field in fields if getattr(field, "theirs", None) not in keys)


def score_scale(config: ModelConfig) -> float:
    """Returns the factor of the attention scores, by default 1 / sqrt(head_dim)."""
    return config.score_scale or config.head_size**-0.5


def sliding(config: ModelConfig) -> list[bool]:
    """Returns one truth value per layer: whether the layer has a sliding window."""
    return [config.window(layer) is not None for layer in range(config.num_layers)]


def sliding_layers(settings: Settings) -> list[bool]:
    """Returns one truth value per layer: whether these settings give the layer a sliding window."""
    layers = settings.get("sliding_layers") or range(settings["num_layers"])
    return [bool(settings.get("sliding_window")) and layer in layers for layer in range(settings["num_layers"])]


def all_but_every(period: int, num_layers: int) -> list[bool]:
    """Returns one truth value per layer: False for every `period`-th layer, which has no window, else True."""
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def window_settings(window: int | None, slides: list[bool]) -> Settings:
    """Returns our settings of the window and its layers, empty if no layer has one."""
    layers = tuple(layer for layer, slide in enumerate(slides) if slide)
    return {"sliding_window": window, "sliding_layers": None if all(slides) else layers} if layers else {}


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """Returns YaRN's factor of cosines and sines (Peng et al. 2023, section 3.4)."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def is_close(value: float, other: float) -> bool:
    """Whether two numbers are equal up to the precision of float32."""
    return abs(value - other) <= 2.0**-21 * abs(other)
