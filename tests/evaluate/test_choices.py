"""Answers of models to questions with choices, against likelihoods that a plain pass of the network gives."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from sheepop.core.errors import DataError
from sheepop.evaluate.choices import ask, encode_pair, evaluate_choices
from sheepop.evaluate.questions import MADE, Question, made_questions
from sheepop.generate import Generator
from sheepop.model import Transformer
from sheepop.tokenizer import CharTokenizer, TokenizerConfig, train_tokenizer

QUESTIONS = [
    Question("1", "abc ", ("d", "ef", "ghi"), 1),
    Question("2", "abc abd", (" x", " y"), 0),
    Question("3", "z", ("z", "a", "bcd"), 2),
]


def plain(generator: Generator, prompt: str, choice: str) -> float:
    context, found = generator.tokenizer.encode(prompt), generator.tokenizer.encode(choice)
    with torch.no_grad():
        rows = generator.model(torch.tensor([[*context, *found]]))[0].double().log_softmax(-1)
    return sum(float(rows[len(context) - 1 + place, token]) for place, token in enumerate(found))


def test_totals_are_log_probabilities_behind_the_prompt(generator: Generator) -> None:
    for found in ask(generator, QUESTIONS):
        expected = [plain(generator, found.question.prompt, choice) for choice in found.question.choices]
        assert list(found.totals) == pytest.approx(expected, abs=1e-4)
        assert found.chosen == expected.index(max(expected))
        by_byte = [total / len(choice) for total, choice in zip(expected, found.question.choices, strict=True)]
        assert found.chosen_by_byte == by_byte.index(max(by_byte))
        weights = [math.exp(total) for total in expected]
        assert found.probabilities == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-4)


def test_measures_are_counted_by_hand(generator: Generator) -> None:
    answered = ask(generator, QUESTIONS)
    right = [found.chosen == found.question.answer for found in answered]
    found = evaluate_choices(generator, "three", QUESTIONS)
    assert found.measure("accuracy").value == sum(right) / 3
    bits = [-math.log2(each.probabilities[each.question.answer]) for each in answered]
    assert found.measure("bits_of_the_answer").value == pytest.approx(sum(bits) / 3)
    assert "guessing gives 0.389" in found.measure("accuracy").definition  # a third, a half, a third
    assert [item.values["accuracy"] for item in found.items] == [float(each) for each in right]
    assert found.items[0].shown["reference"] == "ef"


def test_a_prompt_ends_where_the_tokens_of_both_part() -> None:
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=268), ["the sheep sleep the sheep sleep " * 20])
    for prompt, choice in (("the ", "sheep"), ("the", " sheep"), ("the she", "ep"), ("", "sheep"), ("th", "e")):
        context, continuation = encode_pair(tokenizer, prompt, choice)
        assert continuation
        kept = context if prompt and context != [tokenizer.eos_id] else []
        assert [*kept, *continuation] == tokenizer.encode(prompt + choice)


@pytest.mark.parametrize("task", MADE)
def test_an_untrained_model_guesses(shaken: Callable[..., Transformer], task: str) -> None:
    # Logits that know nothing of the text: each of four choices is as likely as the others to be the likeliest.
    model = shaken(max_seq_len=256, num_layers=1)
    questions = made_questions(task, 200, seed=5)
    found = evaluate_choices(Generator(model, CharTokenizer()), task, questions)
    low, high = found.measure("accuracy").interval or (1.0, 0.0)
    assert low < 0.25 < high


def test_what_it_is_surest_of_comes_first(generator: Generator) -> None:
    found = evaluate_choices(generator, "copying", made_questions("copying", 50, seed=2))
    table = found.tables[0]
    assert [row[0] for row in table.rows] == ["20%", "40%", "60%", "80%", "100%"]
    confidences = [row[1] for row in table.rows]
    assert confidences == sorted(confidences, reverse=True)
    assert table.rows[-1][2] == found.measure("accuracy").value


def test_steadiness_counts_questions_with_one_answer_in_all_wordings(generator: Generator) -> None:
    questions = [
        Question("same", "abc", ("d", "e"), 0, paraphrases=("abc",)),
        Question("other", "abc", ("d", "e"), 0, paraphrases=("xyz", "q", "m", "ab", "zz", "c", "b")),
    ]
    chosen = {
        prompt: ask(generator, [Question("", prompt, ("d", "e"), 0)])[0].chosen
        for prompt in ("abc", *questions[1].paraphrases)
    }
    assert len(set(chosen.values())) == 2  # else this test says nothing
    found = evaluate_choices(generator, "wordings", questions, robustness=True)
    assert found.measure("steadiness").value == 0.5
    assert found.tables[1].rows[0] == ["as it is", 2, float(chosen["abc"] == 0)]
    assert [row[1] for row in found.tables[1].rows[1:]] == [2, 1, 1, 1, 1, 1, 1]


def test_questions_that_cannot_be_written_are_counted(generator: Generator) -> None:
    foreign = Question("é", "é", ("a", "b"), 0)
    found = evaluate_choices(generator, "q", [*QUESTIONS, foreign])
    assert found.measure("accuracy").count == 3
    assert found.notes == ["1 of 4 questions have characters that the tokenizer cannot encode."]
    with pytest.raises(DataError, match="none of the 1 questions of q"):
        evaluate_choices(generator, "q", [foreign])
