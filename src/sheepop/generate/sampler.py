"""The sampler: chooses the next tokens of a batch from logits, on their device; each row has its own settings.

Settings apply in this order: `logit_bias`, repetition penalty, presence and frequency penalties, forbidden tokens and
grammar, then those of `warping`. A token that cannot be chosen has the logit -inf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sheepop.core.random import derive_seeds
from sheepop.generate.config import GenerationConfig
from sheepop.generate.penalties import Occurrences, Penalties
from sheepop.generate.sampling_kernels import (
    choose_by_triton,
    choose_natively,
    suits_native_sampling,
    suits_triton_sampling,
)
from sheepop.generate.transfers import Download, upload
from sheepop.generate.warping import draw, likeliest, warped
from sheepop.model import Transformer
from sheepop.tokenizer import Tokenizer

# The largest difference between two orders of summation in a small network, in epsilons of the largest logit.
_NEAR = 8


class Row(NamedTuple):
    """A text whose next token is sampled: its settings, the number of tokens that it has, and its own seed.

    `occurrences` are the tokens to penalise, None without penalties, and `following` those behind the known ones: first
    numbers -1 - r of the row r of the last step that sampled one, if the host does not know it, then guesses. `allowed`
    (V,) is True for the tokens that its grammar allows; None means no grammar.
    """

    config: GenerationConfig
    num_written: int
    seed: int
    occurrences: Occurrences | None = None
    allowed: Tensor | None = None
    following: Sequence[int] = ()


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens at one position, in descending order, with their log-probabilities under the model."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Choice:
    """The chosen tokens (B,), and the natural logarithm of the probability that the model itself gave each one.

    `top_ids` and `top_logprobs` (B, n) are the likeliest tokens, for the largest n that a row requests. A row is
    `usable` if its logits are finite. `near_ties` marks rows whose second-best token lost so narrowly that other
    rounding, such as that of another batch, could have chosen it.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    usable: list[bool]
    near_ties: list[bool]

    def likeliest(self, row: int, config: GenerationConfig) -> Likeliest | None:
        """The `top_logprobs` likeliest tokens of a row; None if its settings request none."""
        count = config.top_logprobs
        return None if count is None else Likeliest(self.top_ids[row][:count], self.top_logprobs[row][:count])


class Sampled:
    """The choices of a batch, which the device may still be computing; all of them reach the host in one copy."""

    def __init__(self, packed: Tensor, num_likeliest: int, rounding: float) -> None:
        self._packed, self._arriving = packed, Download(packed)
        self._num_likeliest, self._rounding = num_likeliest, rounding

    @property
    def token_ids(self) -> Tensor:
        """The chosen tokens (B,) on the device."""
        return self._packed[:, 0].long()

    def choice(self) -> Choice:
        """The choices on the host, which waits for them."""
        # Loops over the few rows of a step take less time than operations on arrays.
        packed, count = self._arriving.wait().tolist(), self._num_likeliest
        none: list[list[Any]] = [[]] * len(packed)
        return Choice(
            [int(row[0]) for row in packed],
            [row[4] - row[3] for row in packed],
            [[int(each) for each in row[6 : 6 + count]] for row in packed] if count else none,
            [[each - row[3] for each in row[6 + count :]] for row in packed] if count else none,
            [row[5] == 1 for row in packed],
            [row[1] < self._rounding * max(abs(row[2]), 1) for row in packed],
        )


