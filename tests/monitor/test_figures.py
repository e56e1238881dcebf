"""The figures of a log, by hand and against independent implementations."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from scipy.stats import mannwhitneyu
from sklearn.linear_model import LogisticRegression

from sheepop.core.errors import UsageError
from sheepop.monitor.answered import Answered
from sheepop.monitor.figures import Alert, declines, figures, good_chances, is_repetitive, least_sure, over_time


def answered(**more: Any) -> Answered:
    common = {
        "place": "log:2", "id": "a1", "choice": 0, "time": "2026-01-01T10:00:00+00:00", "model": "m", "prompt": "Once",
        "tools": (), "answer": "upon a time", "reason": "stop", "ended": "whole", "prompt_tokens": 3, "tokens": 4,
        "mean_logprob": -1.0, "first_token_seconds": 0.1, "seconds": 0.5,
    }  # fmt: skip
    return Answered(**{**common, **more})


def test_shares_are_of_the_answers_that_they_can_be_of() -> None:
    found = figures(
        [
            answered(),
            answered(reason="length", num_votes=1, votes=1),
            answered(ended="left", reason=None, num_votes=2, votes=0),
            answered(ended="engine_error", reason=None),
            answered(answer=" \n", num_votes=1, votes=-1),
            answered(answer={"role": "assistant", "content": None, "tool_calls": [{}]}, num_votes=3, votes=-1),
        ]
    )
    shares = {name: (share.value, share.count) for name, share in found.shares.items() if share is not None}
    assert shares == {
        "cut": (1 / 4, 4), "left": (1 / 6, 6), "failed": (1 / 6, 6), "empty": (1 / 4, 4), "repetitive": (0.0, 4),
        "declined": (0.0, 4), "bad": (2 / 3, 3),
    }  # fmt: skip
    assert figures([answered()]).shares["bad"] is None
    # Wilson's interval of 1 of 4, worked out by hand with z = 1.96.
    assert found.shares["cut"] is not None
    assert (found.shares["cut"].low, found.shares["cut"].high) == pytest.approx((0.0456, 0.6994), abs=2e-4)


def test_confidence_and_votes_are_compared_as_by_mann_and_whitney() -> None:
    draw = random.Random(3)
    answers = [
        answered(mean_logprob=round(draw.gauss(-1, 0.5), 1), num_votes=1, votes=draw.choice((-1, 1))) for _ in range(60)
    ]
    good, bad = ([each.mean_logprob for each in answers if each.votes == vote] for vote in (1, -1))
    expected = mannwhitneyu(good, bad).statistic / (len(good) * len(bad))
    separation = figures(answers).separation
    assert separation is not None and (separation.value, separation.count) == (pytest.approx(expected), 60)
    assert figures([answered(num_votes=1, votes=1)]).separation is None


def test_a_text_that_runs_in_a_circle_is_repetitive() -> None:
    circle = "and then he said that " * 12
    assert is_repetitive(circle)
    assert not is_repetitive("too short " * 3)
    words = "the quick brown fox jumps over one lazy dog while seven tired sheep watch him from behind their low wall"
    assert not is_repetitive(words)
    assert not is_repetitive(f"{words}. {words}"), "half of it is new"


@pytest.mark.parametrize(
    ("bad", "count", "fires"), [(4, 10, False), (40, 100, True), (0, 100, False), (21, 100, False)]
)
def test_an_alert_fires_only_where_the_whole_interval_is_beyond_the_bound(bad: int, count: int, fires: bool) -> None:
    answers = [answered(num_votes=1, votes=-1 if number < bad else 1) for number in range(count)]
    share = figures(answers).shares["bad"]
    assert Alert.of("bad > 0.2").fires(share) is fires
    assert not Alert.of("bad<0").fires(share)
    assert Alert.of("bad>0").fires(share) is (bad > 0)
    assert not Alert.of("bad>0").fires(figures([answered()]).shares["bad"]), "nobody voted"


@pytest.mark.parametrize("text", ["bad", "bad>", "good>0.5", "bad>2", "bad=0.1", "", "bad>nan"])
def test_what_is_no_alert_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--alert .* is not of the form"):
        Alert.of(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("Sorry, I do not know this.", True),
        ("I cannot provide medical advice. Please see a doctor.", True),
        ("I am unable to answer this question.", True),
        ("As an AI, I have no opinion.", True),
        ("I can help with that: add two.", False),
        ("She said she was sorry, but he left.", False),
        ("I can't wait to see the Aare.", False),
        ("The Aare. " * 60 + "I cannot answer more.", False),
    ],
)
def test_an_answer_that_declines_is_told_by_its_beginning(text: str, expected: bool) -> None:
    assert declines(text) is expected


def test_chances_of_good_votes_are_those_of_a_logistic_regression() -> None:
    draw = random.Random(5)

    def drawn() -> Answered:
        confidence = draw.gauss(-1, 1)
        good = draw.random() < 1 / (1 + math.exp(-(0.5 + 1.5 * (confidence + 1))))
        return answered(mean_logprob=confidence, num_votes=1, votes=1 if good else -1)

    answers = [*(drawn() for _ in range(800)), answered(mean_logprob=-3.0), answered(mean_logprob=None)]
    chances = good_chances(answers)
    assert chances is not None and math.isnan(chances[-1])
    sure = np.array([[each.mean_logprob] for each in answers[:800]])
    known = LogisticRegression(C=1e6).fit(sure, [each.votes > 0 for each in answers[:800]])
    assert chances[:801] == pytest.approx(known.predict_proba([*sure, [-3.0]])[:, 1], abs=0.01)
    found = figures(answers)
    assert found.calibration is not None and found.calibration.ece < 0.06
    assert found.shares["unsure"] is not None and found.shares["unsure"].value == (chances[:801] < 0.5).mean()
    assert good_chances(answers[:12]) is None, "too few votes"
    assert [each.mean_logprob for each in least_sure(answers)] == [-3.0], "the others have votes"


def test_figures_are_by_day_and_for_longer_by_week() -> None:
    times = [f"2026-03-{day:02d}T23:59:59+00:00" for day in (1, 1, 4)]
    days = over_time([answered(time=time) for time in times])
    assert {day: each.answers for day, each in days.items()} == {"2026-03-01": 2, "2026-03-04": 1}
    weeks = over_time([answered(time=time) for time in (*times, "2026-05-20T00:00:00+00:00")])
    # The first of March 2026 is a Sunday.
    assert {day: each.answers for day, each in weeks.items()} == {"2026-02-23": 2, "2026-03-02": 1, "2026-05-18": 1}
