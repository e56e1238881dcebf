"""Comparison of two traces of one prompt: where a tuned model differs from its base model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.interpret.trace import Trace


@dataclass(frozen=True, eq=False)
class TraceComparison:
    """The differences between two passes over the same tokens.

    `distance` (L + 1, T) is the length of the difference of the residual streams divided by the length of the first;
    `cosine` (L + 1, T) is the cosine between them. `divergence` (T,) is KL(first, second) of the predictions in nats.
    `changed` are the positions at which the likeliest next tokens differ.
    """

    distance: Tensor
    cosine: Tensor
    divergence: Tensor
    changed: list[int]


@torch.no_grad()
def compare_traces(first: Trace, second: Trace) -> TraceComparison:
    """Compares two traces; raises `UsageError` if they differ in tokens or shapes."""
    if first.token_ids != second.token_ids or first.prompt.source_ids != second.prompt.source_ids:
        raise UsageError("The models read the prompt as different tokens, so their passes cannot be compared.")
    if first.residuals.shape != second.residuals.shape:
        shapes = [f"{trace.num_layers} blocks of width {trace.config.d_model}" for trace in (first, second)]
        raise UsageError(f"The first model has {shapes[0]}, the second {shapes[1]}; only equal shapes can be compared.")
    a, b = first.residuals.double().cpu(), second.residuals.double().cpu()
    divergence = torch.zeros(first.num_tokens, dtype=torch.float64)
    for (places, log_p), (_, log_q) in zip(first.log_probabilities(), second.log_probabilities(), strict=True):
        p, both = log_p.double().exp(), log_p.double() - log_q.double()
        divergence[places] = torch.where(p > 0, p * both, 0).sum(-1).cpu()
    rows = zip(first.predictions, second.predictions, strict=True)
    changed = [one.position for one, other in rows if one.top[0][0] != other.top[0][0]]
    distance = (a - b).norm(dim=-1) / a.norm(dim=-1).clamp(min=torch.finfo(a.dtype).tiny)
    return TraceComparison(distance, torch.cosine_similarity(a, b, dim=-1), divergence, changed)
