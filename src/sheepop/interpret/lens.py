"""Readings of traces and embeddings: the logit lens, entropies, similarities, lengths, comparisons, a map of tokens.

Shapes: L layers, T tokens, H heads, D d_model, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.interpret.trace import Stream, Trace
from sheepop.model import Transformer

_ROWS = 2**14  # embeddings that are compared at a time


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
        certainty = torch.linalg.vecdot(p_last, last)
        for layer, residual_TD in enumerate(trace.residuals[:, places]):
            ((_, log_p),) = trace.log_probabilities(residual_TD)
            best = log_p.topk(count)
            ids[layer, places], probabilities[layer, places] = best.indices.cpu(), best.values.exp().cpu()
            of_known = log_p[: len(known)].gather(1, known[:, None])[:, 0]
            own[layer, places.start : places.start + len(known)] = of_known.exp().cpu()
            apart = (certainty - torch.linalg.vecdot(p_last, log_p)).clamp(min=0).cpu()
            # The last row is the prediction itself, bit for bit.
            divergence[layer, places] = 0.0 if layer == trace.num_layers else apart
            entropy[layer, places] = -torch.linalg.vecdot(log_p.exp(), log_p).cpu()
    return Lens(divergence, entropy, ids, probabilities, own)


@torch.no_grad()
def attention_entropy(trace: Trace) -> Tensor:
    """The entropy of every head's weights (L, H, T) in nats: 0 if one token has all, log n for n equal weights.

    Layers without attention are left out.
    """
    found = trace.collect(["blocks.*.attention.weights"], lambda w_HTS: torch.special.entr(w_HTS.float()).sum(-1))
    return torch.stack(list(found.values())).cpu()


def residual_norms(stream: Stream) -> Tensor:
    """The lengths (L + 1, T) of a residual stream."""
    return stream.residuals.float().norm(dim=-1).cpu()


def token_similarity(trace: Trace, layer: int) -> Tensor:
    """The cosines (T, T) of the states before block `layer`; ``num_layers`` means after the last block."""
    states = torch.nn.functional.normalize(trace.residuals[layer].float(), dim=-1)
    return (states @ states.T).clamp(-1, 1).cpu()


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


@dataclass(frozen=True)
class Neighbour:
    """A token with its embedding's cosine to that of another token, and their distance."""

    token_id: int
    cosine: float
    distance: float


@dataclass(frozen=True, eq=False)
class EmbeddingMap:
    """The positions of tokens on the two axes of largest variance: `points` (N, 2), and each axis's variance share."""

    token_ids: list[int]
    points: Tensor
    explained: tuple[float, float]


@torch.no_grad()
def embedding_map(model: Transformer, token_ids: Sequence[int]) -> EmbeddingMap:
    """Principal component analysis of the embeddings of these tokens; the largest coordinate on each axis is positive.

    With fewer than three different tokens, axes without variance have coordinates of 0.
    """
    ids = list(dict.fromkeys(token_ids))
    rows = model.embedding(torch.tensor(ids, device=model.device)).double().cpu()
    u, s, _ = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    points = torch.zeros(len(ids), 2, dtype=torch.float64)
    count = min(2, len(s))
    points[:, :count] = (u * s)[:, :count]
    signs = torch.sign(points.gather(0, points.abs().argmax(0, keepdim=True)))
    total = float(s.square().sum())
    shares = [float(s[axis] ** 2) / total if axis < len(s) and total > 0 else 0.0 for axis in range(2)]
    return EmbeddingMap(ids, points * signs, (shares[0], shares[1]))


@torch.no_grad()
def nearest_tokens(model: Transformer, token_id: int, count: int = 8) -> list[Neighbour]:
    """The tokens whose embeddings have the largest cosine to that of `token_id`, without the token itself."""
    size = model.config.vocabulary
    own = model.embedding(torch.tensor([range(size)[token_id]], device=model.device)).float()
    parts = torch.split(torch.arange(size, device=model.device), _ROWS)
    cosines = torch.cat([torch.cosine_similarity(model.embedding(ids).float(), own, dim=-1) for ids in parts])
    cosines[token_id] = -torch.inf
    best = cosines.topk(min(count, size - 1))
    distances = (model.embedding(best.indices).float() - own).norm(dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), distances.tolist(), strict=True)
    return [Neighbour(*row) for row in rows]
