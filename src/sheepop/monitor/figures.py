"""The figures of a log: how often answers are cut, repeat themselves or get bad votes, their lengths and times."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sheepop.core.errors import UsageError
from sheepop.data.duplicates.shingles import shingles_of_words, word_hashes
from sheepop.evaluate.statistics import share_interval
from sheepop.monitor.answered import Answered

_WORDS = 4
_FEWEST_RUNS = 16  # of words, before an answer can be called repetitive
_REPEATED = 0.5
_QUANTILES = (0.5, 0.95)


@dataclass(frozen=True)
class Share:
    """A share of answers with its 95 percent interval by Wilson's score (1927), and what it is a share of."""

    value: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, flags: Sequence[bool]) -> Share | None:
        """The share of true flags; None without flags."""
        if not flags:
            return None
        return cls(sum(flags) / len(flags), *share_interval(sum(flags), len(flags)), len(flags))

    def __str__(self) -> str:
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%} of {self.count:,})"


@dataclass(frozen=True)
class Figures:
    """The figures of some answers.

    Shares: `cut` reached the length limit, `left` lost their clients, `failed` ended by an error, `empty` have no text,
    `repetitive` repeat more than half of their runs of four words, and `bad` have more bad votes than good ones, of
    those with a vote. `lengths` and `times` have the median and the 95th percentile. `separation` is the probability
    that an answer with a good vote had a higher mean log-probability than one with a bad vote (the area under the ROC
    curve): 0.5 says that the model's own confidence tells nothing about votes.
    """

    answers: int
    shares: dict[str, Share | None]
    lengths: dict[str, tuple[float, ...]]
    times: dict[str, tuple[float, ...]]
    mean_logprob: tuple[float, ...] | None
    separation: float | None

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data."""
        return asdict(self)


def figures(answers: Sequence[Answered]) -> Figures:
    """Returns the figures of `answers`; raises `ValueError` if there are none."""
    if not answers:
        raise ValueError("there are no answers")
    whole = [each for each in answers if each.ended == "whole"]
    flags: dict[str, list[bool]] = {
        "cut": [each.reason == "length" for each in whole],
        "left": [each.ended == "left" for each in answers],
        "failed": [each.ended not in ("whole", "left") for each in answers],
        "empty": [not each.text.strip() and isinstance(each.answer, str) for each in whole],
        "repetitive": [is_repetitive(each.text) for each in whole],
        "bad": [each.votes < 0 for each in answers if each.votes],
    }
    logprobs = [each.mean_logprob for each in answers if each.mean_logprob is not None]
    voted = [(each.mean_logprob, each.votes > 0) for each in answers if each.votes and each.mean_logprob is not None]
    return Figures(
        len(answers),
        {name: Share.of(found) for name, found in flags.items()},
        {
            "prompt tokens": _quantiles(each.prompt_tokens for each in answers),
            "answer tokens": _quantiles(each.tokens for each in answers),
        },
        {
            "first token": _quantiles(each.first_token_seconds for each in answers),
            "whole answer": _quantiles(each.seconds for each in answers),
        },
        _quantiles(logprobs, (0.05, 0.5)) if logprobs else None,
        _separation([value for value, good in voted if good], [value for value, good in voted if not good]),
    )


def is_repetitive(text: str) -> bool:
    """Whether more than half of a text's runs of four words occur before in it."""
    runs = shingles_of_words(word_hashes(text, "prose"), "prose", _WORDS)
    return runs.size >= _FEWEST_RUNS and len(np.unique(runs)) < (1 - _REPEATED) * runs.size


def _quantiles(values: Iterable[float], at: Sequence[float] = _QUANTILES) -> tuple[float, ...]:
    return tuple(np.quantile(np.array(list(values), dtype=float), at).tolist())


def _separation(good: Sequence[float], bad: Sequence[float]) -> float | None:
    """The probability that a good one is above a bad one, where equal ones count half (Mann and Whitney 1947)."""
    if not good or not bad:
        return None
    below = np.searchsorted(np.sort(bad), good, "left") + np.searchsorted(np.sort(bad), good, "right")
    return float(below.mean() / (2 * len(bad)))


_SIGNS: dict[str, Callable[[float, float], bool]] = {">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class Alert:
    """A bound of a share, such as ``bad>0.2``. It fires if the whole interval of the share is beyond the bound."""

    share: str
    sign: str
    bound: float

    @classmethod
    def of(cls, text: str, known: Iterable[str]) -> Alert:
        """Reads an alert; raises `UsageError`."""
        for sign in _SIGNS:
            share, found, bound = (part.strip() for part in text.partition(sign))
            if found:
                break
        known = list(known)
        try:
            value = float(bound)
        except ValueError:
            value = -1.0
        if share not in known or not 0 <= value <= 1:
            raise UsageError(
                f"--alert {text!r} is not of the form SHARE>BOUND or SHARE<BOUND, such as bad>0.2. The shares are "
                f"{', '.join(known)}, and a bound is between 0 and 1."
            )
        return cls(share, sign, value)

    def fires(self, found: Figures) -> bool:
        """Whether the share is beyond the bound for certain."""
        share = found.shares[self.share]
        return share is not None and _SIGNS[self.sign](share.low if self.sign == ">" else share.high, self.bound)

    def __str__(self) -> str:
        return f"{self.share}{self.sign}{self.bound:g}"
