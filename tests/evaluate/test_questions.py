"""Questions that are made say the truth; those in files are read, or refused by line."""

import json
from collections import Counter
from pathlib import Path

import pytest

from sheepop.core.errors import DataError, UsageError
from sheepop.evaluate.questions import MADE, Question, cloze_questions, made_questions, questions_of, read_questions


def answers(questions: list[Question]) -> list[str]:
    return [question.choices[question.answer] for question in questions]


def test_the_right_sum_is_the_sum() -> None:
    for question in made_questions("arithmetic", 200, seed=1):
        *shown, asked = question.prompt.splitlines()
        for line in shown:
            left, right = line.split("=")
            assert sum(int(part) for part in left.split("+")) == int(right)
        total = sum(int(part) for part in asked.removesuffix(" =").split("+"))
        assert int(question.choices[question.answer]) == total
        assert [int(choice) for choice in question.choices].count(total) == 1


def test_the_right_bracket_closes_what_is_open() -> None:
    for question in made_questions("brackets", 200, seed=1):
        for line in [*question.prompt.splitlines()[:-1], question.prompt.splitlines()[-1]]:
            text = line if line != question.prompt.splitlines()[-1] else line + question.choices[question.answer]
            waiting: list[str] = []
            for bracket in text.split():
                if bracket in "([{<":
                    waiting.append({"(": ")", "[": "]", "{": "}", "<": ">"}[bracket])
                else:
                    assert waiting.pop() == bracket
        assert sorted(question.choices) == [" )", " >", " ]", " }"]


def test_the_right_word_followed_before() -> None:
    for question in made_questions("copying", 200, seed=1):
        first, second, begun = question.prompt.split("\n")
        assert first == second
        assert first.startswith(begun + question.choices[question.answer] + " ") or first == (
            begun + question.choices[question.answer]
        )
        assert len(set(question.choices)) == 4


@pytest.mark.parametrize("task", MADE)
def test_questions_depend_on_the_seed_alone_and_their_answers_on_no_place(task: str) -> None:
    questions = made_questions(task, 400, seed=3)
    assert questions == made_questions(task, 400, seed=3)
    assert questions[:50] == made_questions(task, 50, seed=3)
    assert questions != made_questions(task, 400, seed=4)
    places = Counter(question.answer for question in questions)
    assert all(70 <= places[place] <= 130 for place in range(4))  # 100 each, give or take more than 3 deviations


def test_cloze_asks_for_the_word_that_stands_there() -> None:
    words = ["alpha", "bravo", "delta", "gamma", "omega", "sigma", "theta", "kappa"]
    texts = [" ".join(words[(start * place) % 8] for place in range(200)) for start in (3, 5, 7)]
    questions = cloze_questions(texts, 30, seed=0)
    assert len(questions) == 30
    for question in questions:
        number, place = map(int, question.id.split("-")[1:])
        assert texts[number].split()[place] == question.choices[question.answer].strip()
        assert question.prompt.split() == texts[number].split()[max(0, place - 48) : place]
        assert len(set(question.choices)) == 4
    assert cloze_questions(["too short to ask"], 5, seed=0) == []
    with pytest.raises(UsageError, match="held out"):
        questions_of("cloze", 5, 0, None)


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_answers_are_an_index_or_a_text(tmp_path: Path) -> None:
    path = written(
        tmp_path / "q.jsonl",
        {"prompt": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1},
        {
            "id": "sky",
            "prompt": "The sky is",
            "choices": [" blue", " green"],
            "answer": " blue",
            "paraphrases": ["Sky:"],
        },
    )
    found = read_questions(path)
    assert [question.id for question in found] == ["1", "sky"]
    assert answers(found) == [" 4", " blue"]
    assert found[1].paraphrases == ("Sky:",)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ([1], "line 2: not a JSON object"),
        ({"choices": ["a", "b"], "answer": 0}, 'line 2: "prompt" must be a text, not None'),
        ({"prompt": "", "choices": ["a", "b"], "answer": 0}, '"prompt" must be a text'),
        ({"prompt": "p", "choices": ["a"], "answer": 0}, '"choices" must be two different texts or more'),
        ({"prompt": "p", "choices": ["a", "a"], "answer": 0}, '"choices" must be two different texts or more'),
        ({"prompt": "p", "choices": "ab", "answer": 0}, '"choices" must be two different texts or more'),
        ({"prompt": "p", "choices": ["a", "b"], "answer": 2}, "its index from 0 to 1, not 2"),
        ({"prompt": "p", "choices": ["a", "b"], "answer": True}, "its index from 0 to 1, not True"),
        ({"prompt": "p", "choices": ["a", "b"]}, "its index from 0 to 1, not None"),
        ({"prompt": "p", "choices": ["a", "b"], "answer": 0, "paraphrases": "q"}, '"paraphrases" must be a list'),
        ({"id": 1, "prompt": "p", "choices": ["a", "b"], "answer": 0}, "the id '1' is that of an earlier line, too"),
    ],
)
def test_a_line_that_asks_nothing_is_named(tmp_path: Path, row: object, complaint: str) -> None:
    good = {"prompt": "p", "choices": ["a", "b"], "answer": 0}
    with pytest.raises(DataError, match=complaint.replace("(", r"\(").replace("[", r"\[")):
        read_questions(written(tmp_path / "q.jsonl", good, row))


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
    empty.write_text("\n\n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, complaint in (
        (empty, "has no questions"),
        (binary, "line 1: not valid JSON"),
        (tmp_path / "none.jsonl", "cannot be read"),
    ):
        with pytest.raises(DataError, match=complaint):
            read_questions(path)
