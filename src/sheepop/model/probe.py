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
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

# Sees the tensor at a probe; what it returns goes on in its place, None leaves it as it is.
Observer = Callable[[Tensor], Tensor | None]


class Probe:
    """The identity, until someone watches. No module: a call costs less than that of a module would.

    Observers belong to the context that `watch` was entered in, not to the probe: of two threads or tasks that run one
    network at the same time, each sees its own pass. A copy of a network, such as the one that training steps run on,
    has the probes of the original, so whoever watches the model sees what trains.
    """

    __slots__ = ()

    def __call__(self, value: Tensor) -> Tensor:
        """The tensor as it came, or as the observers changed it."""
        if not _contexts:
            return value
        for observe in self.observers:
            changed = observe(value)
            value = value if changed is None else changed
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Probe:
        """The probe itself; see above."""
        return self

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Who looks at this probe in the present context, in the order in which they are called.

        Nobody, where the compiler looks: see `watch`.
        """
        if not _contexts or torch.compiler.is_compiling():
            return ()
        return _watched.get().get(self, ())


# Of all contexts that watch something: while there is none, a probe costs no more than this look.
_contexts: list[object] = []
# The compiler's stance is one of the whole process: the first context changes it, and the last one changes it back.
_uncompiled: list[AbstractContextManager[Any]] = []
_lock = threading.Lock()
_watched: ContextVar[Mapping[Probe, tuple[Observer, ...]]] = ContextVar("watched probes", default=MappingProxyType({}))


def someone_watches() -> bool:
    """Whether any probe is watched at all, in whatever context."""
    return bool(_contexts)


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
    weights are watched, and what was compiled is run as it is written: compiled code has no probes. Raises `KeyError`
    for a name that no probe has.
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


def _open(context: object) -> None:
    with _lock:
        _contexts.append(context)
        # The compiler takes seconds to load; before it is loaded, nothing is compiled.
        if not _uncompiled and "torch._dynamo" in sys.modules:
            _uncompiled.append(torch.compiler.set_stance("force_eager"))
            _uncompiled[0].__enter__()


def _close(context: object) -> None:
    with _lock:
        _contexts.remove(context)
        if not _contexts and _uncompiled:
            _uncompiled.pop().__exit__(None, None, None)


def _matching(probes: Mapping[str, Probe], pattern: str) -> list[Probe]:
    matching = [probe for name, probe in probes.items() if fnmatchcase(name, pattern)]
    if not matching:
        nearest = difflib.get_close_matches(pattern, probes, n=3, cutoff=0.4) or list(probes)[:3]
        raise KeyError(f"no probe is named {pattern!r}; the nearest are {', '.join(nearest)}")
    return matching
