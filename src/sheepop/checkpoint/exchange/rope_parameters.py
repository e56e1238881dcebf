"""Rotary positions in transformers' ``config.json``: one or two bases, a rotated fraction, a scaling.

Two spellings are read: one table, ``rope_parameters`` (transformers from version 5 on), or separate ``rope_theta`` and
``rope_scaling``. The second is written, because old and new versions and other programs read it.

LongRoPE has two tables of factors, for short and for long texts. transformers chooses one by the length of the whole
text, so that the angles of all earlier keys change when a text outgrows the original context. SheepOp's network has one
table: it uses the short one, with which both programs agree up to the original context, and limits texts to that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sheepop.checkpoint.given import LARGEST_CONTEXT, Given
from sheepop.checkpoint.mapping import Field, Settings, score_scale, yarn_attention_factor
from sheepop.model.config import ModelConfig

ORIGINAL = "original_max_position_embeddings"
_SHORT, _LONG = "short_factor", "long_factor"
ALL_SCALINGS = ("linear", "yarn", "llama3", "longrope")
_REFUSED_SCALINGS = {
    "dynamic": "its angles change with the length of the text, which would invalidate cached keys",
    "mrope": "it is for images and video",
    "axial": "it is for images",
}
# The keys of each kind by our names, of which one is called differently in the file.
_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_seq_len", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_seq_len", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "longrope": ("factor", "original_max_seq_len", "attention_factor"),
    "proportional": ("factor", "fraction"),
}
_RENAMED = {"original_max_seq_len": ORIGINAL, "fraction": "partial_rotary_factor"}
_DEFAULTS = {"proportional": 1.0}
_ALIASES = {"su": "longrope"}


@dataclass(frozen=True)
class RopeParameters(Field):
    """One base for all layers. `fraction` is the default of the rotated fraction, None if a family rotates whole heads.

    `original` is the default of the original context length, if it has a key outside the table. `for_images` are keys
    of the table that matter only for images and video, and `missing` is the table if there is none. With
    `scales_scores`, YaRN's `mscale_all_dim` also changes the factor of the scores (DeepSeek); the width of heads must
    be read before. Writing uses the first of several keys for one value.
    """

    base: float = 10000.0
    fraction: float | None = None
    scalings: tuple[str, ...] = ALL_SCALINGS
    base_keys: tuple[str, ...] = ("rope_theta",)
    fraction_keys: tuple[str, ...] = ("partial_rotary_factor",)
    original: int | None = None
    for_images: tuple[str, ...] = ()
    missing: Mapping[str, Any] = field(default_factory=dict)
    scales_scores: bool = False

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns base, fraction and scaling."""
        base, fraction = (
            given.typed(keys[0], float, None, *keys[1:], optional=True) for keys in (self.base_keys, self.fraction_keys)
        )
        parameters = _one_spelling(given, self.missing)
        original = None if self.original is None else given.typed(ORIGINAL, int, self.original)
        found = _read_parameters(parameters, base, self.base, settings["max_seq_len"], self.scalings, original)
        fraction = _agreed(parameters, "partial_rotary_factor", fraction)
        if self.scales_scores and found.get("rotary_scaling", {}).get("kind") == "yarn":
            scale = parameters.typed("mscale_all_dim", float, 0.0, optional=True) or 0.0
            factor = yarn_attention_factor(found["rotary_scaling"]["factor"] or 1.0, scale)
            found["attention_scale"] = factor**2 * max(1, settings["head_dim"]) ** -0.5
        for name in self.for_images:
            parameters.take(name, None)
        _refuse_the_rest(parameters)
        if self.fraction is None and fraction not in (None, 1.0):
            raise given.problem(self.fraction_keys[0], "does not apply to this family, which rotates whole heads")
        fraction = self.fraction if fraction is None else fraction
        return found if fraction is None else {**found, "rotary_fraction": fraction}

    def write(self, config: ModelConfig) -> Settings:
        """Returns the spelling with `rope_theta` and `rope_scaling`."""
        scaling = config.rotary_scaling
        written: Settings = {self.base_keys[0]: config.position_base}
        table = written["rope_scaling"] = _written_scaling(config, self.scalings)
        if self.scales_scores and table is not None and scaling is not None and scaling.kind == "yarn":
            root = math.sqrt(score_scale(config) * math.sqrt(config.head_size))
            table["mscale_all_dim"] = (root - 1) / (0.1 * math.log(scaling.factor)) if scaling.factor > 1 else 0.0
        if self.fraction is not None:
            written[self.fraction_keys[0]] = config.rotary_fraction
        if self.original is not None:
            written[ORIGINAL] = scaling.original_max_seq_len if scaling is not None else config.max_seq_len
        return written


