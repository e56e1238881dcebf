"""The figures of a log, by hand and against independent implementations."""

from __future__ import annotations

import random
from typing import Any

import pytest
from scipy.stats import mannwhitneyu

from sheepop.core.errors import UsageError
from sheepop.monitor.answered import Answered
from sheepop.monitor.figures import Alert, figures, is_repetitive

NAMES = ("cut", "left", "failed", "empty", "repetitive", "bad")


def answered(**more: Any) -> Answered:
    common = {
        "place": "log:2", "model": "m", "prompt": "Once", "tools": (), "answer": "upon a time", "reason": "stop",
        "ended": "whole", "prompt_tokens": 3, "tokens": 4, "mean_logprob": -1.0, "first_token_seconds": 0.1,
        "seconds": 0.5,
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
        "bad": (2 / 3, 3),
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
    assert figures(answers).separation == pytest.approx(expected)
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
    assert Alert.of("bad > 0.2", NAMES).fires(figures(answers)) is fires
    assert not Alert.of("bad<0", NAMES).fires(figures(answers))
    assert Alert.of("bad>0", NAMES).fires(figures(answers)) is (bad > 0)
    assert not Alert.of("bad>0", NAMES).fires(figures([answered()])), "nobody voted"


@pytest.mark.parametrize("text", ["bad", "bad>", "good>0.5", "bad>2", "bad=0.1", "", "bad>nan"])
def test_what_is_no_alert_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--alert .* is not of the form"):
        Alert.of(text, NAMES)
