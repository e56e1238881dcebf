"""Adapters of single rows: in a pass, every row of the batch has an adapter of its own, or none.

One product with W serves all rows; the rows of each adapter are gathered for its product ``s B A x``, and the result is
added to them (Chen et al. 2023, Punica).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from sheepop.adapt.lora import LowRank, Parts, adaptable, adapted_layers, target_layers
from sheepop.core.errors import UsageError
from sheepop.model import Transformer
from sheepop.model.attention.latent import LatentAttention

_NUMBERS = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The changes of an adapter by the path of their layer; no other adapter of this process has its `number`."""

    changes: Mapping[str, LowRank]
    number: int = field(default_factory=lambda: next(_NUMBERS))

    @classmethod
    def of(cls, model: Transformer, name: str) -> Adapter:
        """The adapter `name` of a network, whose memory it shares."""
        layers = adapted_layers(model).items()
        return cls({path: layer.changes[name] for path, layer in layers if name in layer.changes})  # type: ignore[misc]

    @property
    def num_bytes(self) -> int:
        """The size of its weights."""
        return sum(weight.nbytes for change in self.changes.values() for weight in change.parameters())


class RowAdapters(Parts):
    """A copy of `model` that shares its weights, and in which the rows of a pass have the adapters of `select`."""

    def __init__(self, model: Transformer) -> None:
        self.network = model.sharing_copy().eval()
        # Attention to latents reads these matrices as a whole.
        whole = [path for path, layer in model.named_modules() if isinstance(layer, LatentAttention)]
        self._whole = {f"{path}.{name}" for path in whole for name in ("k_proj", "v_proj")}
        # Not the output projection, which reads the tokens to predict: a row has none or several.
        self._paths = set(target_layers(self.network, ("*", "embedding"))) - self._whole
        for path in self._paths:
            layer = adaptable(self.network, path)
            layer.of_rows, layer.path = self, path
        for number, native in enumerate(model.layers):
            if hasattr(native, "with_adapters"):
                self.network.blocks[number] = cast(Any, native).with_adapters(self.network.layers[number], self)
        self.selected: list[tuple[Adapter, Tensor | None]] = []
        self._count = 0

    def require(self, adapter: Adapter) -> None:
        """Raises `UsageError` for an adapter of a layer that rows cannot change."""
        for path in adapter.changes:
            if path in self._whole:
                raise UsageError(
                    f"The adapter changes {path}, which latent attention applies to all requests at a time. Merge the "
                    "adapter into the model, and serve that."
                )
            if path == "lm_head":
                raise UsageError(
                    "The adapter changes the output projection, which all requests share. Merge the adapter into the "
                    "model, and serve that."
                )
            if path not in self._paths:
                raise UsageError(f"The adapter changes {path}, which is no layer of the served model.")

    def select(self, adapters: Sequence[Adapter | None]) -> Transformer:
        """Returns the network for a pass whose rows have these adapters, in order."""
        self._count, device = len(adapters), self.network.device
        self.selected = []
        for adapter in dict.fromkeys(each for each in adapters if each is not None):
            rows = [number for number, each in enumerate(adapters) if each is adapter]
            self.selected.append((adapter, None if len(rows) == self._count else torch.tensor(rows, device=device)))
        return self.network

    def of(self, path: str, count: int) -> Iterable[tuple[LowRank, Tensor | None]]:
        """See `Parts.of`; raises `ValueError` if the pass has another number of rows than was selected."""
        if count != self._count:
            raise ValueError(f"adapters were selected for {self._count} rows, and {path} got {count}")
        return [(adapter.changes[path], rows) for adapter, rows in self.selected if path in adapter.changes]
