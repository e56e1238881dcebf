"""What a model was trained on is found in what it is asked, whatever its case, punctuation and line breaks."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheepop.evaluate.contamination import shares_in_training, with_contamination
from sheepop.evaluate.results import Evaluation, Item, Measure

WORDS = [f"w{number}" for number in range(400)]


def naive(text: str, training: list[str], ngram: int) -> float:
    """The definition, in sets of tuples."""
    words = text.split()
    count = min(ngram, len(words))
    known = {
        tuple(other.split()[place : place + count])
        for other in training
        for place in range(len(other.split()) - count + 1)
    }
    grams = [tuple(words[place : place + count]) for place in range(len(words) - count + 1)]
    return sum(gram in known for gram in grams) / len(grams)


@given(st.integers(0, 10**6))
def test_shares_are_those_of_the_definition(seed: int) -> None:
    draw = Random(seed)
    vocabulary = WORDS[: draw.choice([2, 5, 400])]
    training = [" ".join(draw.choices(vocabulary, k=draw.randrange(1, 60))) for _ in range(5)]
    texts = {str(number): " ".join(draw.choices(vocabulary, k=draw.randrange(8, 40))) for number in range(6)}
    texts["taken"] = " ".join(training[0].split()[:30] + WORDS[:10])
    found = shares_in_training(texts, training)
    for name, share in found.items():
        assert share == pytest.approx(naive(texts[name], training, 13))
    assert found.keys() == {name for name, text in texts.items() if len(text.split()) >= 8}


def test_case_punctuation_and_breaks_make_no_difference() -> None:
    text = "The quick brown fox jumps over the lazy dog while thirteen sheep look on quietly"
    training = [
        "Yesterday:\nTHE QUICK, BROWN FOX\njumps -- over the lazy dog; while (thirteen) sheep look on, quietly!"
    ]
    assert shares_in_training({"a": text, "b": text.replace("thirteen", "fourteen")}, training) == {"a": 1.0, "b": 0.0}


def test_words_that_may_stand_anywhere_say_nothing() -> None:
    assert shares_in_training({"short": "to be or not to be that"}, ["to be or not to be that is"]) == {}


def test_scores_on_clean_and_dirty_items_stand_apart() -> None:
    items = [Item(str(number), {"accuracy": float(number < 3)}) for number in range(4)]
    evaluation = Evaluation("tasks", "t", [Measure("accuracy", 0.75, "How often.", 4)], items)
    shares = {"0": 0.0, "1": 0.5, "2": 1.0, "3": 0.0}
    (table,) = with_contamination(evaluation, shares, "corpus").tables
    assert [row[1:] for row in table.rows] == [[2, 0.5, 0.5], [2, 0.5, 1.0]]
