"""Probes: named points in a network where values can be read or changed while it runs.

A probe is the identity function. There is one at every important value: the embedding, with and without positions,
norms, queries, keys and values before and after rotation, scores, weights, head outputs, both branches of a block, the
residual stream, the inside of the feed-forward layer, the final norm, the logits. Its full name is the path of its
module and its own name, ``blocks.0.attention.scores``. Every forward pass calls every probe of a network: without
rotary positions, ``rotated_q`` still sees the queries that enter the scores.

Latent attention has probes for its latents, ``kv_latent`` (B, T, L) and, if queries have one, ``q_latent``.

A feed-forward layer has probes for its ``pre_activation``, for the factor of the gate, ``up`` (only with a gate), and
for its ``hidden`` units. A layer of experts has, for the N tokens of all rows, ``router.logits`` (N, E), the chosen
experts, ``router.chosen`` (N, k), and their weights, ``router.weights`` (N, k). The rows inside ``experts`` are sorted
by expert: row i is choice ``order[i] % k`` of token ``order[i] // k``, where ``order`` (N k,) is a probe. The outputs
are ``routed_output`` and ``shared_output`` (B, T, D).
"""

from __future__ import annotations

import difflib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

# Receives the tensor at a probe and returns its replacement, or None to keep it.
Observer = Callable[[Tensor], Tensor | None]


class Probe:
    """The identity function, unless it is watched. It is not a module, because calling a module costs more.

    Observers belong to the context in which `watch` was entered, not to the probe: if two threads or tasks run one
    network at the same time, each observes its own pass. A copy of a network, such as the one that training steps run,
    shares the probes of the original, so watching the model shows what trains.
    """

    __slots__ = ()

    def __call__(self, value: Tensor) -> Tensor:
        """Returns the tensor unchanged, or as the observers changed it."""
        if not _contexts:
            return value
        for observe in self.observers:
            changed = observe(value)
            value = value if changed is None else changed
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Probe:
        """Returns the probe itself, so that copies of a network share it."""
        return self

    @property
    def observers(self) -> tuple[Observer, ...]:
        """This probe's observers in the current context, in call order; empty while the compiler traces."""
        if not _contexts or torch.compiler.is_compiling():
            return ()
        return _watched.get().get(self, ())


# All open `watch` contexts: if there are none, a probe costs no more than this check.
_contexts: list[object] = []
# The compiler's stance is global to the process: the first context changes it, and the last one restores it.
_uncompiled: list[AbstractContextManager[Any]] = []
_lock = threading.Lock()
_watched: ContextVar[Mapping[Probe, tuple[Observer, ...]]] = ContextVar("watched probes", default=MappingProxyType({}))


def someone_watches() -> bool:
    """Whether any probe is watched, in any context."""
    return bool(_contexts)


def named_probes(model: nn.Module) -> dict[str, Probe]:
    """Returns all probes of `model` by name, in the order of its modules."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Probe)
    }


@contextmanager
def watch(model: nn.Module, observers: Mapping[str, Observer]) -> Iterator[None]:
    """Calls each observer with the tensor at the probe of its name, until the context exits.

    Names may be patterns, ``blocks.*.attention.weights``. While scores or weights are watched, attention is computed
    step by step; while anything is watched, compiled modules run uncompiled, because compiled code has no probes.
    Raises `KeyError` for a name that matches no probe.
    """
    probes = named_probes(model)
    watched = dict(_watched.get())
    for name, observe in observers.items():
        for probe in _matching(probes, name):
            watched[probe] = (*watched.get(probe, ()), observe)
    token = _watched.set(watched)
    _open(token)
    try:
        yield
    finally:
        _close(token)
        _watched.reset(token)


@contextmanager
def record(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Records the last tensor, detached, at each probe that matches one of these names or patterns."""
    values: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        values[name] = value.detach()

    probes = named_probes(model)
    found = {id(probe): name for name, probe in probes.items()}
    wanted = [found[id(probe)] for name in names for probe in _matching(probes, name)]
    with watch(model, {name: partial(keep, name) for name in wanted}):
        yield values


def _open(context: object) -> None:
    with _lock:
        _contexts.append(context)
        # Loading the compiler takes seconds; if it is not loaded, nothing is compiled.
        if not _uncompiled and "torch._dynamo" in sys.modules:
            _uncompiled.append(torch.compiler.set_stance("force_eager"))
            _uncompiled[0].__enter__()


def _close(context: object) -> None:
    with _lock:
        _contexts.remove(context)
        if not _contexts and _uncompiled:
            _uncompiled.pop().__exit__(None, None, None)


def _matching(probes: Mapping[str, Probe], pattern: str) -> list[Probe]:
    if pattern in probes:
        return [probes[pattern]]
    matching = [probe for name, probe in probes.items() if fnmatchcase(name, pattern)]
    if not matching:
        nearest = difflib.get_close_matches(pattern, probes, n=3, cutoff=0.4) or list(probes)[:3]
        raise KeyError(f"no probe is named {pattern!r}; the nearest are {', '.join(nearest)}")
    return matching
