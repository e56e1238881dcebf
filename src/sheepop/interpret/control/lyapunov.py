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
from torch.func import jvp

from sheepop.core.errors import UsageError
from sheepop.interpret.control.curvature import stepwise_attention
from sheepop.model import Transformer
from sheepop.model.probe import watch


@dataclass(frozen=True)
class Exponent:
    """The exponent in nats per step, with its standard error over the blocks of the trajectory."""

    value: float
    error: float
    steps: int


def lyapunov_exponent(
    step: Callable[[Tensor], Tensor],
    state: Tensor,
    generator: torch.Generator,
    *,
    steps: int,
    settling: int = 0,
    blocks: int = 8,
) -> Exponent:
    """The mean logarithm by which `step` stretches a tangent vector along the trajectory from `state`.

    The vector is normalised after each step. The first `settling` steps turn it towards the direction that grows most
    and do not count.
    """
    tangent = torch.randn(state.shape, generator=generator, dtype=state.dtype).to(state.device)
    tangent = tangent / tangent.norm()
    growths: list[float] = []
    for number in range(settling + steps):
        state, moved = jvp(step, (state,), (tangent,))
        state, size = state.detach(), moved.detach().norm()
        if number >= settling:
            growths.append(math.log(max(float(size), torch.finfo(state.dtype).tiny)))
        # A tangent that vanished stays 0: the loop has forgotten all of it.
        tangent = moved.detach() / size if size > 0 else moved.detach()
    per_block = max(1, steps // blocks)
    means = [
        sum(part) / len(part)
        for start in range(0, len(growths), per_block)
        if len(part := growths[start : start + per_block]) == per_block
    ]
    mean = sum(growths) / len(growths)
    error = math.sqrt(sum((each - mean) ** 2 for each in means) / max(1, len(means) - 1) / len(means))
    return Exponent(mean, error, steps)


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
        self._embeddings_VD = self._embedded(torch.arange(model.config.vocabulary, device=model.device))

    def state(self, token_ids: Tensor) -> Tensor:
        """The state (W, D) after the tokens (W,)."""
        return self._embeddings_VD[token_ids]

    def __call__(self, state_WD: Tensor) -> Tensor:
        """The next state."""
        model = self._model
        ids = torch.zeros(1, len(state_WD), dtype=torch.long, device=model.device)
        with torch.enable_grad(), watch(model, {"embedded": lambda _: state_WD[None]}), stepwise_attention(model):
            logits_V = model(ids, logits_to_keep=1)[0, -1]
        weights_V = (logits_V / self._temperature).softmax(-1)
        return torch.cat((state_WD[1:], (weights_V @ self._embeddings_VD)[None]))

    @torch.no_grad()
    def _embedded(self, token_ids: Tensor) -> Tensor:
        model = self._model
        vectors = model.embedding(token_ids) * model.embedding_scale
        return vectors if model.embedding_norm is None else model.embedding_norm(vectors)
