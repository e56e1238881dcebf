"""Which layers have a sliding window, and which rotate, in llama.cpp's metadata."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from sheepop.checkpoint.gguf.rotary import BASE, DEFAULT_BASE
from sheepop.checkpoint.given import REQUIRED, Given
from sheepop.checkpoint.mapping import (
    Field,
    Settings,
    all_but_every,
    is_close,
    sliding,
    window_settings,
    yarn_attention_factor,
)
from sheepop.model.config import ModelConfig

_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
_SLIDING_BASE = "rope.freq_base_swa"


class NoWindow(Field):
    """No sliding window: llama.cpp's network of this architecture ignores the window in the file."""

    covers = ("sliding_window", "sliding_layers", "sliding_position_base")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of a window smaller than the context, and of a separate base for sliding layers."""
        if config.sliding_window is not None and config.sliding_window < config.max_seq_len:
            yield f"sliding_window = {config.sliding_window}, but it has no window"
        if config.sliding_position_base is not None:
            yield "sliding_position_base is set, but it has one base"

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the window in the file, for all layers; 0 is none."""
        return {"sliding_window": given.typed(_WINDOW, int, 0) or None}


_NO_WINDOW = NoWindow()


@dataclass(frozen=True)
class Windows(Field):
    """A sliding window for all layers except every `period`-th, or for those that the file lists.

    If `period` is None, the file must list them.

    `own_base` defines the rotary angles of sliding layers: their own base without scaling ("unscaled"), their own base
    with the scaling of the others ("scaled"), the base of the others without scaling ("shared"), or the angles of the
    others ("same"). `otherwise` is the default window. With `only`, a network with another number of layers has none.
    """

    period: int | None
    own_base: Literal["unscaled", "scaled", "shared", "same"]
    otherwise: int | None = None
    only: int | None = None
    covers: ClassVar[tuple[str, ...]] = ("sliding_window", "sliding_layers", "sliding_position_base")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields refusals of a missing window if llama.cpp always has one, and of angles that it does not compute."""
        if not self._exists(config.num_layers):
            yield from _NO_WINDOW.refusals(config)
            return
        if config.sliding_window is None:
            if self.otherwise is not None or self.period is None:
                yield "sliding_window is not set, but it always has one"
            return
        base, scaling = config.sliding_position_base, config.rotary_scaling
        if self.own_base == "same":
            if base is not None and (scaling is not None or not is_close(base, config.position_base)):
                yield f"sliding_position_base = {base:g}, but all its layers have the same angles"
            return
        scaled = scaling is not None and scaling.kind != "ntk"
        if base is None and scaling is not None and self.own_base != "scaled":
            yield "rotary_scaling without sliding_position_base scales the sliding layers too, but it does not"
        if base is not None and scaled and self.own_base == "scaled":
            yield "rotary_scaling with sliding_position_base does not scale the sliding layers, but it scales them too"
        if base is not None and self.own_base == "shared" and not is_close(base, config.position_base):
            yield f"sliding_position_base = {base:g} differs from position_base = {config.position_base:g}"
        if scaling is not None and scaling.kind == "ntk" and self.own_base == "shared":
            yield "rotary_scaling.kind = ntk changes the base, but its sliding layers share the base"
        if scaling is not None and scaling.kind == "yarn" and self.own_base == "unscaled":
            assert scaling.attention_factor is not None
            if not is_close(scaling.attention_factor, yarn_attention_factor(scaling.factor)):
                yield "rotary_scaling.attention_factor is not the usual one, but it applies to the sliding layers too"

    def write(self, config: ModelConfig) -> Settings:
        """Returns the window, its layers if they differ from the rule, and the base of sliding layers."""
        if config.sliding_window is None or not self._exists(config.num_layers):
            return {}
        slides = sliding(config)
        entries: Settings = {_WINDOW: config.sliding_window}
        if self.period is None or slides != all_but_every(self.period, config.num_layers):
            entries[_PATTERN] = slides
        base = config.sliding_position_base
        if self.own_base == "unscaled" or (self.own_base == "scaled" and base is not None):
            entries[_SLIDING_BASE] = config.position_base if base is None else base
        return entries

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the window, and the base of sliding layers if it differs from that of the others."""
        if not self._exists(settings["num_layers"]):
            return _NO_WINDOW.read(given, settings)
        window = given.typed(_WINDOW, int, REQUIRED if self.period is None else self.otherwise or 0)
        slides = self._read_pattern(given, settings["num_layers"])
        shared = settings["position_base"]
        own = given.typed(_SLIDING_BASE, float, DEFAULT_BASE if self.own_base == "unscaled" else shared)
        if not window or not any(slides):
            return {}
        if self.own_base in ("shared", "same") and own != shared:
            raise given.problem(_SLIDING_BASE, f"differs from {BASE}, which llama.cpp uses for all layers")
        found = window_settings(window, slides)
        scaled = settings.get("rotary_scaling") is not None
        if self.own_base == "scaled" and scaled and own != shared:
            raise given.problem(_SLIDING_BASE, "is given together with a scaling that sliding layers share")
        if own != shared or (scaled and self.own_base in ("unscaled", "shared")):
            found["sliding_position_base"] = own
        return found

    def _exists(self, num_layers: int) -> bool:
        return self.only in (None, num_layers)

    def _read_pattern(self, given: Given, num_layers: int) -> list[bool]:
        if self.period is not None and not isinstance(given.take(_PATTERN, None), list):
            # With a period of 0 all layers have a window.
            return all_but_every(given.typed(_PATTERN, int, self.period) or num_layers + 1, num_layers)
        slides = given.entries(_PATTERN, int)
        if len(slides) != num_layers:
            raise given.problem(_PATTERN, f"has {len(slides)} entries for {num_layers} layers")
        return [number != 0 for number in slides]


@dataclass(frozen=True)
class RotatingWindows(Windows):
    """Only the layers with a window rotate if some layers have one (Cohere 2, EXAONE 4)."""

    covers: ClassVar[tuple[str, ...]] = (*Windows.covers, "rotary_layers")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields the refusals of the windows, and of other layers that rotate."""
        yield from super().refusals(config)
        windows = config.sliding_window is not None and self._exists(config.num_layers)
        yield from _rotation_refusals(config, sliding(config) if windows else [True] * config.num_layers)

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the window, its layers, and that they rotate."""
        found = super().read(given, settings)
        if not found and self._exists(settings["num_layers"]):
            raise given.problem(_PATTERN, "leaves no layer that encodes positions, which SheepOp does not support")
        return {**found, "rotary_layers": found.get("sliding_layers")}


@dataclass(frozen=True)
class RotatingLayers(Field):
    """All layers rotate except every `period`-th, for which there is no key (SmolLM 3)."""

    period: int
    covers = ("rotary_layers",)

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields a refusal of other layers."""
        yield from _rotation_refusals(config, all_but_every(self.period, config.num_layers))

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns the layers, if they are not all."""
        rotating = all_but_every(self.period, settings["num_layers"])
        return {"rotary_layers": None if all(rotating) else tuple(at for at, turns in enumerate(rotating) if turns)}


def _rotation_refusals(config: ModelConfig, rotating: list[bool]) -> Iterator[str]:
    for layer, turns in enumerate(rotating):
        if config.position_encoding == "rope" and config.rotates(layer) is not turns:
            yield f"layer {layer} {'does not rotate, but it rotates it' if turns else 'rotates, but it does not there'}"
            return
