"""Questions with choices: read from files, or generated for models that are too small for the usual benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, TypeGuard, TypeVar

from sheepop.core.errors import DataError, UsageError
from sheepop.core.json_lines import json_rows
from sheepop.core.random import derive_seed

T = TypeVar("T")
_MADE_QUESTIONS = 500
_CLOZE_TEXTS = 1000
_SHOTS = 4
_CLOZE_WORDS = 48
_SHORTEST_CLOZE = 4
_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou")


@dataclass(frozen=True)
class Question:
    """A prompt, the choices that may follow it, and the index of the right one.

    `paraphrases` are other wordings of the prompt.
    """

    id: str
    prompt: str
    choices: tuple[str, ...]
    answer: int
    paraphrases: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The prompt with the right answer, as a training text may contain it."""
        return self.prompt + self.choices[self.answer]


def made_questions(task: str, count: int, seed: int) -> list[Question]:
    """`count` questions of a task in `MADE`; each is a pure function of task, number and seed."""
    return [MADE[task](Random(derive_seed(seed, task, number)), f"{task}-{number}") for number in range(count)]


def _copying(draw: Random, name: str) -> Question:
    """A list of made-up words twice, then its beginning: the right choice is the list's next word."""
    words = draw.sample([first + last for first in _SYLLABLES for last in _SYLLABLES if first != last], 5)
    line, place = " ".join(words), draw.randrange(2, 4)
    prompt = f"{line}\n{line}\n{' '.join(words[:place])}"
    others = [word for word in words if word not in (words[place], words[place - 1])]
    return _shuffled(draw, name, prompt, f" {words[place]}", [f" {word}" for word in others[:3]])


def _brackets(draw: Random, name: str) -> Question:
    """Open brackets, some of them closed: the right choice is the bracket that closes next."""
    pairs = {"(": ")", "[": "]", "{": "}", "<": ">"}
    lines = [draw.choices(list(pairs), k=draw.randrange(2, 5)) for _ in range(_SHOTS + 1)]
    shown = [" ".join([*opened, *map(pairs.__getitem__, reversed(opened))]) for opened in lines[:-1]]
    closing = [pairs[bracket] for bracket in reversed(lines[-1])]
    known = draw.randrange(len(closing))
    prompt = "\n".join([*shown, " ".join([*lines[-1], *closing[:known]])])
    return _shuffled(draw, name, prompt, f" {closing[known]}", [f" {b}" for b in pairs.values() if b != closing[known]])


def _arithmetic(draw: Random, name: str) -> Question:
    """A sum of two numbers below 20, after some examples with results."""

    def drawn() -> tuple[int, int]:
        return draw.randrange(1, 20), draw.randrange(1, 20)

    shown = [f"{a} + {b} = {a + b}" for a, b in (drawn() for _ in range(_SHOTS))]
    a, b = drawn()
    # Wrong choices have as many digits as the sum, so that a model which prefers short texts gains and loses nothing.
    near = [n for n in range(a + b - 6, a + b + 7) if n > 0 and n != a + b and len(str(n)) == len(str(a + b))]
    others = [f" {other}" for other in draw.sample(near, 3)]
    return _shuffled(draw, name, "\n".join([*shown, f"{a} + {b} ="]), f" {a + b}", others)


MADE: dict[str, Callable[[Random, str], Question]] = {
    "copying": _copying,
    "brackets": _brackets,
    "arithmetic": _arithmetic,
}
"""Generated tasks for small models, by name: skills that appear early in training."""
CLOZE = "cloze"
"""The task that asks for words of held-out text."""


