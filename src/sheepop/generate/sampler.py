"""From logits to the next tokens of a batch, each row with settings of its own, on the device where the logits are.

A token that may not be chosen has the logit -inf. Settings apply in this order: `logit_bias`, repetition penalty,
presence and frequency penalties, what may not be written here, temperature, top-k, top-p, min-p, typical. Parameters
are numbers, or columns (B, 1) with one for each row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.core.random import derive_seed
from sheepop.generate.config import GenerationConfig

# Sums of probabilities are rounded: 0.5 + 0.3 + 0.15 has to reach a top_p of 0.95. In units of the last place.
_ROUNDING = 64
# How many roundings of the largest logit lie between two ways to sum the same products, at most, in a small network.
_NEAR = 8
# The multipliers of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers.
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@dataclass(frozen=True)
class Row:
    """A text whose next token is chosen: its prompt, what is written of it, and the seed that is its own.

    `allowed` (V,) is True for the tokens that a grammar allows, None where there is none.
    """

    config: GenerationConfig
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    seed: int
    allowed: Tensor | None = None


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens at one place, the likeliest first, with their log-probabilities under the model."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Choice:
    """The chosen tokens (B,), and the natural logarithm of the probability that the model itself gave each one.

    `top_ids` and `top_logprobs` (B, n) are the likeliest tokens, for the greatest n that a row asks for. Where logits
    are not finite a row is not `usable`. `near_ties` are rows whose second-best token lost by so little that other
    roundings, such as those of another batch, could have chosen it.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]
    usable: list[bool]
    near_ties: list[bool]

    def likeliest(self, row: int, config: GenerationConfig) -> Likeliest | None:
        """The likeliest tokens of a row, as many as its settings ask for."""
        count = config.top_logprobs
        return None if count is None else Likeliest(self.top_ids[row][:count], self.top_logprobs[row][:count])


class Sampler:
    """Chooses tokens: never those that are `forbidden` (V,), and no `end_ids` before a text has `min_new_tokens`."""

    def __init__(self, forbidden: Tensor, end_ids: Iterable[int]) -> None:
        self.forbidden = forbidden
        self._end_ids = sorted(end_ids)

    def choose(self, logits: Tensor, rows: Sequence[Row]) -> Choice:
        """The next token of every row of `logits` (B, V), as `next_scores` and `draw` give it."""
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
            race = _race(warped(scores[drawing], [row.config for row in drawn]), seeds.to(logits.device))
            chosen[drawing], lead[drawing] = race[0], race[1] * heat
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
        """Where rows of logits (B, V) are finite (B,); a sum of them is not where one of them is not."""
        return logits.sum(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32)).isfinite()

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """The model's own distribution (B, V), and -inf for what may not be written."""
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        return logits.log_softmax(dim=-1).masked_fill(self.forbidden, -torch.inf)

    def scores(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Logits (B, V) with biases and penalties, and -inf for what may not be written here."""
        scores = logits.masked_fill(self.forbidden, -torch.inf)
        ending = [
            (place, token_id, 0.0)
            for place, row in enumerate(rows)
            if len(row.token_ids) < row.config.min_new_tokens and not self._must_end(row)
            for token_id in (*self._end_ids, *row.config.stop_token_ids)
        ]
        _at(scores, ending, lambda found, _: torch.full_like(found, -torch.inf))
        _at(scores, _entries(rows, lambda row: row.config.logit_bias), torch.add)
        _at(scores, _entries(rows, _repeated), repetition_penalised)
        _at(scores, _entries(rows, _counted), torch.sub)
        for place, row in enumerate(rows):
            if row.allowed is not None:
                scores[place].masked_fill_(~row.allowed.to(scores.device), -torch.inf)
        return scores

    def _must_end(self, row: Row) -> bool:
        """Whether a grammar allows nothing but the end."""
        if row.allowed is None:
            return False
        others = row.allowed.clone()
        others[[*self._end_ids, *row.config.stop_token_ids]] = False
        return not others.any()


def _entries(rows: Sequence[Row], of_row: Callable[[Row], dict[int, float]]) -> list[tuple[int, int, float]]:
    return [(place, token, value) for place, row in enumerate(rows) for token, value in of_row(row).items()]


def _at(scores: Tensor, entries: list[tuple[int, int, float]], change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Changes the scores at (row, token) by what belongs to them, in place."""
    if entries:
        rows, tokens, values = zip(*entries, strict=True)
        places = torch.tensor(rows, device=scores.device), torch.tensor(tokens, device=scores.device)
        scores[places] = change(scores[places], torch.tensor(values, dtype=scores.dtype, device=scores.device))


def _repeated(row: Row) -> dict[int, float]:
    penalty = row.config.repetition_penalty
    return {} if penalty == 1 else dict.fromkeys((*row.prompt_ids, *row.token_ids), penalty)


def _counted(row: Row) -> dict[int, float]:
    """What presence and frequency of its tokens take off a text's scores, as OpenAI's API defines it."""
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
    """Logits (B, V) of the distributions to draw from: temperature, top-k, top-p, min-p, typical."""

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
    """``logits / temperature``, shifted so that the largest is 0: no temperature above 0 overflows.

    One that the type of the logits cannot hold is its smallest number, which gives the same distribution.
    """
    temperature = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device)
    least = torch.finfo(logits.dtype).tiny
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp(min=least).to(logits.dtype)


