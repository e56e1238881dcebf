"""Keys and values of tokens already seen, so that a new token runs the network on one position only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import Attending, AttentionKind, Score
from sheepop.model.config import ModelConfig


class Cache(Protocol):
    """What the network needs of a key-value store. How it lies in memory, and by which kernel, is the store's affair.

    Rows may hold different numbers of tokens. The network begins a pass with `begin`, asks `prepare` once for each kind
    of layer, lets every layer `attend`, and ends the pass with `advance`.
    """

    @property
    def lengths(self) -> Tensor:
        """How many tokens each row holds (B,), int64, on the device."""

    @property
    def longest(self) -> int:
        """The greatest of `lengths`, known without asking the device."""

    def begin(self, num_tokens: int, counts: Sequence[int] | None = None) -> tuple[Tensor | None, int]:
        """Says that T tokens more come in every row, of which the first `counts[b]` are real (all when None).

        Returns their positions behind those that a row holds, (B, T) or (1, T), None where they are 0, 1, 2, ...; and
        how many tokens the longest row will hold.
        """

    def preceding(self, place: str, new: Tensor, count: int) -> Tensor:
        """The last `count` entries of every row (B, count, ...) at a place of the network, 0 where there are none.

        `new` (B, T, ...) come next. Asked between `begin` and `advance`, at each place in every pass or in none.
        """

    def prepare(self, kind: AttentionKind) -> Attending:
        """Makes ready what the layers of a kind share in this pass: the new tokens see themselves and what is held."""

    def attend(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score
    ) -> Tensor:
        """Stores new keys and values of a layer and attends over all that it holds then (B, H, T, C)."""

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values (B, K, S, C) of an encoder's states in one layer: made by `project` once, then kept."""

    def advance(self) -> None:
        """Makes the tokens of this pass part of the past; called when the last layer has stored them."""


def shifted(new: Tensor, most: int, document_ids: Tensor | None, cache: Cache | None, place: str) -> list[Tensor]:
    """What stands 1, 2, ... `most` places before each entry of `new` (B, T, ...), 0 where a row or document begins.

    `document_ids` (B, T) number the documents of a row; `cache` knows what came before `new` at this place.
    """
    num_tokens = new.shape[1]
    held = new.new_zeros(len(new), most, *new.shape[2:]) if cache is None else cache.preceding(place, new, most)
    joined, found = torch.cat((held, new), dim=1), []
    for back in range(1, most + 1):
        earlier = joined[:, most - back : most - back + num_tokens]
        if document_ids is not None:
            same = document_ids == functional.pad(document_ids, (back, 0), value=-1)[:, :num_tokens]
            earlier = earlier * same.view(*same.shape, *(1 for _ in new.shape[2:]))
        found.append(earlier)
    return found


