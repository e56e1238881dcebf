"""Ring attention: every rank keeps its queries, and keys and values go from rank to rank (Liu et al. 2023).

Of the keys that have arrived, a rank's queries see all where they stand before its own, none where they stand behind,
and their triangle where they are its own; the results are merged by the logsumexps of their scores. The ring is torch's
own context parallelism, over the flash attention of the device. Ranks have tokens side by side, so that the last one
has all n blocks of keys to look at and the first one block: torch's other order, which evens that out, would tear apart
what convolutions and n-grams need in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as engine

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig
from sheepop.model.attention.fused import repeat_heads
from sheepop.model.attention.kernel import PLAIN, Attending, AttentionKind, Score
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.ulysses import SharedRows

_TOKENS = 2  # the dimension of (B, H, T, C)
_CAPABILITY = (8, 0)  # of the GPUs that compute FlashAttention: Ampere
_MULTIPLE, _WIDEST = 8, 256  # of its heads


def check_ring(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ConfigError` for a network whose attention a ring does not compute."""
    if parallel.context_method != "ring":
        return
    refused = {
        "model.position_encoding = alibi": config.position_encoding == "alibi",
        "model.sliding_window": config.sliding_window is not None,
        "model.attention_soft_cap": config.attention_soft_cap is not None,
        "model.attention_sinks": config.attention_sinks,
        "a model.value_head_dim of its own": config.value_size != config.head_size,
        f"model.attention_backend = {config.attention_backend}": config.attention_backend not in ("auto", "sdpa"),
    }
    for name in (name for name, is_so in refused.items() if is_so):
        raise ConfigError(
            f"parallel.context_method = ring is for plain causal attention, and not for {name}. Leave that out, or use "
            "parallel.context_method=ulysses."
        )


def check_ring_here(config: ModelConfig, parallel: ParallelConfig, device: str, precision: str) -> None:
    """Raises `ConfigError` where the flash attention of `device` does not compute this network in `precision`."""
    if parallel.context_method != "ring" or device == "cpu":
        return
    if (refused := _lacking(config, device, precision)) is not None:
        raise ConfigError(
            "parallel.context_method = ring is computed by FlashAttention, which needs an NVIDIA GPU (Ampere or "
            f"newer), two bytes a number, and heads of a multiple of {_MULTIPLE} up to {_WIDEST}, and has nothing for "
            f"{refused}. Use parallel.context_method=ulysses."
        )


def _lacking(config: ModelConfig, device: str, precision: str) -> str | None:
    if device != "cuda":
        return f"device = {device}"
    if precision == "fp32":
        return "training.precision = fp32"
    if config.head_size % _MULTIPLE or config.head_size > _WIDEST:
        return f"model.head_dim = {config.head_size}"
    return "this GPU" if torch.cuda.get_device_capability() < _CAPABILITY else None


class RingRows(SharedRows):
    """As `SharedRows`, of one document a row; keys and values come by instead of being exchanged for heads."""

    has_documents = False

    def prepare(self, kind: AttentionKind) -> Attending:
        """The ring, for the tokens and the heads that are here."""
        if kind.features or kind.window is not None:
            raise ValueError(f"a ring has no {' and no '.join(sorted(kind.features)) or 'windows'}")
        return Ring(self._ranks.group)

    def attend(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score
    ) -> Tensor:
        """Attention of the queries that are here to all keys before them."""
        return attending.attend(q_BHTC, k_BKTC, v_BKTC, score)


@dataclass(frozen=True)
class Ring:
    """Causal attention over the ranks of `group`, each of which has as many tokens, in their order."""

    group: dist.ProcessGroup

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """There is no mask."""
        return ()

    def attend(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, score: Score = PLAIN) -> Tensor:
        """(B, H, T, C), of the T tokens that are here; keys and values are sent as they are, K heads."""
        found: Tensor = _Ring.apply(q_BHTC, k_BKSC, v_BKSC, self.group, score.scale)  # type: ignore[no-untyped-call]
        return found


class _Ring(torch.autograd.Function):
    """Once round forwards; and once round backwards, with the gradients of keys and values behind them."""

    @staticmethod
    def forward(
        ctx: Any, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, group: dist.ProcessGroup, scale: float | None
    ) -> Tensor:
        with _side_by_side():
            out, logsumexp, *ctx.rest = engine._templated_ring_attention(
                group, _TOKENS, cast(Any, _attended), q_BHTC, k_BKTC, v_BKTC, is_causal=True, scale=scale
            )
        ctx.group, ctx.scale = group, scale
        ctx.save_for_backward(q_BHTC, k_BKTC, v_BKTC, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = (ctx.group, _TOKENS, cast(Any, _went_back), gradients[0], "gradient", *ctx.saved_tensors)
        with _side_by_side():
            of_q, of_k, of_v = cast(Any, engine._templated_ring_attention_backward)(
                *given, is_causal=True, scale=ctx.scale, rest=ctx.rest
            )
        return of_q, of_k, of_v, None, None


@contextmanager
def _side_by_side() -> Iterator[None]:
    """Lets torch's ring send to the neighbour, and take the tokens of ranks in their order."""
    options = engine._cp_options
    before = options.enable_load_balance, options.rotate_method
    options.enable_load_balance, options.rotate_method = False, engine._RotateMethod.ALL_TO_ALL
    try:
        yield
    finally:
        options.enable_load_balance, options.rotate_method = before


def _attended(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> Sequence[Any]:
    """What queries find in a block of keys, the logsumexps of their scores, and what `_went_back` needs besides.

    FlashAttention of a GPU also numbers the rows it was given, and the dropout that there is not. Everything but the
    call of that operation, here and in `_went_back`, is the same on a CPU.
    """
    heads, aten = query.shape[1], torch.ops.aten
    given = (query, repeat_heads(key, heads), repeat_heads(value, heads))
    if query.device.type == "cpu":
        return tuple(aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, is_causal, scale=scale))
    return tuple(aten._scaled_dot_product_flash_attention(*given, 0.0, is_causal, False, scale=scale)[:8])


def _went_back(
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
    """The gradients that queries, keys and values have by a block; `out` and `logsumexp` are those of all blocks."""
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
