"""A memory of a corpus: corrections to the logits of tokens that followed the same context in the corpus.

The memory finds the longest context that the corpus knows, and shorter ones that it knows better. A small network, the
gate, sees how often a token followed each of them and what the language model makes of it, and corrects the logit of
that token. All other logits stay, and the softmax makes a distribution of the result.

Retrieval of what followed in a corpus: Khandelwal et al. 2020 and Liu et al. 2024 (infini-gram). Corrections of logits
from counts are those of context mixing (Mahoney 2005), for many tokens in place of two bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sheepop.model.corpus_index import CorpusIndex

# A level is the longest context that the corpus has at least so often.
LEVELS = (1, 3, 12, 48)
_SAMPLES = 16  # places of each level that are read, evenly spaced
_CANDIDATES = 16  # tokens of a position that are corrected
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
        """Some of the positions."""
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
        """Some of the positions."""
        return Expected(*(each[chosen] for each in self))


class CorpusMemory(nn.Module):
    """Corrects the logits of a language model by an index of its training text; see the module."""

    def __init__(self, index: CorpusIndex) -> None:
        super().__init__()
        self.index = index
        size = 3 + len(LEVELS) * 8
        self.gate = nn.Sequential(
            nn.Linear(size, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, 1)
        )

    def recall(self, input_ids: Tensor, depths: Tensor, *, only_last: bool = False) -> Recalled:
        """What followed the contexts that end with each of `input_ids` (B, T), as N = B T positions.

        A context has at most `depths` (B, T) tokens. With `only_last` there are B positions, the last of each row.
        """
        begins = input_ids.new_zeros(len(LEVELS), *input_ids.shape)
        ends, lengths = torch.zeros_like(begins), torch.zeros_like(begins)
        for length, (begin, end) in enumerate(self.index.find(input_ids, depths), start=1):
            for level, least in enumerate(LEVELS):
                known = end - begin >= least
                begins[level] = begin.where(known, begins[level])
                ends[level] = end.where(known, ends[level])
                lengths[level].masked_fill_(known, length)
        if only_last:
            begins, ends, lengths = (bounds[..., -1:] for bounds in (begins, ends, lengths))
        begins, ends, lengths = (bounds.flatten(1).t() for bounds in (begins, ends, lengths))
        return self._read(begins, ends, lengths)

    def _read(self, begins_NJ: Tensor, ends_NJ: Tensor, lengths_NJ: Tensor) -> Recalled:
        counts_NJ = ends_NJ - begins_NJ
        steps = torch.arange(_SAMPLES, device=begins_NJ.device)
        spread = torch.where(counts_NJ[..., None] > _SAMPLES, steps * counts_NJ[..., None] // _SAMPLES, steps)
        is_read = spread < counts_NJ[..., None]
        places = (begins_NJ[..., None] + spread).clamp(max=len(self.index.following) - 1)
        nothing = -1
        read_NJS = self.index.following[places].long().masked_fill(~is_read, nothing)
        totals_NJ = is_read.sum(-1)
        ordered = read_NJS.sort(-1).values
        changes = torch.ones_like(ordered, dtype=torch.bool)
        changes[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
        kinds_NJ = (changes & (ordered != nothing)).sum(-1)
        # Each token once: sorted, with repetitions and nothing last.
        flat = read_NJS.flatten(1).sort(-1).values
        repeats = torch.zeros_like(flat, dtype=torch.bool)
        repeats[:, 1:] = flat[:, 1:] == flat[:, :-1]
        distinct = flat.masked_fill(repeats, nothing).sort(-1, descending=True).values
        shares = torch.stack(
            [(distinct[:, :, None] == read_NJS[:, level, None]).sum(-1) for level in range(len(LEVELS))], -1
        ) / totals_NJ[:, None].clamp(min=1)
        shares = shares.masked_fill((distinct == nothing)[..., None], 0)
        best = shares.sum(-1).sort(dim=-1, descending=True, stable=True).indices[:, :_CANDIDATES]
        tokens, shares = distinct.gather(1, best), shares.gather(1, best[..., None].expand(-1, -1, len(LEVELS)))
        return Recalled(tokens.clamp(min=0), shares, lengths_NJ, counts_NJ, kinds_NJ)

    def corrections(self, recalled: Recalled, expected: Expected) -> Tensor:
        """What is added to the logits of the recalled tokens (N, C); 0 for a place without a token."""
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
        chances = expected.logprobs.exp()[..., None]
        shares = recalled.shares
        of_token = torch.cat(
            [expected.logprobs[..., None] / 4, chances, shares, shares - chances, (shares + 0.01).log() / 4], -1
        )
        inputs = torch.cat([known_NK[:, None].expand(-1, shares.shape[1], -1), of_token], -1)
        return self.gate(inputs)[..., 0] * (shares.sum(-1) > 0)

    def forward(self, logits_NV: Tensor, recalled: Recalled) -> Tensor:
        """The corrected logits."""
        expected = Expected.of(logits_NV.log_softmax(-1), recalled)
        return logits_NV.scatter_add(1, recalled.tokens, self.corrections(recalled, expected).to(logits_NV.dtype))