def apply_top_k(logits: Tensor, k: Tensor | int, most: int | None = None) -> Tensor:
    """Keeps the k largest logits, of equal ones those with the smaller token id; `most` is the greatest k."""
    most = min(int(torch.as_tensor(k).max()) if most is None else most, logits.shape[-1])
    count = torch.as_tensor(k, device=logits.device).clamp(max=most).expand(*logits.shape[:-1], 1)
    return _keep_largest(logits, logits.topk(most, dim=-1).values.gather(-1, count - 1), count)


def apply_top_p(logits: Tensor, p: Tensor | float) -> Tensor:
    """Keeps the smallest set of likeliest tokens whose probability reaches p (Holtzman et al. 2020, section 3.1).

    The token that crosses p is kept; of equally likely ones at the edge those with the smaller token id.
    """
    p = torch.as_tensor(p, dtype=logits.dtype, device=logits.device)
    probabilities = logits.softmax(dim=-1)
    # All tokens below this bound weigh less than 1 - p together, so the set lies above it and only that is sorted.
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
    """Keeps the tokens whose information is nearest to the entropy, as few as reach p (Meister et al. 2022, eq. 9)."""
    p = torch.as_tensor(p, dtype=logits.dtype, device=logits.device)
    logprobs = logits.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -torch.where(probabilities > 0, probabilities * logprobs, 0).sum(dim=-1, keepdim=True)
    order = (-logprobs - entropy).abs().argsort(dim=-1, stable=True)
    before = probabilities.gather(-1, order).cumsum(dim=-1) - probabilities.gather(-1, order)
    kept = before < p - _ROUNDING * torch.finfo(logits.dtype).eps
    kept[..., :1] = True
    return torch.where(p < 1, logits.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), -torch.inf), logits)


def draw(scores: Tensor, seeds: Tensor) -> Tensor:
    """Draws a token for each row of `scores` (B, V), logits of a distribution, by its seed of `seeds` (B,), int64.

    Every token races for an exponential time with its probability as the rate, and the first wins: this is exact,
    and when rounding adds or drops an unlikely candidate the winner almost never changes. (An inverse cumulative
    distribution would shift with it.) A token's time is a function of the row's seed and the token alone, so that text
    depends as little as can be on how requests are batched.
    """
    return _race(scores, seeds)[0]


def _race(scores: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """The winners (B,) of `draw`, and by how much each one's logit less the logarithm of its time was the greatest."""
    candidates = max(1, int(scores.isfinite().sum(dim=-1).max()))
    best = scores.topk(candidates, dim=-1)
    times = -torch.log1p(-uniform(seeds[:, None], best.indices, scores.dtype))
    winner, lead, _ = _likeliest(best.values - times.log())
    return best.indices.gather(-1, winner[:, None])[:, 0], lead


def _likeliest(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The place of the greatest score of each row (B, V), its lead over the second, and itself, each (B,).

    Of equal ones the first wins.
    """
    if scores.shape[-1] == 1:
        return scores.argmax(dim=-1), torch.full_like(scores[:, 0], torch.inf), scores[:, 0]
    best = scores.topk(2, dim=-1)
    lead = best.values[:, 0] - best.values[:, 1]
    # Which one topk puts first where both are equal is nowhere promised.
    chosen = best.indices[:, 0] if bool((lead > 0).all()) else scores.argmax(dim=-1)
    return chosen, lead, best.values[:, 0]


def uniform(seeds: Tensor, indices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers between 0 and 1 that depend on seed and index (int64, broadcast) alone; neither end occurs."""
    bits = 52 if dtype == torch.float64 else 23
    mixed = _shifted(_mix(seeds + (indices + 1) * _GOLDEN), 64 - bits)
    return (mixed.to(dtype) + 0.5) * 2.0**-bits


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64; products wrap around, and shifts bring in zeros."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _keep_largest(logits: Tensor, smallest_kept: Tensor, count: Tensor) -> Tensor:
    """Keeps `count` (..., 1) logits, the smallest of which is `smallest_kept` (..., 1); ties go to smaller ids."""
    above, equal = logits > smallest_kept, logits == smallest_kept
    room = count - above.sum(dim=-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(dim=-1) <= room))), -torch.inf)