@dataclass(frozen=True)
class LayerRopeParameters(Field):
    """One base for layers with a sliding window, which are not scaled, and one for the other layers (Gemma 3).

    `sliding_key` is the older key of the first base. Without it, only the table holds it, which is then written.
    `missing` is the table of the other layers if there is none.
    """

    base: float = 1_000_000.0
    sliding_base: float = 10_000.0
    sliding_key: str | None = "rope_local_base_freq"
    scalings: tuple[str, ...] = ("linear", "yarn", "llama3")
    missing: Mapping[str, Any] = field(default_factory=dict)

    def read(self, given: Given, settings: Settings) -> Settings:
        """Returns both bases and the scaling of the layers without a window."""
        base = given.typed("rope_theta", float, None, optional=True)
        sliding = None if self.sliding_key is None else given.typed(self.sliding_key, float, None, optional=True)
        if self.sliding_key is None and base not in (None, self.sliding_base):
            raise given.problem(
                "rope_theta",
                "is the base of all layers in some versions of transformers, and in others only of those "
                "without a window. Give rope_parameters with the base of full_attention and of sliding_attention",
            )
        if given.has("rope_parameters"):
            nested = _one_spelling(given)
            full = nested.within("full_attention", nested.take("full_attention", None) or {})
            local = nested.within("sliding_attention", nested.take("sliding_attention", None) or {})
            _refuse_the_rest(nested)
        else:
            full, local = _one_spelling(given, self.missing), Given({}, given.where)
        limit = settings["max_seq_len"]
        found = _read_parameters(full, base, self.base, limit, self.scalings)
        near = _read_parameters(local, sliding, self.sliding_base, limit, ())
        if found.get("rotary_scaling", {}).get("truncate") is False:
            raise full.problem("truncate", "is not supported: transformers always rounds in this family")
        _refuse_the_rest(full)
        _refuse_the_rest(local)
        if settings.get("sliding_window") is not None:
            found["sliding_position_base"] = near["position_base"]
        return found

    def write(self, config: ModelConfig) -> Settings:
        """Returns a key for each base and `rope_scaling`; without a `sliding_key`, one table `rope_parameters`."""
        sliding, scaling = config.sliding_position_base or config.position_base, _written_scaling(config, self.scalings)
        if self.sliding_key is not None:
            return {"rope_theta": config.position_base, self.sliding_key: sliding, "rope_scaling": scaling}
        full = {"rope_theta": config.position_base, **(scaling or {"rope_type": "default"})}
        tables = {"full_attention": full, "sliding_attention": {"rope_theta": sliding, "rope_type": "default"}}
        return {"rope_parameters": tables}


def _one_spelling(given: Given, missing: Mapping[str, Any] = MappingProxyType({})) -> Given:
    new, old = given.take("rope_parameters", None), given.take("rope_scaling", None)
    if new is not None and old is not None:
        raise given.problem("rope_scaling", "is given together with rope_parameters. Keep only one of them")
    if new is None and old is None:
        return Given(missing, given.where)
    return given.within("rope_scaling", old) if new is None else given.within("rope_parameters", new)


