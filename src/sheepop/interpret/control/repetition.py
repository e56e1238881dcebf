"""Repetition as an attractor of generation, and how entropy follows temperature.

A text that repeats a phrase makes the model expect it again. The loop is the more an attractor, the likelier the next
repeat is and the more each repeat adds to that (Xu et al. 2022, "Learning to break the loop").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sheepop.generate.config import GenerationConfig
from sheepop.generate.penalties import Occurrences, Penalties
from sheepop.generate.warping import warped
from sheepop.model import Transformer

_LEAST_REPEATS = 3
_LEAST_TOKENS = 8  # that a loop covers; shorter ones, such as three dots, are ordinary text


@dataclass(frozen=True)
class Entropy:
    """The mean entropy in nats over the positions of a text at a temperature, and its mean `slope`."""

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
        return math.exp((_log_odds(self.last) - _log_odds(self.by_repeats[0])) / (len(self.by_repeats) - 1))


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


def _log_odds(chance: float) -> float:
    least = 1e-12
    bounded = min(max(chance, least), 1 - least)
    return math.log(bounded / (1 - bounded))
