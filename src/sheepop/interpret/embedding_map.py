"""A two-dimensional map of token embeddings, and the nearest neighbours of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.model import Transformer


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
    """The tokens whose embeddings have the largest cosine to that of `token_id`, without the token itself."""
    ids = torch.arange(model.config.vocabulary, device=model.device)
    table = model.embedding(ids).float()
    own = table[range(len(table))[token_id]]
    cosines = torch.nn.functional.cosine_similarity(table, own[None], dim=-1)
    cosines[token_id] = -torch.inf
    best = cosines.topk(min(count, len(table) - 1))
    distances = (table[best.indices] - own).norm(dim=-1)
    rows = zip(best.indices.tolist(), best.values.tolist(), distances.tolist(), strict=True)
    return [Neighbour(*row) for row in rows]
