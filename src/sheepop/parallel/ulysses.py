"""Context parallelism by DeepSpeed Ulysses: ranks have parts of every row's tokens, and exchange tokens for heads.

All layers but attention process tokens one by one, so each rank runs them on its own tokens. Before attention each rank
sends its tokens of all heads and receives all tokens of some heads; after attention the exchange is reversed (Jacobs et
al. 2023). `sheepop.parallel.ring` is the other method. The network sees both as a cache that knows a row's other
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import Attending, AttentionKind, Score
from sheepop.model.cache import Cache, Recurrence
from sheepop.parallel.collectives import exchanged
from sheepop.parallel.parts import SharingRanks


class SharedRows(Cache):
    """The rows of one pass, whose tokens are split over `ranks` in their order.

    `documents` (B, T) numbers the documents of this rank's tokens; the numbers continue from rank to rank.
    """

    has_documents = True

    def __init__(self, ranks: SharingRanks, documents: Tensor | None, device: torch.device) -> None:
        self._ranks, self._documents, self._device = ranks, documents, device
        self._num_tokens = 0

    def begin(self, num_rows: int, num_tokens: int) -> tuple[Tensor, int]:
        """Returns the positions (1, T) of this rank's tokens, and the length of a row."""
        self._num_tokens = num_tokens
        first = self._ranks.rank * num_tokens
        return torch.arange(first, first + num_tokens, device=self._device)[None], self._ranks.size * num_tokens

    def preceding(self, place: str, new: Tensor, count: int) -> Tensor:
        """Returns the last `count` entries of the previous rank, zeros on the first rank."""
        if new.shape[1] < count:
            raise ValueError(f"{count} tokens before the first are needed, and ranks have {new.shape[1]} each")
        return exchanged(new[:, new.shape[1] - count :].contiguous(), _of_previous, _of_next, self._ranks)

    def recur(self, place: str, recurrence: Recurrence, start: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Raises `ValueError`: only the ranks before this one have the state."""
        raise ValueError(f"the {place} before a rank's tokens is not known")

    def prepare(self, window: int | None, kind: Callable[[], AttentionKind]) -> Attending:
        """Returns a kernel for whole rows and this rank's heads."""
        ranks, documents = self._ranks, self._documents
        if documents is not None:
            parts = [torch.empty_like(documents) for _ in range(ranks.size)]
            dist.all_gather(parts, documents.contiguous(), group=ranks.group)
            documents = torch.cat(parts, dim=1)
        whole = kind()
        slopes = None if whole.slopes is None else whole.slopes.chunk(ranks.size)[ranks.rank]
        own = replace(whole, cached=False, slopes=slopes)
        return prepare_attention(own, own.sight(ranks.size * self._num_tokens, document_ids=documents))

    def attend(
        self, layer: int, attending: Attending, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, score: Score
    ) -> Tensor:
        """Exchanges tokens for heads, attends, and exchanges back."""
        ranks = self._ranks
        q, k, v = (exchanged(tensor, _by_heads, _by_tokens, ranks) for tensor in (q_BHTC, k_BKTC, v_BKTC))
        if score.sinks is not None:
            score = score._replace(sinks=score.sinks.chunk(ranks.size)[ranks.rank])
        return exchanged(attending.attend(q, k, v, score), _by_tokens, _by_heads, ranks)

    def memory(self, layer: int, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Raises `ValueError`: there is no encoder."""
        raise ValueError("the rows of an encoder-decoder are not split over ranks")


def _by_heads(x_BHTC: Tensor, ranks: SharingRanks) -> Tensor:
    """Exchanges this rank's tokens of all heads for all tokens of its heads."""
    return _swapped(x_BHTC, ranks, 1, 2)


def _by_tokens(x_BHTC: Tensor, ranks: SharingRanks) -> Tensor:
    """Exchanges all tokens of this rank's heads for its tokens of all heads."""
    return _swapped(x_BHTC, ranks, 2, 1)


def _swapped(x_BHTC: Tensor, ranks: SharingRanks, given: int, taken: int) -> Tensor:
    sent = torch.stack(x_BHTC.chunk(ranks.size, given))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    return torch.cat(received.unbind(), taken)


def _of_previous(mine: Tensor, ranks: SharingRanks) -> Tensor:
    return _neighbour(mine, ranks, ranks.rank - 1)


def _of_next(mine: Tensor, ranks: SharingRanks) -> Tensor:
    return _neighbour(mine, ranks, ranks.rank + 1)


def _neighbour(mine: Tensor, ranks: SharingRanks, number: int) -> Tensor:
    parts = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(parts, mine.contiguous(), group=ranks.group)
    return parts[number] if 0 <= number < ranks.size else torch.zeros_like(mine)