def cloze_questions(texts: Iterable[str], count: int, seed: int) -> list[Question]:
    """Questions for the next word of a text; the wrong choices have about the same length and frequency in the texts.

    Returns fewer than `count` if the texts are short.
    """
    passages = [text.split() for text in texts]
    uses: dict[str, int] = {}
    for word in (word for words in passages for word in words if word.isalpha() and len(word) >= _SHORTEST_CLOZE):
        uses[word] = uses.get(word, 0) + 1
    ranked = sorted(uses, key=lambda word: (len(word), uses[word], word))
    rank = {word: number for number, word in enumerate(ranked)}
    places = [
        (number, place)
        for number, words in enumerate(passages)
        for place in range(_CLOZE_WORDS // 2, len(words))
        if words[place] in rank
    ]
    draw = Random(derive_seed(seed, CLOZE))
    questions = []
    for number, place in sorted(draw.sample(places, min(count, len(places)))):
        words = passages[number]
        right = words[place]
        near = [word for word in ranked[max(0, rank[right] - 6) : rank[right] + 7] if word != right]
        if len(near) < 3:
            continue
        prompt = " ".join(words[max(0, place - _CLOZE_WORDS) : place])
        others = [f" {word}" for word in draw.sample(near, 3)]
        questions.append(_shuffled(draw, f"{CLOZE}-{number}-{place}", prompt, f" {right}", others))
    return questions


def is_own(task: str) -> bool:
    """Whether a task needs no lm-eval: one of `MADE`, ``cloze``, or a file of questions."""
    return task in MADE or task == CLOZE or task.endswith(".jsonl")


def questions_of(task: str, limit: int | None, seed: int, held_out: Iterable[str] | None) -> list[Question]:
    """The questions of a task: one of `MADE`, ``cloze`` with words of the texts in `held_out`, or a file of questions.

    Raises `UsageError` for ``cloze`` without texts and `DataError` for a file that cannot be read.
    """
    if task in MADE:
        return made_questions(task, limit or _MADE_QUESTIONS, seed)
    if task != CLOZE:
        if not Path(task).exists():
            raise UsageError(f"{task} is neither a file of questions nor one of the tasks {', '.join([*MADE, CLOZE])}.")
        return read_questions(task)[:limit]
    questions = cloze_questions(islice(held_out or (), _CLOZE_TEXTS), limit or _MADE_QUESTIONS, seed)
    if not questions:
        raise UsageError(
            "The task cloze asks for words of the text that the model's run held out, and there is none, or too "
            "little. Leave the task out."
        )
    return questions


def _shuffled(draw: Random, name: str, prompt: str, right: str, others: Sequence[str]) -> Question:
    choices = [right, *others]
    draw.shuffle(choices)
    return Question(name, prompt, tuple(choices), choices.index(right))


def read_questions(path: str | Path) -> list[Question]:
    """The questions of a JSONL file: ``{"prompt": ..., "choices": [...], "answer": 2}`` on each line.

    `answer` is the index of the right choice or its text; ``id`` and ``paraphrases`` are optional. Raises `DataError`
    with file and line for an invalid row, and for two questions with one id.
    """
    return read_items(path, _question, "questions. Write one JSON object a line, with prompt, choices and answer")


def read_items(path: str | Path, parse: Callable[[dict[str, Any], str, str], T], what: str, key: str = "id") -> list[T]:
    """The items of a JSONL file, each made by `parse` from its row, its id and its place for error messages.

    The id is the row's value of `key`, or the line number. Raises `DataError` for an id that two rows have, for a file
    without rows (which has no `what`), and as `json_rows` and `parse` do.
    """
    found: dict[str, T] = {}
    for number, row in json_rows(path):
        name, place = str(row.get(key, number)), f"{path}, line {number}"
        if name in found:
            raise DataError(f"{place}: the id {name!r} is that of an earlier line, too.")
        found[name] = parse(row, name, place)
    if not found:
        raise DataError(f"{path} has no {what}.")
    return list(found.values())


def _question(row: dict[str, Any], name: str, place: str) -> Question:
    prompt, choices, answer = row.get("prompt"), row.get("choices"), row.get("answer")
    paraphrases = row.get("paraphrases", [])
    if not isinstance(prompt, str) or not prompt:
        raise DataError(f'{place}: "prompt" must be a text, not {prompt!r}.')
    if not are_texts(choices) or len(set(choices)) < max(2, len(choices)):
        raise DataError(f'{place}: "choices" must be two different texts or more, not {choices!r}.')
    if not are_texts(paraphrases):
        raise DataError(f'{place}: "paraphrases" must be a list of texts, not {paraphrases!r}.')
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise DataError(
            f'{place}: "answer" must be one of the choices, or its index from 0 to {len(choices) - 1}, not {answer!r}.'
        )
    return Question(name, prompt, tuple(choices), answer, tuple(paraphrases))


def are_texts(values: Any) -> TypeGuard[list[str]]:
    """Whether a JSON value is a list of texts, none of them empty."""
    return isinstance(values, list) and all(isinstance(value, str) and value for value in values)
