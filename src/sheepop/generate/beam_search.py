"""Beam search for the likeliest whole text.

A text Y is scored by ``log P(Y) / lp(Y)`` with ``lp(Y) = ((5 + |Y|) / 6)^alpha``, where alpha is `length_penalty` and
|Y| counts the ``<eos>`` (Wu et al. 2016, equation 14). With alpha 0 the score is the probability, which favours short
texts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hypothesis:
    """A partial or finished text: its tokens, and the natural logarithm of each token's probability."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0


class Beam:
    """The hypotheses of one prompt.

    Every step keeps the best continuations of all `live` hypotheses, `num_beams` less those finished. A hypothesis that
    ends, with one of `end_ids` or at `max_tokens`, moves to `finished` and narrows the beam by one. The search ends
    when `num_beams` are finished, or when no live hypothesis can beat the best finished one. One beam is greedy search;
    as many beams as there are texts find the best of all.
    """

    def __init__(self, *, num_beams: int, max_tokens: int, end_ids: Collection[int], length_penalty: float) -> None:
        self.live = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self.num_beams, self.max_tokens = num_beams, max_tokens
        self._end_ids, self._length_penalty = end_ids, length_penalty

    def extend(self, logprobs: Tensor) -> list[int]:
        """Extends the live hypotheses by a token; returns, for each new live one, the index of the one that it extends.

        `logprobs` (n, V) are those of the next token after each of the n live hypotheses; -inf forbids a token. Ties go
        to earlier hypotheses, then to smaller ids.
        """
        before, self.live, parents = self.live, [], []
        totals = logprobs.new_tensor([hypothesis.total for hypothesis in before])
        scores = (totals[:, None] + logprobs).flatten()
        for index in _largest(scores, self.num_beams - len(self.finished)).tolist():
            parent, token_id = divmod(index, logprobs.shape[1])
            one = before[parent]
            logprob = float(logprobs[parent, token_id])
            found = Hypothesis((*one.token_ids, token_id), (*one.logprobs, logprob), float(scores[index]))
            if token_id in self._end_ids or len(found.token_ids) == self.max_tokens:
                self.finished.append(found)
            else:
                self.live.append(found)
                parents.append(parent)
        if self._is_decided():
            self.live, parents = [], []
        return parents

    def score(self, hypothesis: Hypothesis) -> float:
        """The score that ranks finished hypotheses: log-probability over length penalty."""
        return hypothesis.total / self._penalty(len(hypothesis.token_ids))

    def best(self) -> Hypothesis:
        """The best finished hypothesis, or the best live one if no hypothesis is finished; the earliest wins a tie."""
        return max(self.finished or self.live, key=self.score)

    def _is_decided(self) -> bool:
        """Whether no live hypothesis can win: log-probabilities only fall, and the penalty grows with length."""
        if not self.finished or not self.live:
            return False
        hope = max(hypothesis.total for hypothesis in self.live) / self._penalty(self.max_tokens)
        return self.score(self.best()) >= hope

    def _penalty(self, length: int) -> float:
        return float(((5 + length) / 6) ** self._length_penalty)


def _largest(scores: Tensor, count: int) -> Tensor:
    """The indices of the `count` largest finite scores (N,), or of all of them; the largest first, ties by index."""
    count = min(count, int(scores.isfinite().sum()))
    if count == 0:
        return scores.new_empty(0, dtype=torch.long)
    indices = (scores >= scores.topk(count).values[-1]).nonzero()[:, 0]
    return indices[scores[indices].argsort(descending=True, stable=True)[:count]]
