"""Keys and values of tokens already seen, so that a new token runs the network on one position only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from sheepop.model.config import ModelConfig


class Cache(Protocol):
    """What the network needs of a key-value store. S counts the slots in use after the update."""

    @property
    def length(self) -> int:
        """Slots in use in every row before this forward pass."""

    def update(self, layer: int, keys_BKTC: Tensor, values_BKTC: Tensor) -> tuple[Tensor, Tensor]:
        """Stores T new positions of one layer; returns all keys and values (B, K, S, C)."""

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, S, C) of an encoder's states in one layer: made by `project` once, then kept."""

    def key_mask(self, num_tokens: int) -> Tensor | None:
        """(B, S) True where a slot holds a real token once T more are stored, or None when every slot does."""

    def advance(self, num_tokens: int) -> None:
        """Called once per forward pass, after the last layer has stored its positions."""


class KeyValueCache:
    """A dense cache (B, K, capacity, C) per layer, allocated once.

    Rows of different length are left-padded: `padding` (B,) counts the slots at the start of each row that hold
    no token; they are never attended to. Keys and values of an encoder's states are kept as they come, since they are
    complete at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        padding: Tensor | None = None,
    ) -> None:
        shape = (config.num_layers, batch_size, config.kv_heads, capacity)
        self._keys = torch.zeros(*shape, config.head_size, device=device, dtype=dtype)
        self._values = torch.zeros(*shape, config.value_size, device=device, dtype=dtype)
        self._capacity = capacity
        self._length = 0
        self._padding = None if padding is None or not padding.any() else padding.to(device)
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Slots in use in every row, padding included."""
        return self._length

    def update(self, layer: int, keys_BKTC: Tensor, values_BKTC: Tensor) -> tuple[Tensor, Tensor]:
        """Stores T new positions of one layer behind the old ones; raises `ValueError` when they do not fit."""
        if keys_BKTC.shape[0] != self._keys.shape[1]:
            raise ValueError(f"the cache holds {self._keys.shape[1]} sequences; {keys_BKTC.shape[0]} were given")
        end = self._length + keys_BKTC.shape[2]
        if end > self._capacity:
            raise ValueError(f"the cache holds {self._capacity} positions; {end} were asked for")
        self._keys[layer, :, :, self._length : end] = keys_BKTC
        self._values[layer, :, :, self._length : end] = values_BKTC
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What `project` gave when the layer first asked."""
        if layer not in self._memory:
            self._memory[layer] = project()
        return self._memory[layer]

    def key_mask(self, num_tokens: int) -> Tensor | None:
        """(B, S) False at left padding; None when no row is padded."""
        if self._padding is None:
            return None
        slots = torch.arange(self._length + num_tokens, device=self._padding.device)
        return slots[None, :] >= self._padding[:, None]

    def advance(self, num_tokens: int) -> None:
        """Makes the T positions stored by this pass part of the past."""
        self._length += num_tokens

    def keep_rows(self, rows: Tensor) -> None:
        """Keeps the rows whose indices are in `rows` (B',), in this order; a row may be named more than once."""
        self._keys = self._keys[:, rows]
        self._values = self._values[:, rows]
        self._memory = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self._memory.items()}
        if self._padding is not None:
            self._padding = self._padding[rows]