class Sampler:
    """Chooses tokens; never `forbidden` ones (V,), and no `end_ids` before a text has `min_new_tokens`."""

    def __init__(self, forbidden: Tensor, end_ids: Iterable[int]) -> None:
        self.forbidden = forbidden
        self._end_ids, self._penalties = sorted(end_ids), Penalties(forbidden.device)

    @classmethod
    def of(cls, tokenizer: Tokenizer, model: Transformer, end_ids: frozenset[int]) -> Sampler:
        """A sampler that never chooses unused rows, padding, unknown, or the beginning of a document."""
        forbidden = torch.arange(model.config.vocabulary) >= tokenizer.vocab_size
        for token_id in (tokenizer.special_id("pad"), tokenizer.special_id("unk"), tokenizer.special_id("bos")):
            if token_id is not None and token_id not in end_ids:  # some tokenizers use one token for several of these
                forbidden[token_id] = True
        return cls(forbidden.to(model.device), end_ids)

    @cached_property
    def _forbidden_ids(self) -> Tensor:
        return self.forbidden.nonzero()[:, 0]

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> Choice:
        """Chooses the next token of every row of `logits` (B, V): the best of `scores` if greedy, else one drawn."""
        return self.sample(logits, rows).choice()

    def sample(self, logits: Tensor, rows: Sequence[Row], sampled: Tensor | None = None) -> Sampled:
        """Does what `choose` does, without waiting for the device, which has the tokens `sampled` in the last step."""
        rounding = _NEAR * torch.finfo(logits.dtype).eps
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        packed = self._choices(logits, rows, sampled)
        if count := min(max(row.config.top_logprobs or 0 for row in rows), logits.shape[-1]):
            top = logits.topk(count, dim=-1)
            packed = torch.cat([packed, top.indices.double(), top.values.double()], dim=-1)
        return Sampled(packed, count, rounding)

    def _choices(self, logits: Tensor, rows: Sequence[Row], sampled: Tensor | None) -> Tensor:
        """Returns what is chosen for each row (B, 6), in float64.

        These are the token, its lead over the second, the largest score, the logarithm of the sum of all e^logit, the
        token's logit, and whether the logits are finite (1 or 0).
        """
        configs, is_native = [row.config for row in rows], suits_native_sampling(logits)
        banned = self._banned(rows)
        forbidden, hidden = (None, ()) if is_native else (self.forbidden, banned)
        scores = self._changed(logits, rows, forbidden, hidden, sampled)
        seeds = [0] * len(rows)
        if not all(config.greedy for config in configs):
            seeds = derive_seeds([row.seed for row in rows], "token", [row.num_written for row in rows])
        if is_native:
            return choose_natively(logits, scores, configs, seeds, self._forbidden_ids, banned)
        if suits_triton_sampling(logits, configs):
            return choose_by_triton(logits, scores, configs, seeds)
        chosen, lead, best = likeliest(scores)
        greedy = torch.tensor([config.greedy for config in configs])
        if not greedy.all():
            numbers = (~greedy).nonzero()[:, 0]
            drawn = [configs[number] for number in numbers.tolist()]
            drawing, drawing_seeds, heat = (
                upload(values, logits.device)
                for values in (
                    numbers,
                    torch.tensor([seeds[number] for number in numbers]),
                    torch.tensor([config.temperature for config in drawn], dtype=lead.dtype),
                )
            )
            winners, leads = draw(warped(scores[drawing], drawn), drawing_seeds)
            chosen[drawing], lead[drawing] = winners, leads * heat
        columns = (chosen, lead, best, logits.logsumexp(dim=-1), logits.gather(-1, chosen[:, None])[:, 0])
        return torch.stack([column.double() for column in (*columns, self.are_usable(logits))], dim=-1)

    def are_usable(self, logits: Tensor) -> Tensor:
        """Whether each row of logits (B, V) is finite (B,), tested by its sum."""
        return logits.sum(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)).isfinite()

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """The model's own log-probabilities (B, V), with -inf for forbidden tokens."""
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        return logits.log_softmax(dim=-1).masked_fill(self.forbidden, -torch.inf)

    def scores(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Logits (B, V) with biases and penalties, and -inf for the tokens that each row must not choose.

        The result is `logits` itself if nothing changes.
        """
        return self._changed(logits, rows, self.forbidden, self._banned(rows))

    def _banned(self, rows: Sequence[Row]) -> list[tuple[int, int]]:
        """Returns the pairs of a row and a token that would end its text too soon."""
        return [
            (number, token_id)
            for number, row in enumerate(rows)
            if row.num_written < row.config.min_new_tokens and not self._must_end(row)
            for token_id in (*self._end_ids, *row.config.stop_token_ids)
        ]

    def _changed(
        self,
        logits: Tensor,
        rows: Sequence[Row],
        forbidden: Tensor | None,
        banned: Sequence[tuple[int, int]],
        sampled: Tensor | None = None,
    ) -> Tensor:
        biases = [(number, *bias) for number, row in enumerate(rows) for bias in row.config.logit_bias.items()]
        penalised = [
            (number, row.config, row.occurrences, row.following)
            for number, row in enumerate(rows)
            if row.occurrences is not None
        ]
        masked = [(number, row.allowed) for number, row in enumerate(rows) if row.allowed is not None]
        forbids = forbidden is not None and len(self._forbidden_ids) > 0
        if not (forbids or banned or biases or penalised or masked):
            return logits
        scores = logits.masked_fill(self.forbidden, -torch.inf) if forbids else logits.clone()
        if banned:
            scores.index_put_(_index(banned, scores), scores.new_full((), -torch.inf))  # a number would be waited for
        if biases:
            index, values = _index(biases, scores), torch.tensor([bias[2] for bias in biases], dtype=scores.dtype)
            scores[index] += upload(values, scores.device)
        if penalised:
            self._penalties.apply(scores, penalised, sampled)
        for number, allowed in masked:
            scores[number].masked_fill_(~upload(allowed, scores.device), -torch.inf)
        return scores

    def _must_end(self, row: Row) -> bool:
        """Whether the grammar allows only tokens that end the text."""
        if row.allowed is None:
            return False
        others = row.allowed.clone()
        others[[*self._end_ids, *row.config.stop_token_ids]] = False
        return not others.any()


def _index(entries: Sequence[tuple[float, ...]], scores: Tensor) -> tuple[Tensor, Tensor]:
    """The index of the scores at each entry's row and token."""
    rows, tokens, *_ = zip(*entries, strict=True)
    return upload(torch.tensor(rows), scores.device), upload(torch.tensor(tokens), scores.device)
