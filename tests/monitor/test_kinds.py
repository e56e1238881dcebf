"""Kinds of prompts: groups that were planted are found, with the one that gets bad votes."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.stats import fisher_exact

from sheepop.monitor import kinds as module
from sheepop.monitor.kinds import kinds

from .test_figures import answered

TOPICS = {
    "sums": ["add", "subtract", "multiply", "divide", "number", "total", "equals", "plus", "minus", "sum"],
    "rivers": ["river", "lake", "water", "bridge", "bank", "flood", "valley", "source", "mouth", "stream"],
    "bread": ["flour", "yeast", "oven", "dough", "crust", "bake", "loaf", "salt", "knead", "rise"],
}


def prompts(draw: random.Random, topic: str, count: int) -> list[str]:
    return [f"please tell me {' '.join(draw.choices(TOPICS[topic], k=6))}" for _ in range(count)]


def test_the_kind_that_gets_bad_votes_is_found() -> None:
    draw = random.Random(0)
    answers = []
    for topic, bad in (("sums", 0.8), ("rivers", 0.2), ("bread", 0.2)):
        answers += [
            answered(prompt=prompt, num_votes=1, votes=-1 if draw.random() < bad else 1)
            for prompt in prompts(draw, topic, 60)
        ]
    found = kinds([*answers, answered(prompt="not voted on")])
    assert sum(kind.bad.count for kind in found) == 180
    worse = [kind for kind in found if kind.is_worse]
    assert worse and worse == found[: len(worse)]
    assert {word for kind in worse for word in kind.words} <= set(TOPICS["sums"])
    assert all(set(prompt.split()[3:]) <= set(TOPICS["sums"]) for kind in worse for prompt in kind.examples)
    assert all(kind.bad.low <= kind.bad.value <= kind.bad.high for kind in found)


def test_equal_prompts_are_one_kind() -> None:
    """There are fewer different prompts than clusters are asked for."""
    (found,) = kinds([answered(prompt="the same question", num_votes=1, votes=-1) for _ in range(30)])
    assert (found.bad.count, found.bad.value, found.examples) == (30, 1.0, ["the same question"])
    assert found.p == 1.0 and not found.is_worse


def test_votes_that_do_not_depend_on_the_prompt_accuse_no_kind() -> None:
    accused = 0
    for seed in range(20):
        draw = random.Random(seed)
        answers = [
            answered(prompt=prompt, num_votes=1, votes=draw.choice((-1, 1)))
            for topic in TOPICS
            for prompt in prompts(draw, topic, 20)
        ]
        accused += any(kind.is_worse for kind in kinds(answers, seed))
    assert accused <= 2
    assert kinds(answers[:19]) == []


def test_the_chance_of_more_bad_votes_is_fishers() -> None:
    for bad, count, all_bad, total in ((8, 10, 20, 60), (0, 5, 3, 9), (3, 3, 3, 9), (10, 55, 12, 60)):
        table = [[bad, count - bad], [all_bad - bad, total - count - all_bad + bad]]
        expected = fisher_exact(table, "greater").pvalue
        is_bad = np.repeat([True, False, True, False], [*table[0], *table[1]])
        assert module._chance_of_more(is_bad, np.arange(total) < count) == pytest.approx(expected)
