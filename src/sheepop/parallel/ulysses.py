"""Context parallelism: ranks have parts of every row's tokens, and exchange them for heads where attention needs all.

Everything but attention looks at one token at a time, and does so where the token is. Before attention each rank gives
its tokens of all heads away and gets all tokens of some heads; behind it the other way round (Jacobs et al. 2023,
"DeepSpeed Ulysses"); `sheepop.parallel.ring` has another way. To the network this is a cache: a store that knows what
other places of a row hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig
from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import Attending, AttentionKind, Score
from sheepop.model.cache import Cache
from sheepop.parallel.config import ParallelConfig


def check_context(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ConfigError` for a network whose rows cannot be split over so many ranks."""
    if parallel.context == 1:
        return
    needed, sizes = parallel.context * parallel.tensor, {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads}
    for name, size in sizes.items():
        if size % needed and parallel.context_method == "ulysses":
            with_tensor = f" times parallel.tensor = {parallel.tensor}" if parallel.tensor > 1 else ""
            raise ConfigError(
                f"parallel.context = {parallel.context}{with_tensor} does not divide model.{name} = {size}, of which "
                "every rank has a part in attention. Use a divisor, or parallel.context_method=ring."
            )
    if config.architecture != "decoder":
        raise ConfigError("parallel.context splits the rows of decoders. Use parallel.context=1.")
    if config.dropout:
        raise ConfigError(
            "parallel.context needs model.dropout = 0: ranks that have parts of a row would leave out the same places "
            "of each."
        )


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that have parts of the same rows, of which this one is number `rank` of `size`."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def columns(self, num_tokens: int) -> slice:
        """Which tokens of a row are here; raises `ValueError` where not all ranks can have as many."""
        if num_tokens % self.size:
            raise ValueError(f"rows of {num_tokens} tokens cannot be shared evenly by {self.size} ranks")
        each = num_tokens // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


class SharedRows(Cache):
    """What a pass knows of the tokens that other ranks have; `documents` (B, T) number those of this rank's.

    The numbers run on from rank to rank.
    """

    has_documents = True

    def __init__(self, ranks: ContextRanks, documents: Tensor | None, device: torch.device) -> None:
        self._ranks, self._documents, self._device = ranks, documents, device
        self._num_tokens = 0

    def begin(self, num_rows: int, num_tokens: int) -> tuple[Tensor, int]:
        """The positions (1, T) of this rank's tokens, and the length of a row."""
        self._num_tokens = num_tokens
        first = self._ranks.rank * num_tokens
        return torch.arange(first, first + num_tokens, device=self._device)[None], self._ranks.size * num_tokens

    def preceding(self, place: str, new: Tensor, count: int) -> Tensor:
        """The last entries of the rank before, 0 on the first."""
        if new.shape[1] < count:
            raise ValueError(f"{count} tokens before the first are asked for, and ranks have {new.shape[1]} each")
        last = new[:, new.shape[1] - count :].contiguous()
        found: Tensor = _OfTheRankBefore.apply(last, self._ranks)  # type: ignore[no-untyped-call]
        return found

    def prepare(self, kind: AttentionKind) -> Attending:
        """A kernel for whole rows and this rank's heads."""
        ranks, documents = self._ranks, self._documents
        if documents is not None:
            parts = [torch.empty_like(documents) for _ in range(ranks.size)]
            dist.all_gather(parts, documents.contiguous(), group=ranks.group)
            documents = torch.cat(parts, dim=1)
        slopes = None if kind.slopes is None else kind.slopes.chunk(ranks.size)[ranks.rank]
        kind = replace(kind, cached=False, slopes=slopes)
        return prepare_attention(kind, kind.sight(ranks.size * self._num_tokens, document_ids=documents))

    def attend(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score
    ) -> Tensor:
        """Tokens for heads, attention, and heads for tokens again."""
        ranks = self._ranks
        q, k, v = (_exchange(tensor, ranks, gathers_tokens=True) for tensor in (q_BHTC, k_BKTC, v_BKTC))
        if score.sinks is not None:
            score = score._replace(sinks=score.sinks.chunk(ranks.size)[ranks.rank])
        return _exchange(attending.attend(q, k, v, score), ranks, gathers_tokens=False)

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """There is no encoder."""
        raise ValueError("the rows of an encoder-decoder are not split over ranks")


def _exchange(x_BHTC: Tensor, ranks: ContextRanks, *, gathers_tokens: bool) -> Tensor:
    found: Tensor = _Exchanged.apply(x_BHTC, ranks, gathers_tokens)  # type: ignore[no-untyped-call]
    return found


class _Exchanged(torch.autograd.Function):
    """All heads of a part of the tokens for a part of the heads of all tokens, or back; the gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x_BHTC: Tensor, ranks: ContextRanks, gathers_tokens: bool) -> Tensor:
        ctx.ranks, ctx.gathers_tokens = ranks, gathers_tokens
        return _exchanged(x_BHTC, ranks, gathers_tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _exchanged(gradients[0], ctx.ranks, not ctx.gathers_tokens), None, None


def _exchanged(x_BHTC: Tensor, ranks: ContextRanks, gathers_tokens: bool) -> Tensor:
    given, taken = (1, 2) if gathers_tokens else (2, 1)
    sent = torch.stack(x_BHTC.chunk(ranks.size, given))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    return torch.cat(received.unbind(), taken)


class _OfTheRankBefore(torch.autograd.Function):
    """What the rank before gives here, 0 on the first; the gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, ranks: ContextRanks) -> Tensor:
        ctx.ranks = ranks
        return _neighbour(mine, ranks, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _neighbour(gradients[0].contiguous(), ctx.ranks, 1), None


def _neighbour(mine: Tensor, ranks: ContextRanks, step: int) -> Tensor:
    parts = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(parts, mine, group=ranks.group)
    number = ranks.rank + step
    return parts[number] if 0 <= number < ranks.size else torch.zeros_like(mine)
