"""Which of our tensors are which of theirs: patterns of names, and how the numbers lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sheepop.checkpoint.exchange.layouts import ABSENT, INTERLEAVED, PER_EXPERT, SAME, Layout, Stacked
from sheepop.checkpoint.lazy_tensor import Shape
from sheepop.model.config import ModelConfig

_KINDS = ("weight", "bias")


@dataclass(frozen=True)
class TensorRule:
    """Names with ``{layer}``, theirs also with ``{expert}``; it holds where all of ours exist."""

    ours: tuple[str, ...]
    theirs: str
    layout: Layout = SAME


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of ours by name and shape, and theirs with the same numbers."""

    ours: Mapping[str, Shape]
    theirs: Mapping[str, Shape]
    layout: Layout


def same(ours: str, theirs: str, *, layout: Layout = SAME) -> tuple[TensorRule, ...]:
    """A layer's weight and bias."""
    return tuple(TensorRule((f"{ours}.{kind}",), f"{theirs}.{kind}", layout) for kind in _KINDS)


def fused(ours: Sequence[str], theirs: str, layout: Layout) -> tuple[TensorRule, ...]:
    """The weights, and the biases, of several of our layers in one of theirs."""
    return tuple(TensorRule(tuple(f"{name}.{kind}" for name in ours), f"{theirs}.{kind}", layout) for kind in _KINDS)


def groups(rules: Sequence[TensorRule], expected: Mapping[str, Shape], config: ModelConfig) -> Iterator[TensorGroup]:
    """Every rule at every layer where it holds, in the order of `expected`."""
    places = {name: place for place, name in enumerate(expected)}
    found = []
    for rule in rules:
        layers: Sequence[int] = range(config.num_layers) if "{layer}" in rule.ours[0] else (0,)
        for layer in layers:
            names = [name.replace("{layer}", str(layer)) for name in rule.ours]
            if all(name in expected for name in names):
                found.append((places[names[0]], _group(rule, names, layer, expected)))
    found.sort(key=lambda entry: entry[0])
    return (group for _, group in found)


def _group(rule: TensorRule, names: Sequence[str], layer: int, expected: Mapping[str, Shape]) -> TensorGroup:
    ours = {name: expected[name] for name in names}
    shapes = rule.layout.shapes(list(ours.values()))
    pattern = rule.theirs.replace("{layer}", str(layer))
    theirs = {pattern.replace("{expert}", str(number)): shape for number, shape in enumerate(shapes)}
    return TensorGroup(ours, theirs, rule.layout)


def experts(router: str, expert: str, names: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """A mixture of experts; `names` gives their name of the gate, up and down projection."""
    here = "blocks.{layer}.feed_forward"
    return (
        TensorRule((f"{here}.router.weight",), f"{router}.weight"),
        TensorRule((f"{here}.router.balance",), "", ABSENT),
        *(
            TensorRule((f"{here}.experts.{ours}_proj",), f"{expert}.{theirs}.weight", PER_EXPERT)
            for ours, theirs in names.items()
        ),
    )


QUERY_KEY_VALUE = tuple(f"blocks.{{layer}}.attention.{letter}_proj" for letter in "qkv")


def interleaved_attention(theirs: str) -> tuple[TensorRule, ...]:
    """Queries, keys and values of each head in turn (GPT-NeoX, BLOOM)."""
    return fused(QUERY_KEY_VALUE, theirs, INTERLEAVED)


def stacked(ours: Sequence[str], theirs: str, *, transposed: bool = False) -> tuple[TensorRule, ...]:
    """Layers of ours one below the other."""
    return fused(ours, theirs, Stacked(transposed))
