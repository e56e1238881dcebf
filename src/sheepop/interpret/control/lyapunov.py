"""The Lyapunov exponent of a loop: whether a small change of its state grows or fades (Benettin et al. 1980).

The soft loop of generation feeds back the mean embedding of the predicted tokens instead of one sampled token, so that
its state, the embeddings of the last W tokens, changes smoothly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.model import Transformer
from sheepop.model.probe import watch

_DISTANCE = 1e-7  # of the state's length: far above rounding in float64, and far below where the loop curves


@dataclass(frozen=True)
class Exponent:
    """The exponent in nats per step, with its standard error over the blocks of the trajectory."""

    value: float
    error: float
    steps: int


@torch.no_grad()
def lyapunov_exponent(
    step: Callable[[Tensor], Tensor],
    state: Tensor,
    generator: torch.Generator,
    *,
    steps: int,
    settling: int = 0,
    blocks: int = 8,
) -> Exponent:
    """The mean logarithm by which `step` stretches a small difference along the trajectory from `state` (float64).

    A second trajectory is drawn back to a distance of 1e-7 of the state's length after each step. The first `settling`
    steps turn the difference towards the direction that grows most and do not count. What shrinks below rounding counts
    as shrunk to rounding.
    """
    if state.dtype != torch.float64:
        raise ValueError(f"a difference of 1e-7 needs float64, and the state is {state.dtype}")
    direction = torch.randn(state.shape, generator=generator, dtype=state.dtype).to(state.device)
    growths: list[float] = []
    for number in range(settling + steps):
        distance = _DISTANCE * float(state.norm())
        other = step(state + direction * (distance / direction.norm()))
        state = step(state)
        moved = other - state
        size = float(moved.norm())
        if number >= settling:
            growths.append(math.log(max(size, torch.finfo(state.dtype).eps * float(state.norm())) / distance))
        direction = moved if size > 0 else direction
    found, per_block = torch.tensor(growths, dtype=torch.float64), max(1, steps // blocks)
    means, mean = found.unfold(0, per_block, per_block).mean(-1), found.mean()
    variance = (means - mean).square().sum() / max(1, len(means) - 1)
    return Exponent(float(mean), float((variance / len(means)).sqrt()), steps)


class SoftLoop:
    """The loop of generation on embeddings: the state (W, D) loses its first row and gets ``sum_v p_v e_v`` at its end.

    p is the softmax of the last logits over `temperature`. Raises `UsageError` for a model that reads token ids beside
    their embeddings, since a mean of tokens has none.
    """

    def __init__(self, model: Transformer, temperature: float) -> None:
        if model.ngrams is not None or model.layer_inputs is not None or model.architecture != "decoder":
            raise UsageError(
                "The soft loop feeds back mixtures of tokens, and this model also reads the token ids themselves "
                "(n-grams, vectors of layers, or a source text), which a mixture does not have."
            )
        self._model, self._temperature = model, temperature
        # A scale may follow the mean, so that a large table is not copied; a norm of each vector may not.
        every = torch.arange(model.config.vocabulary, device=model.device)
        self._normed_VD = None if model.embedding_norm is None else self.state(every)

    @torch.no_grad()
    def state(self, token_ids: Tensor) -> Tensor:
        """The state (W, D) after the tokens (W,)."""
        model = self._model
        vectors = model.embedding(token_ids) * model.embedding_scale
        return vectors if model.embedding_norm is None else model.embedding_norm(vectors)

    def __call__(self, state_WD: Tensor) -> Tensor:
        """The next state."""
        model = self._model
        ids = torch.zeros(1, len(state_WD), dtype=torch.long, device=model.device)
        with watch(model, {"embedded": lambda _: state_WD[None]}):
            logits_V = model(ids, logits_to_keep=1)[0, -1]
        weights_V = (logits_V / self._temperature).softmax(-1)
        if self._normed_VD is None:
            mean_D = weights_V @ model.embedding.weight * model.embedding_scale
        else:
            mean_D = weights_V @ self._normed_VD
        return torch.cat((state_WD[1:], mean_D[None]))
