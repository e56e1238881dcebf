"""Fields that only transformers' ``config.json`` has: activations by name, dropout by place, windows by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import Field, Settings, all_but_every, sliding, window_settings
from sheepop.model.config import ModelConfig

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
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Activation(Field):
    """The key that names the activation function; writing uses the first of several names for one function."""

    theirs: str
    names: Mapping[str, str]
    default: str

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns our name of the function."""
        name = given.typed(self.theirs, str, self.default)
        if name not in self.names:
            raise given.problem(
                self.theirs, f"is an activation that SheepOp does not support here. It supports {', '.join(self.names)}"
            )
        return {"activation": self.names[name]}

    def write(self, config: ModelConfig) -> Settings:
        """Returns their name of the function, if they have one."""
        found = [theirs for theirs, ours in self.names.items() if ours == config.activation]
        return {self.theirs: found[0]} if found else {}


def plain_activation(theirs: str, default: str) -> Activation:
    """Returns a field for an activation without a gate; of several names for its function it writes `default`."""
    return Activation(theirs, {default: PLAIN_ACTIVATIONS[default], **PLAIN_ACTIVATIONS}, default)


@dataclass(frozen=True)
class Chosen(Field):
    """A boolean key that chooses `value` for one of our settings, which is null if the key is false, null or absent."""

    theirs: str
    ours: str
    value: Any

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the value or null."""
        return {self.ours: self.value if given.typed(self.theirs, bool, False, optional=True) else None}

    def write(self, config: ModelConfig) -> Settings:
        """Returns whether our setting has the value."""
        return {self.theirs: getattr(config, self.ours) == self.value}


@dataclass(frozen=True)
class Derived(Field):
    """A key that must be null or equal to one of our settings, which an earlier field has read."""

    theirs: str
    ours: str

    def read(self, given: Given, settings: Settings) -> Settings:
        """Refuses another number."""
        if given.typed(self.theirs, int, None, optional=True) not in (None, settings[self.ours]):
            raise given.problem(self.theirs, f"differs from {self.ours} = {settings[self.ours]}")
        return {}


@dataclass(frozen=True)
class Dropouts(Field):
    """A family's keys for the dropout rates of three places, None without dropout; we have one rate for all three."""

    embedding: str | None
    attention: str | None
    residual: str | None
    default: float = 0.0

    @property
    def _keys(self) -> list[str]:
        return list(dict.fromkeys(key for key in (self.embedding, self.attention, self.residual) if key))

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the rate if it is the same in all places, otherwise 0 with a note, as it affects only training."""
        rates = {key: given.typed(key, float, self.default, optional=True) or 0.0 for key in self._keys}
        places = [0.0 if key is None else rates[key] for key in (self.embedding, self.attention, self.residual)]
        if len(set(places)) == 1:
            return {"dropout": places[0]}
        named = ", ".join(f"{key} = {rate:g}" for key, rate in rates.items())
        given.notes.append(
            f"{named}: dropout matters only in training, and SheepOp has a single rate for embedding, attention and "
            "residual branches, which it sets to 0."
        )
        return {"dropout": 0.0}

    def write(self, config: ModelConfig) -> Settings:
        """Returns our rate if every place has a key, otherwise 0, since dropout in only some places would differ."""
        whole = None not in (self.embedding, self.attention, self.residual)
        return dict.fromkeys(self._keys, config.dropout if whole else 0.0)


@dataclass(frozen=True)
class Window(Field):
    """One window for all layers, `sliding_window`, which applies only if the key `switched_by`, if any, is true."""

    default: int | None
    switched_by: str | None = None

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the window of all layers."""
        window = given.typed("sliding_window", int, self.default, optional=True)
        if self.switched_by is not None:
            on = given.typed(self.switched_by, bool, False)
            # The first layer with a window in earlier versions of transformers.
            if given.typed("max_window_layers", int, 0, optional=True) and on:
                raise given.problem(
                    "max_window_layers", "gives the first layers no window in some versions of transformers"
                )
            window = window if on else None
        return {"sliding_window": window}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the window and the switch."""
        switch = {self.switched_by: config.sliding_window is not None} if self.switched_by else {}
        return {"sliding_window": config.sliding_window, **switch}


# Which layers rotate queries and keys, given the window and the layers that have it.
Rotation = Callable[[Given, int | None, list[bool]], list[bool]]


def everywhere(given: Given, window: int | None, slides: list[bool]) -> list[bool]:
    """All layers rotate."""
    return [True] * len(slides)


def where_it_slides(given: Given, window: int | None, slides: list[bool]) -> list[bool]:
    """Layers with a window rotate (Cohere 2)."""
    return slides


@dataclass(frozen=True)
class LayerTypes(Field):
    """A window for the layers that `layer_types` names, or without that key, for those that the family's rule selects.

    The rule maps the keys and the number of layers to a boolean for each layer. `rotation` says which layers rotate.
    """

    default: int | None
    rule: Callable[[Given, int], list[bool]]
    switched_by: str | None = None
    rotation: Rotation = everywhere

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the window and its layers, and the layers that rotate."""
        window = given.typed("sliding_window", int, self.default, optional=True)
        off = self.switched_by is not None and not given.typed(self.switched_by, bool, False)
        slides = self.rule(given, settings["num_layers"])
        kinds = given.take("layer_types", None)
        if kinds is not None:
            slides = _by_kind(given, kinds, settings["num_layers"])
        elif self.switched_by is not None and (off or window is None):
            slides = [False] * len(slides)
        if any(slides) and (off or window is None):
            raise given.problem("sliding_window", f"is not a window, but layer {slides.index(True)} must have one")
        found = window_settings(window, slides)
        rotating = self.rotation(given, window, slides)
        if not any(rotating):
            raise given.problem("layer_types", "leaves no layer that encodes positions, which SheepOp does not support")
        if not all(rotating):
            found["rotary_layers"] = tuple(layer for layer, rotates in enumerate(rotating) if rotates)
        return found

    def write(self, config: ModelConfig) -> Settings:
        """Returns the window, the type of each layer and the switch; the rule's key is omitted, as it has no effect."""
        slides = sliding(config)
        switch = {self.switched_by: any(slides)} if self.switched_by else {}
        return {
            "sliding_window": config.sliding_window if any(slides) else self.default,
            "layer_types": [_SLIDING if slide else _FULL for slide in slides],
            **switch,
        }


