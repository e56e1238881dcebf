"""Loops of generation: texts that share their random numbers, the soft loop's exponent, repetition, and entropy.

Two texts are drawn as the largest of ``log p_i + g_i`` with the same Gumbel noise g (Maddison et al. 2014).
Two distributions that share g choose the same token as often as they are alike, so that a difference of the texts comes
from the model and not from chance. The soft loop feeds back the mean embedding of the predicted tokens, so that its
state, the embeddings of the last W tokens, changes smoothly. A text that repeats a phrase makes the model expect it
again: the loop is the more an attractor, the likelier the next repeat is and the more each repeat adds to that (Xu et
al. 2022, "Learning to break the loop"). V is the size of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sheepop.core.errors import UsageError
from sheepop.generate.config import GenerationConfig
from sheepop.generate.penalties import Occurrences, Penalties
from sheepop.generate.warping import warped
from sheepop.model import Transformer
from sheepop.model.probe import watch

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

    Tokens are drawn from the logits as `warp` changes them, like a sampler. Each trial follows a pair that has stayed
    equal, and carries the probability of that as its weight, so that no trial ends early and the estimate has no bias
    (sequential importance sampling).
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


_LEAST_REPEATS = 3
_LEAST_TOKENS = 8  # that a loop covers; shorter ones, such as three dots, are ordinary text


@dataclass(frozen=True)
class Entropy:
    """Holds the mean entropy in nats over the positions of a text at a temperature, and its `slope`."""

    temperature: float
    entropy: float
    slope: float


def entropy_and_slope(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The entropy (...) in nats of logits z (..., V) at a temperature T, and its derivative ``Var(z) / T^3``.

    The variance is that under the distribution itself. It follows from ``H = log Z - E(z) / T`` with
    ``dE(z)/dT = Var(z) / T^2``.
    """
    z = logits.double()
    log_p = (z / temperature).log_softmax(-1)
    p = log_p.exp()
    finite = torch.where(p > 0, z, 0.0)
    mean = (p * finite).sum(-1, keepdim=True)
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    return entropy, (p * (finite - mean).square()).sum(-1) / temperature**3


@dataclass(frozen=True)
class Loop:
    """A phrase that a text repeats at its end, and how often; a last repeat that is cut short does not count."""

    phrase: Sequence[int]
    repeats: int


def find_loop(token_ids: Sequence[int]) -> Loop | None:
    """The shortest phrase that fills the end of a text at least three times; None if there is none."""
    for period in range(1, len(token_ids) // _LEAST_REPEATS + 1):
        same = 0
        while same + period < len(token_ids) and token_ids[-1 - same] == token_ids[-1 - same - period]:
            same += 1
        repeats = (same + period) // period
        if repeats >= _LEAST_REPEATS and repeats * period >= _LEAST_TOKENS:
            return Loop(tuple(token_ids[len(token_ids) - period :]), repeats)
    return None


@dataclass(frozen=True)
class RepeatChances:
    """The probability that a phrase follows once more after it stood there 1, 2, 3, ... times, with some settings."""

    derived: ClassVar[tuple[str, ...]] = ("gain",)
    temperature: float
    repetition_penalty: float
    by_repeats: Sequence[float]

    @property
    def last(self) -> float:
        """The probability after the most repeats."""
        return self.by_repeats[-1]

    @property
    def gain(self) -> float:
        """The factor by which each repeat multiplies the odds of the next; above 1 the loop feeds itself."""
        if len(self.by_repeats) < 2:
            return 1.0
        log_odds = torch.tensor(self.by_repeats, dtype=torch.float64).logit(eps=1e-12)
        return math.exp(float(log_odds[-1] - log_odds[0]) / (len(log_odds) - 1))


@torch.no_grad()
def repeat_chances(
    model: Transformer, before: Sequence[int], phrase: Sequence[int], settings: Sequence[GenerationConfig], repeats: int
) -> list[RepeatChances]:
    """The chances of one more repeat of `phrase`, which follows the text `before`, after 1 to `repeats` repeats.

    There is a result for each of the `settings`, whose penalties, temperature and truncation apply as in generation.
    """
    ids = [*before, *list(phrase) * (repeats + 1)]
    first, period = len(before) + len(phrase), len(phrase)
    logits_TV = model(torch.tensor([ids], device=model.device))[0, first - 1 : -1]
    targets = torch.tensor(ids[first:], device=model.device)
    found = []
    for config in settings:
        scores = logits_TV.clone()
        rows = [
            (place, config, Occurrences(before or ids[:1], ids[len(before) : first + place]), ())
            for place in range(len(targets))
        ]
        if (config.repetition_penalty, config.presence_penalty, config.frequency_penalty) != (1.0, 0.0, 0.0):
            Penalties(model.device).apply(scores, rows, None)
        chosen = scores if config.greedy else warped(scores, [config] * len(scores))
        log_p = chosen.double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        if config.greedy:
            log_p = torch.where(chosen.argmax(-1) == targets, 0.0, -math.inf).double()
        chances = log_p.view(repeats, period).sum(-1).exp().tolist()
        found.append(RepeatChances(config.temperature, config.repetition_penalty, chances))
    return found
