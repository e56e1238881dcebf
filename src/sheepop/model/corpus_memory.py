"""A memory of a corpus: corrections to the logits of tokens that followed the same context before.

The memory finds the longest context that the corpus knows, and shorter ones that it knows better; and it finds the same
in the row of tokens before a prediction. A small network, the gate, sees how often a token followed each of them and
what the language model makes of it, and corrects the logit of that token. All other logits stay, and the softmax makes
a distribution of the result.

Retrieval of what followed in a corpus: Khandelwal et al. 2020 and Liu et al. 2024 (infini-gram). Corrections of logits
from counts are those of context mixing (Mahoney 2005), for many tokens in place of two bits.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.corpus_index import CorpusIndex

# A level is the longest context that the corpus has at least so often, or that the row has.
LEVELS = (1, 3, 12, 48)
ROW_LEVELS = (1, 3)
_ROW_LONGEST = 32  # tokens of the longest context that is looked for in the row
_SAMPLES = 32  # places of each level that are read: of the corpus evenly spaced, of the row the best and newest
_NOTHING = -1
_CANDIDATES = 32  # tokens of a position that are corrected
_HIDDEN = 32


class Recalled(NamedTuple):
    """What followed the contexts of N positions: `tokens` (N, C), each once, and how many of the places read have it.

    `shares` (N, C, J) are the shares of a token at each level, 0 for places without a token. Of the levels, `lengths`
    (N, J) are the tokens of the context, `counts` the number of its places, and `kinds` how many different tokens were
    read.
    """

    tokens: Tensor
    shares: Tensor
    lengths: Tensor
    counts: Tensor
    kinds: Tensor

    def rows(self, chosen: Tensor | slice) -> Recalled:
        """Returns what was found for some of the positions."""
        return Recalled(*(each[chosen] for each in self))


class Expected(NamedTuple):
    """What the network alone expects: the log-probabilities of the recalled tokens (N, C), the entropy (N,) in nats."""

    logprobs: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, logprobs_NV: Tensor, recalled: Recalled) -> Expected:
        """Reads them from log-probabilities."""
        entropy = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        return cls(logprobs_NV.gather(1, recalled.tokens), entropy)

    def rows(self, chosen: Tensor | slice) -> Expected:
        """Returns what was found for some of the positions."""
        return Expected(*(each[chosen] for each in self))


class Places(NamedTuple):
    """The tokens that were read for N positions at J levels, S at most: `tokens` (N, J, S), -1 for none.

    `lengths` (N, J) are the tokens of the context, `counts` the number of its places.
    """

    tokens: Tensor
    lengths: Tensor
    counts: Tensor


class CorpusMemory(nn.Module):
    """Corrects the logits of a language model by an index of its training text and by the row itself; see the module.

    Of the row, the `row_length` tokens before a prediction are searched. With 0 only the corpus is.
    """

    def __init__(self, index: CorpusIndex, row_length: int = 0) -> None:
        super().__init__()
        self.index = index
        self.row_length = row_length
        size = 3 + (len(LEVELS) + (len(ROW_LEVELS) if row_length else 0)) * 8
        self.gate = nn.Sequential(
            nn.Linear(size, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, 1)
        )

    @property
    def window(self) -> int:
        """The tokens before a prediction that the memory looks at."""
        return max(self.index.longest, self.row_length)

    def recall(
        self, input_ids: Tensor, depths: Tensor, *, only_last: bool = False, written: Tensor | None = None
    ) -> Recalled:
        """Finds what followed the contexts that end with each of `input_ids` (B, T), N = B T positions.

        A context has at most `depths` (B, T) tokens. With `only_last` there are B positions, the last of each row. The
        last `written` (B,) tokens of a row are the model's own, which say nothing about what follows a context.
        """
        found = self._in_corpus(input_ids, depths, only_last)
        if self.row_length:
            in_row = in_rows(input_ids, depths, self.row_length, only_last=only_last, written=written)
            found = Places(*(torch.cat(pair, 1) for pair in zip(found, in_row, strict=True)))
        return _each_once(found)

    def _in_corpus(self, input_ids: Tensor, depths: Tensor, only_last: bool) -> Places:
        if only_last:
            input_ids, depths = input_ids[:, -self.index.longest :], depths[:, -self.index.longest :]
        found = self.index.find(input_ids, depths)
        last = input_ids.shape[1] - 1 if only_last else 0
        # The bounds of the contexts of 0, 1, 2, ... tokens; the longer a context is, the fewer places it has.
        none = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
        begins_KN, ends_KN = (torch.stack(each)[..., last:].flatten(1) for each in zip(none, *found, strict=True))
        lengths_JN = torch.stack([(ends_KN - begins_KN >= least).sum(0) for least in LEVELS])
        begins_NJ, ends_NJ = (bounds.gather(0, lengths_JN).t() for bounds in (begins_KN, ends_KN))
        lengths_NJ, counts_NJ = lengths_JN.t(), ends_NJ - begins_NJ
        steps = torch.arange(_SAMPLES, device=begins_NJ.device)
        spread = torch.where(counts_NJ[..., None] > _SAMPLES, steps * counts_NJ[..., None] // _SAMPLES, steps)
        places = (begins_NJ[..., None] + spread).clamp(max=len(self.index.following) - 1)
        tokens_NJS = self.index.following[places].long().masked_fill(spread >= counts_NJ[..., None], _NOTHING)
        return Places(tokens_NJS, lengths_NJ, counts_NJ)

    def corrections(self, recalled: Recalled, expected: Expected) -> Tensor:
        """Returns what is added to the logits of the recalled tokens (N, C); it is 0 for a place without a token."""
        counts = recalled.counts.clamp(min=1).float()
        lengths = recalled.lengths.float()
        kinds = recalled.kinds.float()
        totals = counts.clamp(max=_SAMPLES)
        known_NK = torch.cat(
            [
                expected.entropy[:, None] / 4,
                lengths / 8,
                lengths.log1p(),
                counts.log() / 4,
                kinds.log1p(),
                kinds / totals,
            ],
            -1,
        )
        is_token = recalled.shares.sum(-1) > 0
        shares, logprobs = recalled.shares[is_token], expected.logprobs[is_token][:, None]
        chances = logprobs.exp()
        of_token = torch.cat([logprobs / 4, chances, shares, shares - chances, (shares + 0.01).log() / 4], -1)
        # The part of the first layer that sees the position is computed once for all of its tokens.
        first, rest = cast(nn.Linear, self.gate[0]), self.gate[1:]
        weights = torch.split(first.weight, [known_NK.shape[1], of_token.shape[1]], 1)
        with torch.autocast(shares.device.type, enabled=False):  # the gate learnt in float32
            of_position = F.linear(known_NK, weights[0], first.bias)
            hidden = F.linear(of_token, weights[1]) + of_position[is_token.nonzero()[:, 0]]
            return torch.zeros_like(expected.logprobs).masked_scatter(is_token, rest(hidden))

    def forward(self, logits_NV: Tensor, recalled: Recalled) -> Tensor:
        """Returns the corrected logits (N, V)."""
        expected = Expected.of(logits_NV.log_softmax(-1), recalled)
        return logits_NV.scatter_add(1, recalled.tokens, self.corrections(recalled, expected).to(logits_NV.dtype))


def in_rows(
    input_ids: Tensor, depths: Tensor, row_length: int, *, only_last: bool = False, written: Tensor | None = None
) -> Places:
    """Finds in the row itself what followed the contexts that end with each of `input_ids` (B, T), N = B T positions.

    A level is the longest context that ended at least so often in the `row_length` tokens before the prediction. The
    places with the longest contexts are read, and the newest of equal ones. The last `written` (B,) tokens of a row
    are not read: a model that took its own text for evidence would repeat it ever more surely.
    """
    count, device = input_ids.shape[1], input_ids.device
    queries = 1 if only_last else count
    places, ends = torch.arange(count, device=device), torch.arange(count - queries, count, device=device)[:, None]
    is_equal_BQT = input_ids[:, -queries:, None] == input_ids[:, None]
    is_equal_BQT &= (places < ends) & (places > ends - row_length)
    if written is not None:
        is_equal_BQT &= places < count - 1 - written[:, None, None]
    row, query, place = is_equal_BQT.nonzero(as_tuple=True)
    end = query + count - queries
    # The tokens that are compared lie in the documents of both places, and in the window that ends with the later one.
    most = depths[row, end].minimum(depths[row, place]).minimum(place - end + row_length).clamp(max=_ROW_LONGEST)
    flat, there, back = input_ids.flatten(), row * count + place, end - place
    lengths, alive = torch.zeros_like(place), torch.arange(len(place), device=device)
    for distance in range(_ROW_LONGEST):
        alive = alive[most[alive] > distance]
        earlier = there[alive] - distance
        alive = alive[flat[earlier] == flat[earlier + back[alive]]]
        if not len(alive):
            break
        lengths[alive] += 1
    position = row * queries + query
    order = ((position * (_ROW_LONGEST + 1) + _ROW_LONGEST - lengths) * count + back).argsort()
    rank = torch.arange(len(order), device=device) - torch.searchsorted(position, position)  # positions ascend
    is_kept = rank < _SAMPLES
    slots, kept = (position[is_kept], rank[is_kept]), order[is_kept]
    lengths_NS = input_ids.new_zeros(len(input_ids) * queries, _SAMPLES).index_put(slots, lengths[kept])
    tokens_NS = torch.zeros_like(lengths_NS).index_put(slots, flat[there[kept] + 1])
    # With fewer places than a level asks for, it has the context of one token.
    lengths_NJ = torch.stack([lengths_NS[:, least - 1] for least in ROW_LEVELS], 1)
    lengths_NJ = lengths_NJ.clamp(min=1) * (lengths_NS[:, :1] > 0)
    is_read = (lengths_NS[:, None] >= lengths_NJ[..., None]) & (lengths_NS[:, None] > 0)
    return Places(tokens_NS[:, None].masked_fill(~is_read, _NOTHING), lengths_NJ, is_read.sum(-1))


def _each_once(found: Places) -> Recalled:
    """Returns the tokens of the places of all levels, each once and the most frequent first."""
    num_levels, size = found.tokens.shape[1:]
    values_NW, places = found.tokens.flatten(1).sort(-1, descending=True)
    number = torch.zeros_like(values_NW)
    number[:, 1:] = (values_NW[:, 1:] != values_NW[:, :-1]).cumsum(-1)
    tokens = torch.full_like(values_NW, _NOTHING).scatter(1, number, values_NW)
    counts = torch.zeros(len(number), number.shape[1] * num_levels, dtype=torch.int16, device=number.device)
    counts.scatter_add_(1, number * num_levels + places // size, (values_NW != _NOTHING).to(counts.dtype))
    counts_NWJ = torch.unflatten(counts, 1, (-1, num_levels))
    shares = counts_NWJ / counts_NWJ.sum(1, keepdim=True).clamp(min=1)
    best = shares.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, :_CANDIDATES]
    shares = shares.gather(1, best[..., None].expand(-1, -1, num_levels))
    kinds_NJ = (counts_NWJ > 0).sum(1)
    return Recalled(tokens.gather(1, best).clamp(min=0), shares, found.lengths, found.counts, kinds_NJ)