def _by_kind(given: Given, kinds: Any, num_layers: int) -> list[bool]:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise given.problem("layer_types", f"is not a list of {num_layers} entries, one for each layer")
    for layer, kind in enumerate(kinds):
        if kind not in (_SLIDING, _FULL):
            raise given.problem(
                "layer_types", f"has the type {kind!r} for layer {layer}; SheepOp supports {_FULL} and {_SLIDING}"
            )
    return [kind == _SLIDING for kind in kinds]


def windows_by_period(
    default: int, period: int, key: str | None = None, rotation: Rotation = everywhere, *, ends_without: bool = False
) -> LayerTypes:
    """Returns a field with a window in all layers except every `period`-th, which `key` may change (Gemma).

    If it `ends_without`, the last layer has none either.
    """

    def rule(given: Given, num_layers: int) -> list[bool]:
        every = period if key is None else given.typed(key, int, period)
        if every < 1:
            raise given.problem(str(key), "is not a number of layers")
        slides = all_but_every(every, num_layers)
        return [slide and not (ends_without and layer == num_layers - 1) for layer, slide in enumerate(slides)]

    return LayerTypes(default, rule, rotation=rotation)


def windows_from_layer(default: int, first: int) -> LayerTypes:
    """Returns a field with a window from layer `max_window_layers` on, if `use_sliding_window` is true (Qwen)."""

    def rule(given: Given, num_layers: int) -> list[bool]:
        start = given.typed("max_window_layers", int, first)
        return [layer >= start for layer in range(num_layers)]

    return LayerTypes(default, rule, "use_sliding_window")
