"""Named places in a network where its numbers can be read or changed while it runs.

A probe is the identity. Every number that matters passes one: the embedding, with and without positions, norms,
queries, keys and values before and after rotation, scores, weights, head outputs, both branches of a block, the
residual stream, the feed-forward layer inside, the final norm, the logits. Its name is the path of the module that
owns it and its own, ``blocks.0.attention.scores``. Every probe of a network is passed in every forward pass: where
nothing is rotated, ``rotated_q`` sees what enters the scores all the same.

A feed-forward layer shows its ``pre_activation``, with a gate also what the gate is multiplied by, ``up``, and its
``hidden`` units. A layer of experts shows, for the N tokens of all rows, ``router.logits`` (N, E), the experts that
were chosen, ``router.chosen`` (N, k), and their weights, ``router.weights`` (N, k). Inside of its ``experts`` rows are
sorted by expert: ``order`` (N k,) says of each row that it is choice ``order % k`` of token ``order // k``. What comes
out is ``routed_output`` and ``shared_output`` (B, T, D).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

from torch import Tensor, nn

# Sees the tensor at a probe; what it returns goes on in its place, None leaves it as it is.
Observer = Callable[[Tensor], Tensor | None]


class Probe:
    """The identity, until someone watches. No module: a call costs less than that of a module would."""

    __slots__ = ("observers",)

    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()

    def __call__(self, value: Tensor) -> Tensor:
        """The tensor as it came, or as the observers changed it."""
        for observe in self.observers:
            changed = observe(value)
            value = value if changed is None else changed
        return value


def named_probes(model: nn.Module) -> dict[str, Probe]:
    """All probes of `model`, in the order of its modules."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Probe)
    }


@contextmanager
def watch(model: nn.Module, observers: Mapping[str, Observer]) -> Iterator[None]:
    """Calls each observer with the tensor that passes the probe of its name, until the context is left.

    Names may be patterns, ``blocks.*.attention.weights``. Attention is computed step by step while its scores or
    weights are watched. Raises `KeyError` for a name that no probe has. For models that are not compiled; a compiled
    one notices its observers when it is compiled anew.
    """
    probes = named_probes(model)
    chosen = [(probe, observe) for name, observe in observers.items() for probe in _matching(probes, name)]
    for probe, observe in chosen:
        probe.observers = (*probe.observers, observe)
    try:
        yield
    finally:
        for probe, observe in chosen:
            # One of them: the same observer may be there from a context around this one.
            last = len(probe.observers) - 1 - probe.observers[::-1].index(observe)
            probe.observers = probe.observers[:last] + probe.observers[last + 1 :]


@contextmanager
def record(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """The tensors that pass the probes of these names (or patterns), the last of each, detached."""
    values: dict[str, Tensor] = {}

    def keeper(name: str) -> Observer:
        def keep(value: Tensor) -> None:
            values[name] = value.detach()

        return keep

    probes = named_probes(model)
    found = {id(probe): name for name, probe in probes.items()}
    wanted = [found[id(probe)] for name in names for probe in _matching(probes, name)]
    with watch(model, {name: keeper(name) for name in wanted}):
        yield values


def _matching(probes: Mapping[str, Probe], pattern: str) -> list[Probe]:
    matching = [probe for name, probe in probes.items() if fnmatchcase(name, pattern)]
    if not matching:
        nearest = difflib.get_close_matches(pattern, probes, n=3, cutoff=0.4) or list(probes)[:3]
        raise KeyError(f"no probe is named {pattern!r}; the nearest are {', '.join(nearest)}")
    return matching
