"""Distributions over tokens: temperature, top-k, top-p, min-p, typical, and an exact draw, for a batch of logits.

Nothing is sorted and nothing waits for the device: a set of likeliest tokens is found by its smallest member. All
parameters are numbers, or columns (B, 1) with one value per row. A token that cannot be chosen has the logit -inf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sheepop.generate.config import GenerationConfig
from sheepop.generate.transfers import upload

# The tolerance of cumulative probabilities, in epsilons: despite rounding, 0.5 + 0.3 + 0.15 must reach a top_p of 0.95.
ROUNDING = 64
# The multipliers of SplitMix64 (Steele, Lea and Flood 2014), as signed numbers.
_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_FEW = 2**14  # so few numbers are sorted, because the calls of a search would take longer


def warped(scores: Tensor, configs: Sequence[GenerationConfig]) -> Tensor:
    """Applies temperature, top-k, top-p, min-p and typical to logits (B, V), each row with its own settings."""

    def column(of: Callable[[GenerationConfig], float]) -> Tensor:
        return upload(torch.tensor([of(config) for config in configs], dtype=torch.float64), scores.device)[:, None]

    scores = apply_temperature(scores, column(lambda config: config.temperature))
    if any(config.top_k is not None for config in configs):
        scores = apply_top_k(scores, column(lambda config: config.top_k or scores.shape[-1]))
    if any(config.top_p < 1 for config in configs):
        scores = apply_top_p(scores, column(lambda config: config.top_p))
    if any(config.min_p > 0 for config in configs):
        scores = apply_min_p(scores, column(lambda config: config.min_p))
    if any(config.typical_p < 1 for config in configs):
        scores = apply_typical(scores, column(lambda config: config.typical_p))
    return scores


def apply_temperature(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """Returns ``logits / temperature``, shifted so that the largest is 0 and no temperature above 0 overflows.

    A temperature beyond the normal numbers of the logits' type becomes the nearest one; the distribution is the same.
    """
    temperature = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device)
    numbers = torch.finfo(logits.dtype)
    bounded = temperature.clamp(numbers.tiny, numbers.max).to(logits.dtype)
    return (logits - logits.amax(dim=-1, keepdim=True)) / bounded


def apply_top_k(logits: Tensor, k: Tensor | int) -> Tensor:
    """Keeps the k largest logits; ties go to smaller token ids."""
    return logits.masked_fill(~_shortest(logits, torch.ones_like(logits), k), -torch.inf)


def apply_top_p(logits: Tensor, p: Tensor | float) -> Tensor:
    """Keeps the smallest set of likeliest tokens whose probability reaches p (Holtzman et al. 2020, section 3.1).

    The token that crosses p is kept; ties at the edge go to smaller token ids.
    """
    return _reaching(logits, logits, logits.softmax(dim=-1), p)


def apply_min_p(logits: Tensor, min_p: Tensor | float) -> Tensor:
    """Keeps tokens that are at least `min_p` times as likely as the likeliest one (Nguyen et al. 2024, section 3)."""
    least = torch.as_tensor(min_p, dtype=logits.dtype, device=logits.device).log()
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + least, -torch.inf)


def apply_typical(logits: Tensor, p: Tensor | float) -> Tensor:
    """Keeps the fewest tokens that reach p, by closeness of information to entropy (Meister et al. 2022, eq. 9)."""
    logprobs = logits.log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -torch.where(probabilities > 0, probabilities * logprobs, 0).sum(dim=-1, keepdim=True)
    return _reaching(logits, -(-logprobs - entropy).abs(), probabilities, p)


def _reaching(logits: Tensor, keys: Tensor, probabilities: Tensor, p: Tensor | float) -> Tensor:
    """Keeps the fewest tokens, in descending order of `keys`, whose probability reaches p; all if p is 1 or more."""
    p = torch.as_tensor(p, dtype=torch.float64, device=logits.device)
    kept = _shortest(keys, probabilities, p - ROUNDING * torch.finfo(logits.dtype).eps)
    return torch.where(kept | (p >= 1), logits, -torch.inf)


def _shortest(keys: Tensor, weights: Tensor, target: Tensor | float) -> Tensor:
    """Marks the fewest entries (B, V), at least one, in descending order of `keys`, whose `weights` reach `target`.

    Of equal keys the first come first.
    """
    target = torch.as_tensor(target, dtype=torch.float64, device=keys.device).clamp(min=torch.finfo(weights.dtype).tiny)
    if keys.numel() <= _FEW:
        order = keys.argsort(dim=-1, descending=True, stable=True)
        along = weights.gather(-1, order).double()
        return torch.empty_like(keys, dtype=torch.bool).scatter_(-1, order, along.cumsum(dim=-1) - along < target)
    width = 8 * keys.element_size()
    signed = (keys + 0.0).view(torch.int64 if width == 64 else torch.int32).to(torch.int64)  # -0.0 becomes 0.0
    # Integers in the order of the numbers: those of negative numbers are reversed.
    ordered = signed ^ ((signed >> (width - 1)) & ((1 << (width - 1)) - 1))
    # The key of the last entry is found bit by bit: the largest such that the entries from it on reach the target.
    last = torch.full_like(ordered[..., :1], -(1 << (width - 1)))
    one = torch.ones_like(last)
    for bit in reversed(range(width)):
        total = torch.where(ordered >= last + (one << bit), weights, 0).sum(dim=-1, keepdim=True, dtype=torch.float64)
        last = last + ((total >= target).long() << bit)
    above, equals = ordered > last, torch.where(ordered == last, weights, 0).double()
    before = torch.where(above, weights, 0).sum(dim=-1, keepdim=True, dtype=torch.float64)
    return above | ((ordered == last) & (before + equals.cumsum(dim=-1) - equals < target))


def draw(scores: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token (B,) for each row of logits `scores` (B, V) with its seed from `seeds` (B,), int64.

    Also returns the lead (B,) of each winner over the second, in logit minus logarithm of time.

    Every token gets an exponentially distributed time whose rate is its probability, and the shortest time wins: the
    draw is exact, and if rounding adds or drops an unlikely token, the winner almost never changes. (The inverse of the
    cumulative distribution would shift.) A time depends only on the row's seed and the token, so that batching changes
    the text as little as possible.
    """
    token_ids = torch.arange(scores.shape[-1], device=scores.device)
    times = -torch.log1p(-uniform(seeds[:, None], token_ids, scores.dtype))
    winner, lead, _ = likeliest(scores - times.log())
    return winner, lead


def likeliest(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The index of the largest score of each row (B, V), its lead over the second, and the score itself, each (B,).

    Ties go to the first index. Alone, a token has an infinite lead.
    """
    chosen = scores.argmax(dim=-1, keepdim=True)
    best = scores.gather(-1, chosen)
    lead = best - scores.scatter(-1, chosen, -torch.inf).amax(dim=-1, keepdim=True)
    return chosen[:, 0], lead[:, 0], best[:, 0]


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
