"""The sampler: chooses the next tokens of a batch from logits, on their device; each row has its own settings.

A token that cannot be chosen has the logit -inf. Settings apply in this order: `logit_bias`, repetition penalty,
presence and frequency penalties, forbidden tokens and grammar, temperature, top-k, top-p, min-p, typical. Their
parameters are numbers, or columns (B, 1) with one value per row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.core.random import derive_seed
from sheepop.generate.config import GenerationConfig

# The tolerance of cumulative probabilities, in epsilons: despite rounding, 0.5 + 0.3 + 0.15 must reach a top_p of 0.95.
_ROUNDING = 64
# The largest difference between two orders of summation in a small network, in epsilons of the largest logit.
_NEAR = 8
# The multipliers of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers.
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@dataclass(frozen=True)
class Row:
    """A text whose next token is sampled: its settings, prompt, generated tokens and own seed.

    `allowed` (V,) is True for the tokens that its grammar allows; None means no grammar.
    """

    config: GenerationConfig
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    seed: int
    allowed: Tensor | None = None


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


class Sampler:
    """Chooses tokens; never `forbidden` ones (V,), and no `end_ids` before a text has `min_new_tokens`."""

    def __init__(self, forbidden: Tensor, end_ids: Iterable[int]) -> None:
        self.forbidden = forbidden
        self._end_ids = sorted(end_ids)

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> Choice:
        """Chooses the next token of every row of `logits` (B, V): the best of `scores` if greedy, else one drawn."""
        rounding = _NEAR * torch.finfo(logits.dtype).eps
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        usable = self.are_usable(logits)
        scores = self.scores(logits, rows)
        greedy = torch.tensor([row.config.greedy for row in rows])
        chosen, lead, best = _likeliest(scores)
        if not greedy.all():
            drawing = (~greedy).nonzero()[:, 0].to(logits.device)
            drawn = [row for row in rows if not row.config.greedy]
            seeds = torch.tensor([derive_seed(row.seed, "token", len(row.token_ids)) for row in drawn])
            heat = torch.tensor([row.config.temperature for row in drawn], dtype=lead.dtype, device=lead.device)
            winners, leads = draw(warped(scores[drawing], [row.config for row in drawn]), seeds.to(logits.device))
            chosen[drawing], lead[drawing] = winners, leads * heat
        near = lead < rounding * best.abs().clamp(min=1)
        log_total = logits.logsumexp(dim=-1, keepdim=True)
        logprobs = (logits.gather(-1, chosen[:, None]) - log_total)[:, 0]
        count = min(max(row.config.top_logprobs or 0 for row in rows), logits.shape[-1])
        top = logits.topk(count, dim=-1)
        return Choice(
            chosen.tolist(),
            logprobs.tolist(),
            top.indices.tolist(),
            (top.values - log_total).tolist(),
            usable.tolist(),
            near.tolist(),
        )

    def are_usable(self, logits: Tensor) -> Tensor:
        """Whether each row of logits (B, V) is finite (B,), tested by its sum."""
        return logits.sum(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)).isfinite()

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """The model's own log-probabilities (B, V), with -inf for forbidden tokens."""
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        return logits.log_softmax(dim=-1).masked_fill(self.forbidden, -torch.inf)

    def scores(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Logits (B, V) with biases and penalties, and -inf for the tokens that each row must not choose."""
        scores = logits.masked_fill(self.forbidden, -torch.inf)
        ending = [
            (number, token_id, 0.0)
            for number, row in enumerate(rows)
            if len(row.token_ids) < row.config.min_new_tokens and not self._must_end(row)
            for token_id in (*self._end_ids, *row.config.stop_token_ids)
        ]
        _change(scores, ending, lambda found, _: torch.full_like(found, -torch.inf))
        _change(scores, _entries(rows, lambda row: row.config.logit_bias), torch.add)
        _change(scores, _entries(rows, _repeated), repetition_penalised)
        _change(scores, _entries(rows, _counted), torch.sub)
        for number, row in enumerate(rows):
            if row.allowed is not None:
                scores[number].masked_fill_(~row.allowed.to(scores.device), -torch.inf)
        return scores

    def _must_end(self, row: Row) -> bool:
        """Whether the grammar allows only tokens that end the text."""
        if row.allowed is None:
            return False
        others = row.allowed.clone()
        others[[*self._end_ids, *row.config.stop_token_ids]] = False
        return not others.any()


def _entries(rows: Sequence[Row], of_row: Callable[[Row], dict[int, float]]) -> list[tuple[int, int, float]]:
    return [(number, token, value) for number, row in enumerate(rows) for token, value in of_row(row).items()]


def _change(scores: Tensor, entries: list[tuple[int, int, float]], change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Applies `change` to the scores at each entry's (row, token) and its value, in place."""
    if entries:
        rows, tokens, values = zip(*entries, strict=True)
        index = torch.tensor(rows, device=scores.device), torch.tensor(tokens, device=scores.device)
        scores[index] = change(scores[index], torch.tensor(values, dtype=scores.dtype, device=scores.device))


def _repeated(row: Row) -> dict[int, float]:
    penalty = row.config.repetition_penalty
    return {} if penalty == 1 else dict.fromkeys((*row.prompt_ids, *row.token_ids), penalty)


def _counted(row: Row) -> dict[int, float]:
    """The presence and frequency penalties of the tokens of a text, as OpenAI's API defines them."""
    presence, frequency = row.config.presence_penalty, row.config.frequency_penalty
    if presence == frequency == 0:
        return {}
    return {token: presence + frequency * count for token, count in Counter(row.token_ids).items()}


def repetition_penalised(logits: Tensor, penalty: Tensor | float) -> Tensor:
    """Divides positive and multiplies negative logits by `penalty`.

    Keskar et al. 2019, "CTRL", section 4.1, in the form that lowers negative logits too.
    """
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def warped(scores: Tensor, configs: Sequence[GenerationConfig]) -> Tensor:
    """Applies temperature, top-k, top-p, min-p and typical to logits (B, V), each row with its own settings."""

    def column(of: Callable[[GenerationConfig], float]) -> Tensor:
        return torch.tensor([of(config) for config in configs], dtype=scores.dtype, device=scores.device)[:, None]

    scores = apply_temperature(scores, column(lambda config: config.temperature))
    if any(config.top_k is not None for config in configs):
        most = [min(config.top_k or scores.shape[-1], scores.shape[-1]) for config in configs]
        scores = apply_top_k(scores, torch.tensor(most, device=scores.device)[:, None], max(most))
    if any(config.top_p < 1 for config in configs):
        scores = apply_top_p(scores, column(lambda config: config.top_p))
    if any(config.min_p > 0 for config in configs):
        scores = apply_min_p(scores, column(lambda config: config.min_p))
    if any(config.typical_p < 1 for config in configs):
        scores = apply_typical(scores, column(lambda config: config.typical_p))
    return scores


def apply_temperature(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """Returns ``logits / temperature``, shifted so that the largest is 0 and no temperature above 0 overflows.

    A temperature below the smallest normal number of the logits' type is raised to it; the distribution is the same.
    """
    temperature = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device)
    least = torch.finfo(logits.dtype).tiny
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp(min=least).to(logits.dtype)


def apply_top_k(logits: Tensor, k: Tensor | int, most: int | None = None) -> Tensor:
    """Keeps the k largest logits; ties go to smaller token ids. `most` is the largest k, if known."""
    most = min(int(torch.as_tensor(k).max()) if most is None else most, logits.shape[-1])
    count = torch.as_tensor(k, device=logits.device).clamp(max=most).expand(*logits.shape[:-1], 1)
    return _keep_largest(logits, logits.topk(most, dim=-1).values.gather(-1, count - 1), count)


def apply_top_p(logits: Tensor, p: Tensor | float) -> Tensor:
    """Keeps the smallest set of likeliest tokens whose probability reaches p (Holtzman et al. 2020, section 3.1).

    The token that crosses p is kept; ties at the edge go to smaller token ids.
    """
    p = torch.as_tensor(p, dtype=logits.dtype, device=logits.device)
    probabilities = logits.softmax(dim=-1)
    # All tokens below this bound have a probability of less than 1 - p together, so only those above it are sorted.
    bound = torch.where(p < 1, (1 - p) / logits.shape[-1], torch.inf)
    candidates = max(1, int((probabilities >= bound).sum(dim=-1).max()))
    largest = logits.topk(candidates, dim=-1).values
    likeliest = (largest - logits.logsumexp(dim=-1, keepdim=True)).exp()
    short_of_p = likeliest.cumsum(dim=-1) < p - _ROUNDING * torch.finfo(logits.dtype).eps
    count = (short_of_p.sum(dim=-1, keepdim=True) + 1).clamp(max=candidates)
    return torch.where(p < 1, _keep_largest(logits, largest.gather(-1, count - 1), count), logits)


def apply_min_p(logits: Tensor, min_p: Tensor | float) -> Tensor:
    """Keeps tokens that are at least `min_p` times as likely as the likeliest one (Nguyen et al. 2024, section 3)."""
    least = torch.as_tensor(min_p, dtype=logits.dtype, device=logits.device).log()
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + least, -torch.inf)


