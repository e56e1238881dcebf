"""From logits to the next token: pure functions on (..., V), and a draw that is a function of its generator alone.

A token that may not be chosen has the logit -inf. Settings apply in the order of `transformers`: repetition penalty,
temperature, top-k, top-p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sheepop.generate.config import GenerationConfig

# Sums of float64 probabilities are rounded: 0.5 + 0.3 + 0.15 has to reach a top_p of 0.95.
_ROUNDING = 1e-12


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divides positive and multiplies negative logits by `penalty` where `seen` (..., V) is True.

    Keskar et al. 2019, "CTRL", section 4.1, in the form that lowers negative logits too.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """``logits / temperature``, shifted so that the largest is 0: no temperature above 0 overflows."""
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def apply_top_k(logits: Tensor, k: int) -> Tensor:
    """Keeps the k largest logits; of equal ones those with the smaller token id."""
    k = min(k, logits.shape[-1])
    smallest_kept = logits.topk(k, dim=-1).values[..., -1:]
    return _keep_largest(logits, smallest_kept, torch.full_like(smallest_kept, k))


def apply_top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the smallest set of likeliest tokens whose probability reaches p (Holtzman et al. 2020, section 3.1).

    The token that crosses p is kept; of equally likely ones at the edge those with the smaller token id.
    """
    if p == 1:
        return logits
    probabilities = logits.softmax(dim=-1)
    # All tokens below this bound weigh less than 1 - p together, so the set lies above it and only that is sorted.
    bound = (1 - p) / logits.shape[-1]
    candidates = int((probabilities >= bound).sum(dim=-1).max())
    largest = logits.topk(candidates, dim=-1).values
    likeliest = (largest - logits.logsumexp(dim=-1, keepdim=True)).exp()
    short_of_p = likeliest.cumsum(dim=-1) < p - _ROUNDING
    count = (short_of_p.sum(dim=-1, keepdim=True) + 1).clamp(max=candidates)
    return _keep_largest(logits, largest.gather(-1, count - 1), count)


def next_token_probabilities(logits: Tensor, config: GenerationConfig) -> Tensor:
    """The distribution (..., V) to sample from: temperature, top-k, top-p, renormalised to sum 1. Not for greedy."""
    logits = apply_temperature(logits, config.temperature)
    if config.top_k is not None:
        logits = apply_top_k(logits, config.top_k)
    return apply_top_p(logits, config.top_p).softmax(dim=-1)


def sample(probabilities: Tensor, generator: torch.Generator) -> int:
    """Draws a token id from `probabilities` (V,), float64 on the CPU.

    Every token races for an exponential time with its probability as the rate, and the first wins: this is exact,
    and when rounding adds or drops an unlikely candidate the winner almost never changes. (An inverse cumulative
    distribution would shift with it.) So text depends as little as can be on how requests are batched.
    """
    uniform = torch.rand(probabilities.shape, dtype=torch.float64, generator=generator)
    times = -torch.log1p(-uniform)
    return int((probabilities / times.clamp(min=torch.finfo(torch.float64).tiny)).argmax())


def _keep_largest(logits: Tensor, smallest_kept: Tensor, count: Tensor) -> Tensor:
    """Keeps `count` (..., 1) logits, the smallest of which is `smallest_kept` (..., 1); ties go to smaller ids."""
    above, equal = logits > smallest_kept, logits == smallest_kept
    room = count - above.sum(dim=-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(dim=-1) <= room))), -torch.inf)
