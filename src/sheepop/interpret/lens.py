"""Readings of a trace by layer: the logit lens, the entropy of attention, the similarity and length of states.

Shapes: L layers, T tokens, H heads, D d_model, V vocab.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.interpret.stream import Stream
from sheepop.interpret.trace import Trace


@dataclass(frozen=True, eq=False)
class Lens:
    """The predictions of the residual stream before each block and after the last: tensors (L + 1, T) or (L + 1, T, k).

    `divergence` is KL(last, layer) in nats, `entropy` is in nats. `ids` and `probabilities` belong to the k likeliest
    tokens; `own` is the probability of the token that follows, NaN at the last position.
    """

    divergence: Tensor
    entropy: Tensor
    ids: Tensor
    probabilities: Tensor
    own: Tensor


@torch.no_grad()
def logit_lens(trace: Trace, count: int = 5) -> Lens:
    """Reads the residual stream at every layer as if it were the last (nostalgebraist 2020)."""
    layers, length, count = trace.num_layers + 1, trace.num_tokens, min(count, trace.config.vocabulary)
    divergence, entropy, own = (torch.full((layers, length), torch.nan) for _ in range(3))
    ids, probabilities = torch.zeros(layers, length, count, dtype=torch.long), torch.zeros(layers, length, count)
    follows = torch.tensor(trace.token_ids[1:], device=trace.residuals.device)
    for places, last in trace.log_probabilities():
        p_last, known = last.exp(), follows[places]
        certainty = _expected(p_last, last)
        for layer, residual_TD in enumerate(trace.residuals[:, places]):
            ((_, log_p),) = trace.log_probabilities(residual_TD)
            best = log_p.topk(count)
            ids[layer, places], probabilities[layer, places] = best.indices.cpu(), best.values.exp().cpu()
            of_known = log_p[: len(known)].gather(1, known[:, None])[:, 0]
            own[layer, places.start : places.start + len(known)] = of_known.exp().cpu()
            # The last row is the prediction itself, bit for bit.
            is_last = layer == trace.num_layers
            apart = (certainty - _expected(p_last, log_p)).clamp(min=0) if not is_last else torch.zeros_like(certainty)
            divergence[layer, places] = apart.cpu()
            entropy[layer, places] = -_expected(log_p.exp(), log_p).cpu()
    return Lens(divergence, entropy, ids, probabilities, own)


@torch.no_grad()
def attention_entropy(trace: Trace) -> Tensor:
    """The entropy of every head's weights (L, H, T) in nats: 0 if one token has all, log n for n equal weights."""
    found = trace.collect(["blocks.*.attention.weights"], lambda w_HTS: torch.special.entr(w_HTS.float()).sum(-1))
    return torch.stack(list(found.values())).cpu()


def residual_norms(stream: Stream) -> Tensor:
    """The lengths (L + 1, T) of a residual stream."""
    return stream.residuals.float().norm(dim=-1).cpu()


def token_similarity(trace: Trace, layer: int) -> Tensor:
    """The cosines (T, T) of the states before block `layer`; ``num_layers`` means after the last block."""
    states = torch.nn.functional.normalize(trace.residuals[layer].float(), dim=-1)
    return (states @ states.T).clamp(-1, 1).cpu()


def _expected(p: Tensor, value: Tensor) -> Tensor:
    """The sum (t,) of p times value over the last of two dimensions."""
    return torch.linalg.vecdot(p, value)
