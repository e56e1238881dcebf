"""Where tokens lie in the space of their embeddings: a map of two dimensions, and the nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.model import Transformer


@dataclass(frozen=True)
class Neighbour:
    """A token with its cosine to another, and its distance in the space of embeddings."""

    token_id: int
    cosine: float
    distance: float


@dataclass(frozen=True, eq=False)
class EmbeddingMap:
    """Tokens on the two axes of largest variance: `points` (N, 2), and the share of the variance of each axis."""

    token_ids: list[int]
    points: Tensor
    explained: tuple[float, float]


@torch.no_grad()
def embedding_map(model: Transformer, token_ids: Sequence[int]) -> EmbeddingMap:
    """A principal component analysis of the embeddings of these tokens; the sign of an axis makes its largest positive.

    Fewer than three different tokens leave axes without variance, whose coordinates are 0.
    """
    ids = list(dict.fromkeys(token_ids))
    rows = model.embedding(torch.tensor(ids, device=model.device)).double().cpu()
    centred = rows - rows.mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    points = torch.zeros(len(ids), 2, dtype=torch.float64)
    count = min(2, len(s))
    points[:, :count] = (u * s)[:, :count]
    signs = torch.sign(points.gather(0, points.abs().argmax(0, keepdim=True)))
    total = float(s.square().sum())
    shares = [float(s[axis] ** 2) / total if axis < len(s) and total > 0 else 0.0 for axis in range(2)]
    return EmbeddingMap(ids, points * signs, (shares[0], shares[1]))


@torch.no_grad()
def nearest_tokens(model: Transformer, token_id: int, count: int = 8) -> list[Neighbour]:
    """The tokens whose embeddings have the largest cosine to that of `token_id`, which is left out."""
    ids = torch.arange(model.config.vocabulary, device=model.device)
    table = model.embedding(ids).float()
    own = table[range(len(table))[token_id]]
    cosines = torch.nn.functional.cosine_similarity(table, own[None], dim=-1)
    cosines[token_id] = -torch.inf
    best = cosines.topk(min(count, len(table) - 1))
    distances = (table[best.indices] - own).norm(dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), distances.tolist(), strict=True)
    return [Neighbour(*row) for row in rows]