class KeyValueCache:
    """A dense cache (B, K, capacity, C) per layer, allocated once.

    The token at position p of a row stands in slot p. What follows a row's last token is never seen: a query sees the
    slots up to its own, and a slot is written before any query stands there. Keys and values of an encoder's states are
    kept as they come, since they are complete at once.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (config.num_layers, batch_size, config.kv_heads, capacity)
        self._keys = torch.zeros(*shape, config.head_size, device=device, dtype=dtype)
        self._values = torch.zeros(*shape, config.value_size, device=device, dtype=dtype)
        self._capacity = capacity
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        self._tails: dict[str, Tensor] = {}
        self._lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        # The same numbers for the host, which need not wait for the device to tell them.
        self._held = [0] * batch_size
        # Of the pass that goes on: tokens in a row, real ones of each row, tokens of the longest row behind it, and
        # where tokens are stored (rows, columns, slots) if not in the same slots of every row.
        self._num_tokens, self._end = 0, 0
        self._counts: list[int] = []
        self._slots: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def lengths(self) -> Tensor:
        """How many tokens each row holds (B,)."""
        return self._lengths

    @property
    def longest(self) -> int:
        """How many tokens the longest row holds."""
        return max(self._held)

    def begin(self, num_tokens: int, counts: Sequence[int] | None = None) -> tuple[Tensor | None, int]:
        """Finds slots for T tokens more, or the first `counts[b]` of them; raises `ValueError` when they do not fit."""
        given = [num_tokens] * len(self._held) if counts is None else list(counts)
        if len(given) != len(self._held) or not all(0 <= count <= num_tokens for count in given):
            raise ValueError(f"counts {given} do not fit {len(self._held)} rows of {num_tokens} tokens")
        end = max(held + count for held, count in zip(self._held, given, strict=True))
        if end > self._capacity:
            raise ValueError(f"the cache holds {self._capacity} positions; {end} were asked for")
        self._num_tokens, self._end, self._counts, self._slots = num_tokens, end, given, None
        offsets = torch.arange(num_tokens, device=self._lengths.device)
        even = min(self._held) == self.longest == end - num_tokens
        if even and min(given) == num_tokens:
            return None if end == num_tokens else (offsets + self.longest)[None], end
        real = torch.tensor(given, device=offsets.device)[:, None]
        if not even:
            row, column = (offsets < real).nonzero(as_tuple=True) if counts is not None else self._all(num_tokens)
            self._slots = row, column, self._lengths[row] + column
        # Where rows hold the same number, padding is stored too, where the next tokens of its row will stand. It shares
        # the position of the last token before it: there may be none behind.
        return (self._lengths[:, None] + offsets.minimum(real - 1)).clamp(min=0), end

    def _all(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """The rows and columns of all new tokens, without asking the device how many there are."""
        columns = torch.arange(num_tokens, device=self._lengths.device)
        rows = torch.arange(len(self._held), device=self._lengths.device)
        return rows.repeat_interleave(num_tokens), columns.repeat(len(rows))

    def preceding(self, place: str, new: Tensor, count: int) -> Tensor:
        """What the last passes left of a place; the last real entries of `new` are kept for the next one."""
        held = self._tails.get(place)
        if held is None:
            held = new.new_zeros(len(new), count, *new.shape[2:])
        joined = torch.cat((held, new), dim=1)
        if min(self._counts) == new.shape[1]:
            self._tails[place] = joined[:, -count:]
        else:
            first = torch.tensor(self._counts, device=new.device)[:, None]
            rows = torch.arange(len(new), device=new.device)[:, None]
            self._tails[place] = joined[rows, first + torch.arange(count, device=new.device)]
        return held

    def prepare(self, kind: AttentionKind) -> Attending:
        """A mask tells rows of different length apart; without one, rows of the same length take the usual kernels."""
        starts = None if self._slots is None else self._lengths
        return prepare_attention(kind, kind.sight(self._num_tokens, self._end, starts=starts))

    def attend(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score
    ) -> Tensor:
        """Stores T new positions of one layer behind the old ones, and attends to as many as the longest row holds."""
        keys_BKSC, values_BKSC = self._keys[layer], self._values[layer]
        if k_BKTC.shape[0] != keys_BKSC.shape[0]:
            raise ValueError(f"the cache holds {keys_BKSC.shape[0]} sequences; {k_BKTC.shape[0]} were given")
        for held, new in ((keys_BKSC, k_BKTC), (values_BKSC, v_BKTC)):
            if self._slots is None:
                held[:, :, self._end - self._num_tokens : self._end] = new
            else:
                row, column, slot = self._slots
                held[row, :, slot] = new[row, :, column]
        return attending.attend(q_BHTC, keys_BKSC[:, :, : self._end], values_BKSC[:, :, : self._end], score)

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What `project` gave when the layer first asked."""
        if layer not in self._memory:
            self._memory[layer] = project()
        return self._memory[layer]

    def advance(self) -> None:
        """Makes the tokens of this pass part of the past."""
        self._held = [held + count for held, count in zip(self._held, self._counts, strict=True)]
        even = min(self._counts) == max(self._counts)
        more = self._counts[0] if even else torch.tensor(self._counts, device=self._lengths.device)
        self._lengths = self._lengths + more

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keeps the rows with these indices, in this order; a row may be named more than once."""
        chosen = torch.tensor(rows, device=self._lengths.device)
        self._keys, self._values = self._keys[:, chosen], self._values[:, chosen]
        self._memory = {layer: (keys[chosen], values[chosen]) for layer, (keys, values) in self._memory.items()}
        self._tails = {place: held[chosen] for place, held in self._tails.items()}
        self._lengths, self._held = self._lengths[chosen], [self._held[row] for row in rows]
