"""Ring attention: every rank keeps its queries, and keys and values go from rank to rank (Liu et al. 2023).

A rank's queries see all keys of earlier ranks, no keys of later ranks, and the causal triangle of their own; the
results are merged by the logsumexps of their scores. The ring is torch's own context parallelism, over the flash
attention of the device. Tokens are split over ranks in their order, so the last of n ranks computes n blocks and the
first computes one: torch's load-balancing order would tear apart the neighbouring tokens that convolutions and n-grams
need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as engine

from sheepop.model.attention.fused import repeat_heads
from sheepop.model.attention.kernel import PLAIN, Attending, AttentionKind, Score
from sheepop.parallel.ulysses import SharedRows

_TOKENS = 2  # the dimension of (B, H, T, C)


class RingRows(SharedRows):
    """As `SharedRows`, for rows of one document each; keys and values go round instead of an exchange for heads."""

    has_documents = False

    def prepare(self, window: int | None, kind: Callable[[], AttentionKind]) -> Attending:
        """Returns the ring, for this rank's tokens and heads."""
        features = kind().features
        if features or window is not None:
            raise ValueError(f"a ring has no {' and no '.join(sorted(features)) or 'windows'}")
        return Ring(self._ranks.group)

    def attend(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score
    ) -> Tensor:
        """Attends from this rank's queries to all keys before them."""
        return attending.attend(q_BHTC, k_BKTC, v_BKTC, score)


@dataclass(frozen=True)
class Ring:
    """Causal attention over the ranks of `group`, which have equally many tokens each, in their order."""

    group: dist.ProcessGroup

    def attend(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, score: Score = PLAIN) -> Tensor:
        """Returns (B, H, T, C) for this rank's T tokens; keys and values are sent with K heads, not repeated to H."""
        found: Tensor = _Ring.apply(q_BHTC, k_BKSC, v_BKSC, self.group, score.scale)  # type: ignore[no-untyped-call]
        return found


class _Ring(torch.autograd.Function):
    """One round forwards; one round backwards, in which the gradients of keys and values travel along."""

    @staticmethod
    def forward(
        ctx: Any, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, group: dist.ProcessGroup, scale: float | None
    ) -> Tensor:
        with _in_token_order():
            out, logsumexp, *ctx.rest = engine._templated_ring_attention(
                group, _TOKENS, cast(Any, _attend), q_BHTC, k_BKTC, v_BKTC, is_causal=True, scale=scale
            )
        ctx.group, ctx.scale = group, scale
        ctx.save_for_backward(q_BHTC, k_BKTC, v_BKTC, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = (ctx.group, _TOKENS, cast(Any, _attend_backward), gradients[0], "gradient", *ctx.saved_tensors)
        with _in_token_order():
            of_q, of_k, of_v = cast(Any, engine._templated_ring_attention_backward)(
                *given, is_causal=True, scale=ctx.scale, rest=ctx.rest
            )
        return of_q, of_k, of_v, None, None


@contextmanager
def _in_token_order() -> Iterator[None]:
    """Sets torch's ring to send to the neighbour and to take the ranks' tokens in their order."""
    options = engine._cp_options
    before = options.enable_load_balance, options.rotate_method
    options.enable_load_balance, options.rotate_method = False, engine._RotateMethod.ALL_TO_ALL
    try:
        yield
    finally:
        options.enable_load_balance, options.rotate_method = before


def _attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> Sequence[Any]:
    """Returns attention to one block of keys, the logsumexps of its scores, and what `_attend_backward` takes as rest.

    On a GPU the rest are cumulative lengths and the state of the dropout, which is off.
    """
    heads, aten = query.shape[1], torch.ops.aten
    given = (query, repeat_heads(key, heads), repeat_heads(value, heads))
    if query.device.type == "cpu":
        return tuple(aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, is_causal, scale=scale))
    return tuple(aten._scaled_dot_product_flash_attention(*given, 0.0, is_causal, False, scale=scale)[:8])


def _attend_backward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    gradient: Tensor,
    scale: float | None,
    rest: Sequence[Any],
) -> Sequence[Tensor]:
    """Returns one block's gradients of queries, keys and values; `out` and `logsumexp` are those of all blocks."""
    heads, aten = query.shape[1], torch.ops.aten
    given = (gradient, query, repeat_heads(key, heads), repeat_heads(value, heads), out, logsumexp)
    if query.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, is_causal, scale=scale)
    else:
        *rows, seed, offset = rest
        found = aten._scaled_dot_product_flash_attention_backward(
            *given, *rows, 0.0, is_causal, seed, offset, scale=scale
        )
    of_query, *others = found
    return of_query, *(each.unflatten(1, (key.shape[1], -1)).sum(2, dtype=torch.float32) for each in others)
