"""Two texts that are written with the same random numbers: how long they stay equal after a change of the prompt.

A token is drawn as the largest of ``log p_i + g_i`` with Gumbel noise g (Gumbel 1954; Maddison et al. 2014). Two
distributions that share g choose the same token as often as they are alike, so that a difference of the texts comes
from the model and not from chance. V is the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Predict = Callable[[Tensor], Tensor]
"""Maps token ids (B, T) to the logits (B, V) of the next token."""


def coincidence(p: Tensor, q: Tensor) -> Tensor:
    """The probability (..., V) that two draws with shared Gumbel noise from p and q (..., V) are both this token.

    It is ``1 / sum_j max(p_j / p_i, q_j / q_i)``: token i wins both races if each other time exceeds its own by these
    factors. The sum over i is the probability that the draws are equal.
    """
    p, q = p.double(), q.double()
    order = (p.log() - q.log()).nan_to_num(nan=0.0).argsort(-1, descending=True)
    ordered_p, ordered_q = p.gather(-1, order), q.gather(-1, order)
    # Tokens before i in this order have the larger ratio of p; those after it, of q.
    head_p = ordered_p.cumsum(-1)
    tail_q = ordered_q.flip(-1).cumsum(-1).flip(-1) - ordered_q
    # Neither p nor q is divided by, since one of them may be 0: then so is the result.
    found = ordered_p * ordered_q / (head_p * ordered_q + tail_q * ordered_p).clamp(min=torch.finfo(p.dtype).tiny)
    return torch.empty_like(found).scatter_(-1, order, found)


def divergence(logits_p: Tensor, logits_q: Tensor) -> Tensor:
    """``KL(p || q)`` in nats (...) of two distributions given by their logits (..., V), in float64."""
    log_p, log_q = logits_p.double().log_softmax(-1), logits_q.double().log_softmax(-1)
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1).clamp(min=0.0)


@dataclass(frozen=True)
class Survival:
    """How two texts stay together: for every step the probability that no token has differed yet, and its error.

    `divergence` is the mean KL in nats at each step between the two predictions of the network, over pairs that are
    still equal. It is that before the sampler removes unlikely tokens, which would make it infinite.
    """

    derived: ClassVar[tuple[str, ...]] = ("length",)
    equal: Sequence[float]
    error: Sequence[float]
    divergence: Sequence[float]

    @property
    def length(self) -> float:
        """The expected number of equal tokens among those that were measured."""
        return sum(self.equal)


@torch.no_grad()
def survival(
    predict: Predict,
    first_T: Tensor,
    second_T: Tensor,
    *,
    steps: int,
    pairs: int,
    generator: torch.Generator,
    warp: Callable[[Tensor], Tensor] = lambda logits_BV: logits_BV,
) -> Survival:
    """Continues two prompts with shared noise for `steps` tokens, in `pairs` independent trials.

    Tokens are drawn from the logits as `warp` changes them, like a sampler.

    Each trial follows a pair that has stayed equal, and carries the probability of that as its weight, so that no trial
    ends early and the estimate has no bias (sequential importance sampling).
    """
    texts = [prompt.expand(pairs, -1) for prompt in (first_T, second_T)]
    weights = torch.ones(pairs, dtype=torch.float64)
    equal, errors, divergences = [], [], []
    for _ in range(steps):
        logits = [predict(text) for text in texts]
        total = weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
        divergences.append(float((weights * divergence(*logits).cpu()).sum() / total))
        both = coincidence(*(warp(each).double().cpu().softmax(-1) for each in logits))
        weights = weights * both.sum(-1)
        equal.append(float(weights.mean()))
        errors.append(float(weights.std() / pairs**0.5) if pairs > 1 else 0.0)
        # Pairs that cannot stay equal have no weight, and any token will do.
        chances = torch.where(both.sum(-1, keepdim=True) > 0, both, 1.0)
        chosen = torch.multinomial(chances, 1, generator=generator).to(first_T.device)
        texts = [torch.cat((text, chosen), -1) for text in texts]
    return Survival(equal, errors, divergences)
