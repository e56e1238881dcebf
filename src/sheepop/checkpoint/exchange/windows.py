"""Sliding windows in a foreign ``config.json``: for all layers, or layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sheepop.checkpoint.exchange.fields import Settings
from sheepop.checkpoint.exchange.given import Given
from sheepop.model.config import ModelConfig

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Window:
    """One window for every layer, `sliding_window`, which counts only where `switched_by` is true, if there is such."""

    default: int | None
    switched_by: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The window, its switch, and the first layer that slid in earlier versions of the switched families."""
        return ("sliding_window", self.switched_by, "max_window_layers") if self.switched_by else ("sliding_window",)

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """The window of all layers."""
        window = given.typed("sliding_window", int, self.default, optional=True)
        if self.switched_by is not None:
            on = given.typed(self.switched_by, bool, False)
            first = given.typed("max_window_layers", int, 0, optional=True)
            if on and first:
                raise given.problem(
                    "max_window_layers", "leaves the first layers without a window in some versions of transformers"
                )
            window = window if on else None
        return {"sliding_window": window}

    def write(self, config: ModelConfig) -> Settings:
        """The window, and the switch."""
        written: Settings = {"sliding_window": config.sliding_window}
        if self.switched_by is not None:
            written[self.switched_by] = config.sliding_window is not None
        return written


@dataclass(frozen=True)
class LayerWindows:
    """A window for those layers that `layer_types` names; without it a rule of the family decides.

    `slides(given)` is that rule: a function of the layer's index.
    """

    default: int
    rule: Callable[[Given], Callable[[int], bool]]
    rule_keys: tuple[str, ...] = ()
    switched_by: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """The window, the layers, the keys of the rule, the switch."""
        switch = () if self.switched_by is None else (self.switched_by,)
        return ("sliding_window", "layer_types", *self.rule_keys, *switch)

    def read(self, given: Given, settings: Mapping[str, Any]) -> Settings:
        """The window and its layers."""
        window = given.typed("sliding_window", int, self.default, optional=True)
        if self.switched_by is not None and not given.typed(self.switched_by, bool, False):
            window = None
        num_layers = settings["num_layers"]
        by_rule = self.rule(given)
        kinds = given.take("layer_types", None)
        if kinds is None:
            layers = [layer for layer in range(num_layers) if by_rule(layer)]
            if self.switched_by is not None and window is None:
                layers = []
        else:
            layers = _sliding(given, kinds, num_layers)
        if not layers:
            return {}
        if window is None:
            raise given.problem("sliding_window", f"gives no window to layer {layers[0]}, which is to slide")
        return {"sliding_window": window, "sliding_layers": None if len(layers) == num_layers else tuple(layers)}

    def write(self, config: ModelConfig) -> Settings:
        """The window and the kind of every layer; the keys of the rule are left to it."""
        slides = [config.window(layer) is not None for layer in range(config.num_layers)]
        written: Settings = {
            "sliding_window": config.sliding_window if any(slides) else self.default,
            "layer_types": [_SLIDING if sliding else _FULL for sliding in slides],
        }
        if self.switched_by is not None:
            written[self.switched_by] = any(slides)
        return written


def _sliding(given: Given, kinds: Any, num_layers: int) -> list[int]:
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise given.problem("layer_types", f"is not a list of {num_layers} entries, one for each layer")
    for layer, kind in enumerate(kinds):
        if kind not in (_SLIDING, _FULL):
            raise given.problem(
                "layer_types", f"has the kind {kind!r} for layer {layer}; {_FULL} and {_SLIDING} are known"
            )
    return [layer for layer, kind in enumerate(kinds) if kind == _SLIDING]


def after_first_layers(default: int) -> Callable[[Given], Callable[[int], bool]]:
    """Layers from `max_window_layers` on (Qwen)."""

    def rule(given: Given) -> Callable[[int], bool]:
        first = given.typed("max_window_layers", int, default)
        return lambda layer: layer >= first

    return rule


def all_but_every(period: int, key: str | None = None) -> Callable[[Given], Callable[[int], bool]]:
    """All layers but every `period`-th, which `key` may change (Gemma)."""

    def rule(given: Given) -> Callable[[int], bool]:
        every = period if key is None else given.typed(key, int, period)
        if every < 1:
            raise given.problem(str(key), "is not a number of layers")
        return lambda layer: (layer + 1) % every != 0

    return rule