def apply_typical(logits: Tensor, p: Tensor | float) -> Tensor:
    """Keeps the fewest tokens that reach p, by closeness of information to entropy (Meister et al. 2022, eq. 9)."""
    p = torch.as_tensor(p, dtype=logits.dtype, device=logits.device)
    logprobs = logits.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -torch.where(probabilities > 0, probabilities * logprobs, 0).sum(dim=-1, keepdim=True)
    order = (-logprobs - entropy).abs().argsort(dim=-1, stable=True)
    before = probabilities.gather(-1, order).cumsum(dim=-1) - probabilities.gather(-1, order)
    kept = before < p - _ROUNDING * torch.finfo(logits.dtype).eps
    kept[..., :1] = True
    return torch.where(p < 1, logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf), logits)


def draw(scores: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token (B,) for each row of logits `scores` (B, V) with its seed from `seeds` (B,), int64.

    Also returns the lead (B,) of each winner over the second, in logit minus logarithm of time.

    Every token gets an exponentially distributed time whose rate is its probability, and the shortest time wins: the
    draw is exact, and if rounding adds or drops an unlikely token, the winner almost never changes. (The inverse of the
    cumulative distribution would shift.) A time depends only on the row's seed and the token, so that batching changes
    the text as little as possible.
    """
    candidates = max(1, int(scores.isfinite().sum(dim=-1).max()))
    best = scores.topk(candidates, dim=-1)
    times = -torch.log1p(-uniform(seeds[:, None], best.indices, scores.dtype))
    winner, lead, _ = _likeliest(best.values - times.log())
    return best.indices.gather(-1, winner[:, None])[:, 0], lead


def _likeliest(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The index of the largest score of each row (B, V), its lead over the second, and the score itself, each (B,).

    Ties go to the first index.
    """
    if scores.shape[-1] == 1:
        return scores.argmax(dim=-1), torch.full_like(scores[:, 0], torch.inf), scores[:, 0]
    best = scores.topk(2, dim=-1)
    lead = best.values[:, 0] - best.values[:, 1]
    # topk does not guarantee the order of equal scores.
    chosen = best.indices[:, 0] if bool((lead > 0).all()) else scores.argmax(dim=-1)
    return chosen, lead, best.values[:, 0]


def uniform(seeds: Tensor, indices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in the open interval (0, 1) that depend only on seed and index (int64, broadcast)."""
    bits = 52 if dtype == torch.float64 else 23
    mixed = _shifted(_mix(seeds + (indices + 1) * _GOLDEN), 64 - bits)
    return (mixed.to(dtype) + 0.5) * 2.0**-bits


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64, with wrapping products and logical shifts."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _keep_largest(logits: Tensor, smallest_kept: Tensor, count: Tensor) -> Tensor:
    """Keeps the `count` (..., 1) largest logits, down to `smallest_kept` (..., 1); ties go to smaller ids."""
    above, equal = logits > smallest_kept, logits == smallest_kept
    room = count - above.sum(dim=-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(dim=-1) <= room))), -torch.inf)