def _read_parameters(
    given: Given,
    base: float | None,
    default_base: float,
    max_seq_len: int,
    scalings: tuple[str, ...],
    original: int | None = None,
) -> Settings:
    base = _agreed(given, "rope_theta", base)
    kind = given.take("rope_type", None, "type") or "default"
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    found: Settings = {"position_base": default_base if base is None else base}
    if kind == "default":
        return found
    if kind not in scalings:
        known = f"it supports {' and '.join(scalings)} here" if scalings else "it supports none here"
        reason = _REFUSED_SCALINGS.get(kind, known) if isinstance(kind, str) else known
        raise given.problem(
            "rope_type" if given.has("rope_type") else "type", f"is a scaling that SheepOp does not support: {reason}"
        )
    if kind == "longrope":
        return {**found, **_read_longrope(given, original, max_seq_len)}
    scaling: Settings = {"kind": kind}
    for name in _KEYS[kind]:
        whole = name == "original_max_seq_len"
        wanted = bool if name == "truncate" else int if whole else float
        theirs = _RENAMED.get(name, name)
        default = max_seq_len if whole else _DEFAULTS.get(kind)
        scaling[name] = given.typed(theirs, wanted, default, optional=True)
    if kind == "yarn":
        _complete_yarn(given, scaling, max_seq_len)
    found["rotary_scaling"] = scaling
    return found


def _complete_yarn(given: Given, scaling: Settings, max_seq_len: int) -> None:
    """Adds what transformers derives: the factor from the two lengths, and the attention factor from mscale."""
    scale = given.typed("mscale", float, None, optional=True)
    scale_all = given.typed("mscale_all_dim", float, None, optional=True)
    if scaling["factor"] is None and scaling["original_max_seq_len"]:
        scaling["factor"] = max_seq_len / scaling["original_max_seq_len"]
    factor = scaling["factor"]
    if scaling["attention_factor"] is None and scale and scale_all and factor is not None and factor > 1:
        scaling["attention_factor"] = yarn_attention_factor(factor, scale) / yarn_attention_factor(factor, scale_all)
    for name in ("beta_fast", "beta_slow"):
        scaling[name] = scaling[name] or None  # transformers treats 0 as absent


def _agreed(given: Given, name: str, outside: float | None) -> float | None:
    inside = given.typed(name, float, None, optional=True)
    if inside is not None and outside is not None and inside != outside:
        raise given.problem(name, f"contradicts the {outside} outside this table")
    return outside if inside is None else inside


def _refuse_the_rest(given: Given) -> None:
    if left := [name for name in given.unread() if given.has(name)]:
        raise given.problem(left[0], "is a key that SheepOp does not know here, and it might affect the positions")


def _written_scaling(config: ModelConfig, scalings: tuple[str, ...]) -> Settings | None:
    scaling = config.rotary_scaling
    if scaling is None or scaling.kind not in scalings:
        return None
    keys: Settings = {_RENAMED.get(name, name): getattr(scaling, name) for name in _KEYS[scaling.kind]}
    if scaling.pair_factors is not None:
        # The network has one table, which is written as both.
        keys |= {_SHORT: list(scaling.pair_factors), _LONG: list(scaling.pair_factors)}
    return {"rope_type": scaling.kind, **keys}


def _read_longrope(given: Given, outside: int | None, max_seq_len: int) -> Settings:
    """Returns the scaling and the context length for which it is valid; `outside` is the key outside the table."""
    original = given.typed(ORIGINAL, int, outside, optional=True, largest=LARGEST_CONTEXT)
    if original is None or original < 2:
        raise given.problem(ORIGINAL, "is not a length, which longrope needs")
    if outside not in (None, original):
        raise given.problem(ORIGINAL, f"contradicts the {outside} outside this table")
    factor = given.typed("factor", float, None, optional=True)
    short, long = given.entries(_SHORT, float, None), given.entries(_LONG, float, None)
    if not long:
        raise given.problem(_LONG, "is empty")
    scaling = {
        "kind": "longrope",
        "factor": max(1.0, max_seq_len / original) if factor is None else factor,
        "original_max_seq_len": original,
        "attention_factor": given.typed("attention_factor", float, None, optional=True),
        "pair_factors": tuple(short),
    }
    return {"rotary_scaling": scaling, "max_seq_len": max_seq_len if short == long else min(max_seq_len, original)}


def longrope_note(config: ModelConfig, given: Any) -> list[str]:
    """Returns a note for the user if the context is shorter than `given`, that of the source."""
    scaling = config.rotary_scaling
    if scaling is None or scaling.kind != "longrope" or not isinstance(given, int) or given <= config.max_seq_len:
        return []
    return [
        f"The model has different rotary angles for texts longer than {config.max_seq_len} tokens (longrope), which "
        f"SheepOp does not support: the import has a context of {config.max_seq_len} tokens, not of {given}."
    ]
