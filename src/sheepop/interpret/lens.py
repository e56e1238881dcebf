"""What can be read off a trace layer by layer: early guesses, the entropy of attention, likeness and length of states.

Shapes: L layers, T tokens, H heads, D d_model, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.interpret.trace import Trace


@dataclass(frozen=True, eq=False)
class Lens:
    """What the network would say if it ended before each block, and behind the last: all (L + 1, T), or (..., k).

    `divergence` is KL(last, layer) in nats, `entropy` in nats; `ids` and `probabilities` are of the k likeliest tokens,
    `own` is the probability of the token that follows, NaN behind the last.
    """

    divergence: Tensor
    entropy: Tensor
    ids: Tensor
    probabilities: Tensor
    own: Tensor


@torch.no_grad()
def logit_lens(trace: Trace, count: int = 5) -> Lens:
    """The residual stream at every layer read off as if it were the last (nostalgebraist 2020)."""
    layers, length, count = trace.num_layers + 1, trace.num_tokens, min(count, trace.config.vocabulary)
    divergence, entropy, own = (torch.full((layers, length), torch.nan) for _ in range(3))
    ids, probabilities = torch.zeros(layers, length, count, dtype=torch.long), torch.zeros(layers, length, count)
    follows = torch.tensor(trace.token_ids[1:], device=trace.residuals.device)
    for layer in reversed(range(layers)):
        rows = zip(trace.log_probabilities(), trace.log_probabilities(trace.residuals[layer]), strict=True)
        for (places, last), (_, log_p) in rows:
            p = log_p.exp()
            divergence[layer, places] = _expected(last.exp(), last - log_p).cpu()
            entropy[layer, places] = -_expected(p, log_p).cpu()
            best = p.topk(count)
            ids[layer, places], probabilities[layer, places] = best.indices.cpu(), best.values.cpu()
            known = follows[places]
            own[layer, places.start : places.start + len(known)] = p[: len(known)].gather(1, known[:, None])[:, 0].cpu()
    return Lens(divergence, entropy, ids, probabilities, own)


@torch.no_grad()
def attention_entropy(trace: Trace) -> Tensor:
    """Of the weights of every head (L, H, T), in nats: 0 where one token has all, log n where n have the same."""
    found = trace.collect(["blocks.*.attention.weights"], lambda w_HTS: -_expected(w_HTS.float(), w_HTS.float().log()))
    return torch.stack(list(found.values())).cpu()


def residual_norms(trace: Trace) -> Tensor:
    """The lengths of the residual stream (L + 1, T)."""
    return trace.residuals.float().norm(dim=-1).cpu()


def token_similarity(trace: Trace, layer: int) -> Tensor:
    """Cosines (T, T) of the states before block `layer`; ``num_layers`` is behind the last."""
    states = torch.nn.functional.normalize(trace.residuals[layer].float(), dim=-1)
    return (states @ states.T).clamp(-1, 1).cpu()


def _expected(p: Tensor, value: Tensor) -> Tensor:
    """The sum of p times value over the last dimension, where what never happens counts for nothing."""
    return torch.where(p > 0, p * value, 0).sum(-1)
