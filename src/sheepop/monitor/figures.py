"""The figures of a log: how often answers are cut, decline, repeat themselves or get bad votes, lengths and times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import UsageError
from sheepop.data.duplicates.shingles import shingles_of_words, word_hashes
from sheepop.evaluate.statistics import (
    Floats,
    Reliability,
    logistic_regression,
    probability_above,
    reliability,
    share_interval,
)
from sheepop.monitor.answered import Answered

SHARES = {
    "cut": "cut at the length limit",
    "left": "client left",
    "failed": "failed",
    "empty": "empty",
    "repetitive": "repeat themselves",
    "declined": "declined to answer",
    "bad": "bad, of those with votes",
    "unsure": "low confidence",
}
"""The shares of answers, in words."""
DRIFT = "drift"
"""The share of an alert about drift: how often prompts are told from the data."""
_WORDS = 4
_FEWEST_RUNS = 16  # of words, before an answer can be called repetitive
_REPEATED = 0.5
_QUANTILES = (0.5, 0.95)
_BEGINNING = 300  # characters of an answer in which it declines
_DECLINES = re.compile(
    r"\bI(?: can(?:no|['’])t| can not| won['’]t| will not| must decline to"
    r"|(?:['’]m| am) (?:unable|not able|not allowed) to)"
    r" (?:help|assist|answer|provide|comply|discuss|create|write|share|give|tell|support|offer|generate|engage|do)\b"
    r"|^\W*(?:I(?:['’]m| am) )?sorry, (?:but )?I\b|\bas an AI\b",
    re.IGNORECASE,
)
_FEWEST_VOTES = 10  # of each kind, before confidence is calibrated by them
_FOLDS, _BINS = 5, 5
_LONGEST_BY_DAYS = 35
_ALERT = re.compile(r"(?P<share>\w+)\s*(?P<sign>[<>])\s*(?P<bound>\d*\.?\d+(e-?\d+)?)", re.ASCII)


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
    """Statistics of the answers of a log.

    Shares: `cut` reached the length limit, `left` lost their clients, `failed` ended by an error, `empty` have no text,
    `repetitive` repeat more than half of their runs of four words, `declined` say in English that they will not answer,
    `bad` have more bad votes than good ones, of those with a vote, and `unsure` have a chance of a good vote below one
    half, see `good_chances`. `lengths` and `times` have the median and the 95th percentile. `separation` is the
    probability that an answer with a good vote had a higher mean log-probability than one with a bad vote (the area
    under the ROC curve): 0.5 says that the model's own confidence tells nothing about votes. `calibration` compares
    chances of answers that they were not fitted to with the votes on them.
    """

    answers: int
    shares: dict[str, Share | None]
    lengths: dict[str, tuple[float, ...]]
    times: dict[str, tuple[float, ...]]
    mean_logprob: tuple[float, ...] | None
    separation: Share | None
    calibration: Reliability | None


def figures(answers: Sequence[Answered]) -> Figures:
    """Returns the figures of `answers`; raises `ValueError` if there are none."""
    if not answers:
        raise ValueError("there are no answers")
    whole = [each for each in answers if each.ended == "whole"]
    chances = good_chances(answers)
    flags: dict[str, list[bool]] = {
        "cut": [each.reason == "length" for each in whole],
        "left": [each.ended == "left" for each in answers],
        "failed": [each.ended not in ("whole", "left") for each in answers],
        "empty": [not each.text.strip() and isinstance(each.answer, str) for each in whole],
        "repetitive": [is_repetitive(each.text) for each in whole],
        "declined": [declines(each.text) for each in whole],
        "bad": [each.votes < 0 for each in answers if each.votes],
        "unsure": [] if chances is None else [chance < 0.5 for chance in chances if np.isfinite(chance)],
    }
    logprobs = [each.mean_logprob for each in answers if each.mean_logprob is not None]
    sure, liked = _voted(answers)
    are_both = liked.any() and not liked.all()
    separation = Share(*probability_above(sure[liked], sure[~liked]), len(sure)) if are_both else None
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
        separation,
        _calibration(sure, liked) if chances is not None else None,
    )


def over_time(answers: Sequence[Answered]) -> dict[str, Figures]:
    """The figures of each day, or of each week (by its Monday) if the answers are of more than 35 days."""
    days = [date.fromisoformat(each.time[:10]) for each in answers]
    by_day = (max(days) - min(days)).days <= _LONGEST_BY_DAYS
    found: dict[date, list[Answered]] = {}
    for day, answer in zip(days, answers, strict=True):
        found.setdefault(day if by_day else day - timedelta(day.weekday()), []).append(answer)
    return {day.isoformat(): figures(of_day) for day, of_day in sorted(found.items())}


def declines(text: str) -> bool:
    """Whether a text begins by saying, in English, that its writer will not or cannot answer."""
    return _DECLINES.search(text[:_BEGINNING]) is not None


def least_sure(answers: Sequence[Answered], most: int = 5) -> list[Answered]:
    """Returns the answers without votes that have the lowest mean log-probability: the model was least sure of them."""
    known = [each for each in answers if not each.num_votes and each.mean_logprob is not None]
    return sorted(known, key=lambda each: each.mean_logprob or 0.0)[:most]


def good_chances(answers: Sequence[Answered]) -> Floats | None:
    """The chance that each answer would get a good vote, by its mean log-probability; nan without one.

    It is a logistic regression on the answers with votes (Platt 1999); None if fewer than ten got a good vote, or a bad
    one.
    """
    sure, liked = _voted(answers)
    if min(liked.sum(), (~liked).sum()) < _FEWEST_VOTES:
        return None
    asked = [np.nan if each.mean_logprob is None else each.mean_logprob for each in answers]
    return _chances(sure, liked, np.array(asked))


def _voted(answers: Sequence[Answered]) -> tuple[Floats, NDArray[np.bool_]]:
    """The mean log-probabilities of the answers with good votes and then with bad ones, and which are the good ones."""
    good, bad = (
        [each.mean_logprob for each in answers if each.mean_logprob is not None and sign * each.votes > 0]
        for sign in (1, -1)
    )
    return np.array([*good, *bad], dtype=float), np.repeat([True, False], [len(good), len(bad)])


def _chances(sure: Floats, liked: NDArray[np.bool_], asked: Floats) -> Floats:
    middle, spread = sure.mean(), max(float(sure.std()), 1e-9)
    columns = np.stack([np.ones_like(sure), (sure - middle) / spread], axis=1)
    # The weak penalty is for votes that confidence separates without error.
    found = logistic_regression(columns, liked.astype(float), np.ones_like(sure), np.diag([1e-3, 1e-1]))
    return 1 / (1 + np.exp(-found[0] - found[1] * (asked - middle) / spread))


def _calibration(sure: Floats, liked: NDArray[np.bool_]) -> Reliability:
    """Chances of every fifth answer from a fit to the others, beside the votes."""
    folds, chances = np.arange(len(sure)) % _FOLDS, np.empty_like(sure)
    for fold in range(_FOLDS):
        known, left_out = folds != fold, folds == fold
        chances[left_out] = _chances(sure[known], liked[known], sure[left_out])
    return reliability(chances.tolist(), liked.tolist(), _BINS)


def is_repetitive(text: str) -> bool:
    """Whether more than half of a text's runs of four words occur before in it."""
    runs = shingles_of_words(word_hashes(text, "prose"), "prose", _WORDS)
    return runs.size >= _FEWEST_RUNS and len(np.unique(runs)) < (1 - _REPEATED) * runs.size


def _quantiles(values: Iterable[float], at: Sequence[float] = _QUANTILES) -> tuple[float, ...]:
    return tuple(np.quantile(np.array(list(values), dtype=float), at).tolist())


@dataclass(frozen=True)
class Alert:
    """A bound of a share, such as ``bad>0.2``. It fires if the whole interval of the share is beyond the bound."""

    share: str
    sign: str
    bound: float

    @classmethod
    def of(cls, text: str) -> Alert:
        """Reads an alert; raises `UsageError`."""
        known, match = (*SHARES, DRIFT), _ALERT.fullmatch(text.strip())
        if match is None or match["share"] not in known or float(match["bound"]) > 1:
            raise UsageError(
                f"--alert {text!r} is not of the form SHARE>BOUND or SHARE<BOUND, such as bad>0.2. The shares are "
                f"{', '.join(known)}, and a bound is between 0 and 1."
            )
        return cls(match["share"], match["sign"], float(match["bound"]))

    def fires(self, share: Share | None) -> bool:
        """Whether `share` is beyond the bound for certain."""
        if share is None:
            return False
        return share.low > self.bound if self.sign == ">" else share.high < self.bound

    def __str__(self) -> str:
        return f"{self.share}{self.sign}{self.bound:g}"
