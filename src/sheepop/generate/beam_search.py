"""Beam search: the likeliest whole text, looked for among several that grow side by side.

A text Y of tokens is judged by ``log P(Y) / lp(Y)`` with ``lp(Y) = ((5 + |Y|) / 6)^alpha``, where `length_penalty` is
alpha and |Y| counts the ``<eos>`` (Wu et al. 2016, equation 14). With alpha 0 that is the probability, which favours
short texts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sheepop.generate.blocks import BlockTable


@dataclass(frozen=True)
class Hypothesis:
    """A text as far as it goes: its tokens, and the natural logarithm of each one's probability."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0

    def followed_by(self, token_id: int, logprob: float, total: float) -> Hypothesis:
        """The text with one more token."""
        return Hypothesis((*self.token_ids, token_id), (*self.logprobs, logprob), total)


@dataclass
class Branch:
    """A hypothesis as the network reads it, behind its prompt; see `scheduler.Reader`."""

    context: list[int]
    salt: str
    table: BlockTable | None = None
    drafts: list[int] = field(default_factory=list)


class Beam:
    """The hypotheses of one prompt.

    In every step the best continuations of all `live` hypotheses stay, as many as are still looked for. One that ends,
    with one of `end_ids` or at `max_tokens`, is `finished` and no longer looked for, so the beam narrows by one. The
    search is over when `num_beams` are finished, or when no live hypothesis can become better than the best finished
    one. With one beam this is greedy search; with as many as there are texts it finds the best of all.
    """

    def __init__(self, *, num_beams: int, max_tokens: int, end_ids: Collection[int], length_penalty: float) -> None:
        self.live = [Hypothesis()]
        self.finished: list[Hypothesis] = []
        self.num_beams, self.max_tokens = num_beams, max_tokens
        self._end_ids, self._length_penalty = end_ids, length_penalty

    def extend(self, logprobs: Tensor) -> list[int]:
        """Continues the live hypotheses; returns which of them, by number, each of the new live ones continues.

        `logprobs` (n, V) are those of the next token after each of the n live hypotheses; -inf forbids a token. Of
        equally good continuations those of earlier hypotheses and smaller ids come first.
        """
        before, self.live, parents = self.live, [], []
        totals = logprobs.new_tensor([hypothesis.total for hypothesis in before])
        scores = (totals[:, None] + logprobs).flatten()
        for place in _largest(scores, self.num_beams - len(self.finished)).tolist():
            parent, token_id = divmod(place, logprobs.shape[1])
            logprob = float(logprobs[parent, token_id])
            found = before[parent].followed_by(token_id, logprob, float(scores[place]))
            if token_id in self._end_ids or len(found.token_ids) == self.max_tokens:
                self.finished.append(found)
            else:
                self.live.append(found)
                parents.append(parent)
        if self._is_decided():
            self.live, parents = [], []
        return parents

    def score(self, hypothesis: Hypothesis) -> float:
        """By what finished hypotheses are compared."""
        return hypothesis.total / self._penalty(len(hypothesis.token_ids))

    def best(self) -> Hypothesis:
        """The best finished hypothesis, of equal ones the earliest; when there is none the best live one."""
        return max(self.finished or self.live, key=self.score)

    def _is_decided(self) -> bool:
        """Whether no live hypothesis can win: probabilities only fall, and the longest text is divided by the most."""
        if not self.finished or not self.live:
            return False
        hope = max(hypothesis.total for hypothesis in self.live) / self._penalty(self.max_tokens)
        return self.score(self.best()) >= hope

    def _penalty(self, length: int) -> float:
        return float(((5 + length) / 6) ** self._length_penalty)


def _largest(scores: Tensor, count: int) -> Tensor:
    """The places of the `count` largest finite scores (N,), or of all there are; the largest first, ties in order."""
    count = min(count, int(scores.isfinite().sum()))
    if count == 0:
        return scores.new_empty(0, dtype=torch.long)
    places = (scores >= scores.topk(count).values[-1]).nonzero()[:, 0]
    return places[scores[places].argsort(descending=True, stable=True)[:count]]
