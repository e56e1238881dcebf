"""Sliding windows, as llama.cpp has them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sheepop.checkpoint.gguf.architectures.aspects import Entries, Settings, is_close
from sheepop.checkpoint.gguf.architectures.rotary import BASE, DEFAULT_BASE, usual_attention_factor
from sheepop.checkpoint.gguf.keys import Keys
from sheepop.checkpoint.gguf.values import f32, flags, u32
from sheepop.model.config import ModelConfig

_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
_SLIDING_BASE = "rope.freq_base_swa"


@dataclass(frozen=True)
class NoWindow:
    """llama.cpp's network of this architecture sees every key, whatever the file says of a window."""

    fields: tuple[str, ...] = ("sliding_window", "sliding_layers", "sliding_position_base")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """A window smaller than the context, or layers with a base of their own."""
        if config.sliding_window is not None and config.sliding_window < config.max_seq_len:
            yield f"sliding_window = {config.sliding_window}, and it has no window"
        if config.sliding_position_base is not None:
            yield "sliding_position_base is set, and it has one base"

    def write(self, config: ModelConfig) -> Entries:
        """Nothing."""
        return {}

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The window that the file speaks of, for all layers; 0 is none."""
        return {"sliding_window": keys.size(_WINDOW, 0) or None}


@dataclass(frozen=True)
class Windows:
    """A sliding window for all layers but every `period`-th, unless the file lists them.

    `own_base` says how sliding layers turn: by a base under a key, unscaled ("unscaled") or scaled as the others
    ("scaled"), or by the base of the others, unscaled ("shared"). `otherwise` is the window without its key.
    """

    period: int
    own_base: str
    otherwise: int | None = None
    fields: tuple[str, ...] = ("sliding_window", "sliding_layers", "sliding_position_base")

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """No window where there always is one, and angles of sliding layers that llama.cpp computes otherwise."""
        if config.sliding_window is None:
            if self.otherwise is not None:
                yield "sliding_window is not set, and it always has one"
            return
        base, scaling = config.sliding_position_base, config.rotary_scaling
        scaled = scaling is not None and scaling.kind != "ntk"
        if base is None and scaling is not None and self.own_base != "scaled":
            yield "rotary_scaling without sliding_position_base scales the sliding layers too, and it leaves them"
        if base is not None and scaled and self.own_base == "scaled":
            yield "rotary_scaling with sliding_position_base leaves the sliding layers, and it scales them too"
        if base is not None and self.own_base == "shared" and not is_close(base, config.position_base):
            yield f"sliding_position_base = {base:g} differs from position_base = {config.position_base:g}"
        if scaling is not None and scaling.kind == "ntk" and self.own_base == "shared":
            yield "rotary_scaling.kind = ntk is another base, and its sliding layers have the same one"
        if scaling is not None and scaling.kind == "yarn" and self.own_base == "unscaled":
            assert scaling.attention_factor is not None
            if not is_close(scaling.attention_factor, usual_attention_factor(scaling.factor)):
                yield "rotary_scaling.attention_factor is not the usual one, and it applies to the sliding layers too"

    def write(self, config: ModelConfig) -> Entries:
        """The window, its layers where the rule does not give them, and the base of their own."""
        if config.sliding_window is None:
            return {}
        slides = [config.window(layer) is not None for layer in range(config.num_layers)]
        entries: Entries = {_WINDOW: u32(config.sliding_window)}
        if slides != self._by_rule(config.num_layers, self.period):
            entries[_PATTERN] = flags(slides)
        base = config.sliding_position_base
        if self.own_base == "unscaled" or (self.own_base == "scaled" and base is not None):
            entries[_SLIDING_BASE] = f32(config.position_base if base is None else base)
        return entries

    def read(self, keys: Keys, settings: Settings, tensors: Collection[str]) -> Settings:
        """The same."""
        num_layers = settings["num_layers"]
        window = keys.size(_WINDOW, self.otherwise or 0)
        slides = self._read_pattern(keys, num_layers)
        own = keys.number(_SLIDING_BASE, settings["position_base"] if self.own_base != "unscaled" else DEFAULT_BASE)
        layers = [layer for layer, sliding in enumerate(slides) if sliding]
        if not window or not layers:
            return {}
        found: Settings = {"sliding_window": window}
        if len(layers) < num_layers:
            found["sliding_layers"] = tuple(layers)
        same = own == settings["position_base"]
        if self.own_base == "shared" and not same:
            raise keys.problem(_SLIDING_BASE, f"differs from {BASE}, which llama.cpp takes for all layers")
        scaled = settings.get("rotary_scaling") is not None
        if not same or (scaled and self.own_base != "scaled"):
            if scaled and self.own_base == "scaled":
                raise keys.problem(_SLIDING_BASE, "stands beside a scaling that sliding layers share")
            found["sliding_position_base"] = own
        return found

    def _read_pattern(self, keys: Keys, num_layers: int) -> list[bool]:
        if not keys.is_list(_PATTERN):
            return self._by_rule(num_layers, keys.size(_PATTERN, self.period))
        slides = keys.numbers(_PATTERN)
        if len(slides) != num_layers:
            raise keys.problem(_PATTERN, f"has {len(slides)} entries for {num_layers} layers")
        return [number != 0 for number in slides]

    @staticmethod
    def _by_rule(num_layers: int, period: int) -> list[bool]:
        return [period == 0 or layer % period < period - 1 for layer in range(num_layers)]
