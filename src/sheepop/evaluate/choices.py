"""Evaluation by questions with choices: accuracy, calibration, abstention, and robustness to other wordings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sheepop.core.errors import DataError
from sheepop.evaluate.likelihood import LikelihoodScorer
from sheepop.evaluate.questions import Question
from sheepop.evaluate.results import Evaluation, Item, Measure, Table
from sheepop.evaluate.statistics import Reliability, mean_interval, reliability
from sheepop.generate import Generator
from sheepop.tokenizer import Tokenizer

VARIANTS: dict[str, Callable[[str], str]] = {
    "asked as a question": lambda prompt: f"Question: {prompt}\nAnswer:",
    "asked politely": lambda prompt: f"Please complete what follows.\n\n{prompt}",
    "in a line of its own": lambda prompt: f"\n{prompt}",
}
"""Other wordings for questions without paraphrases of their own."""


@dataclass(frozen=True)
class Answered:
    """A question with the model's natural log-probability of each choice."""

    question: Question
    totals: tuple[float, ...]

    @property
    def chosen(self) -> int:
        """The index of the likeliest choice, the first of equal ones."""
        return self.totals.index(max(self.totals))

    @property
    def chosen_by_byte(self) -> int:
        """The index of the choice with the highest log-probability per byte of its text."""
        pairs = zip(self.totals, self.question.choices, strict=True)
        scores = [total / len(choice.encode("utf-8")) for total, choice in pairs]
        return scores.index(max(scores))

    @property
    def probabilities(self) -> list[float]:
        """The probabilities of the choices, given that one of them comes next."""
        most = max(self.totals)
        weights = [math.exp(total - most) for total in self.totals]
        return [weight / sum(weights) for weight in weights]


def encode_pair(tokenizer: Tokenizer, prompt: str, choice: str) -> tuple[list[int], list[int]]:
    """The token ids of a prompt and of the choice after it.

    Both are encoded as one text, so that the tokens are those that the model saw in training: a space may belong to the
    word after it. The prompt ends at the first token in which it differs from its own encoding. If no token of the
    prompt is left, the end-of-text token replaces it.
    """
    before = [*tokenizer.prefix_ids, *tokenizer.encode(prompt)]
    whole = [*tokenizer.prefix_ids, *tokenizer.encode(prompt + choice)]
    differing = (place for place, (one, other) in enumerate(zip(before, whole, strict=False)) if one != other)
    common = next(differing, len(before))
    return whole[:common] or [tokenizer.eos_id], whole[common:]


def ask(
    generator: Generator, questions: Sequence[Question], *, on_done: Callable[[int], None] | None = None
) -> list[Answered]:
    """Scores every choice of every question; `on_done` gets the number of further choices that are finished."""
    pairs = [
        encode_pair(generator.tokenizer, question.prompt, choice)
        for question in questions
        for choice in question.choices
    ]
    scored = iter(LikelihoodScorer(generator).score(pairs, on_done=on_done))
    return [Answered(question, tuple(next(scored).total for _ in question.choices)) for question in questions]


def evaluate_choices(
    generator: Generator,
    name: str,
    questions: Sequence[Question],
    *,
    robustness: bool = False,
    on_done: Callable[[int], None] | None = None,
) -> Evaluation:
    """Accuracy, calibration and abstention over the questions that the tokenizer can encode.

    With `robustness` each question is asked in other words too. Raises `DataError` if no question can be encoded.
    """
    written = [question for question in questions if _can_encode(generator.tokenizer, question)]
    notes = []
    if len(written) < len(questions):
        missing = len(questions) - len(written)
        notes.append(f"{missing} of {len(questions)} questions have characters that the tokenizer cannot encode.")
    if not written:
        raise DataError(f"The tokenizer can encode none of the {len(questions)} questions of {name}.")
    answered = ask(generator, written, on_done=on_done)
    right = [found.chosen == found.question.answer for found in answered]
    calibration = reliability([max(found.probabilities) for found in answered], right)
    items = [_item(found) for found in answered]
    measures, tables = _measures(answered, items, calibration), [_abstention(answered)]
    if robustness:
        steadiness, by_wording = _robustness(generator, written, answered, on_done)
        measures.append(steadiness)
        tables.append(by_wording)
    return Evaluation("tasks", name, measures, items, tables, notes, {"questions": len(written)}, calibration)


def _item(found: Answered) -> Item:
    question = found.question
    values = {
        "accuracy": float(found.chosen == question.answer),
        "accuracy_by_byte": float(found.chosen_by_byte == question.answer),
        "bits_of_the_answer": -math.log2(max(found.probabilities[question.answer], 2.0**-1000)),
    }
    shown = {
        "prompt": question.prompt,
        "choices": list(question.choices),
        "answer": question.answer,
        "reference": question.choices[question.answer],
        "chosen": found.chosen,
        "logprobs": list(found.totals),
    }
    return Item(question.id, values, shown=shown)


def _measures(answered: Sequence[Answered], items: Sequence[Item], calibration: Reliability) -> list[Measure]:
    count, names = len(items), ("accuracy", "accuracy_by_byte", "bits_of_the_answer")
    right, by_byte, bits = ([item.values[name] for item in items] for name in names)
    chance = sum(1 / len(found.question.choices) for found in answered) / count
    guessing = sum(math.log2(len(found.question.choices)) for found in answered) / count
    return [
        Measure.share(
            "accuracy", right, f"How often the right choice is the likeliest of all; guessing gives {chance:.3f}."
        ),
        Measure.share(
            "accuracy_by_byte",
            by_byte,
            "How often the right choice has the highest log-probability per byte of its text, so that long ones are at "
            f"no disadvantage; guessing gives {chance:.3f}.",
        ),
        Measure(
            "bits_of_the_answer",
            sum(bits) / count,
            "Minus the binary logarithm of the right choice's probability among the choices, on average. It changes "
            f"before accuracy does; guessing gives {guessing:.2f}.",
            count,
            mean_interval(bits),
            higher_is_better=False,
        ),
        Measure.calibration_error(calibration, "the chosen answer among the choices"),
    ]


def _abstention(answered: Sequence[Answered]) -> Table:
    """The accuracy on the questions that the model is surest of, if it left the others unanswered."""
    surest = sorted(answered, key=lambda found: -max(found.probabilities))
    rows = []
    for share in (0.2, 0.4, 0.6, 0.8, 1.0):
        kept = surest[: max(1, round(share * len(surest)))]
        right = sum(found.chosen == found.question.answer for found in kept)
        rows.append([f"{share:.0%}", max(kept[-1].probabilities), right / len(kept)])
    header = ("Questions answered", "Least probability", "Accuracy")
    return Table("If it answered only what it is surest of", header, rows)


def _robustness(
    generator: Generator,
    questions: Sequence[Question],
    answered: Sequence[Answered],
    on_done: Callable[[int], None] | None,
) -> tuple[Measure, Table]:
    """How often all wordings of a question get the same answer, and the accuracy with each wording."""
    wordings: dict[str, list[Question]] = {}
    for question in questions:
        prompts = {f"paraphrase {number}": text for number, text in enumerate(question.paraphrases, start=1)}
        if not prompts:
            prompts = {name: vary(question.prompt) for name, vary in VARIANTS.items()}
        for name, prompt in prompts.items():
            wordings.setdefault(name, []).append(replace(question, prompt=prompt))
    chosen = {found.question.id: {found.chosen} for found in answered}
    rows = [["as it is", len(answered), sum(f.chosen == f.question.answer for f in answered) / len(answered)]]
    for name, worded in wordings.items():
        found = ask(generator, worded, on_done=on_done)
        rows.append([name, len(found), sum(f.chosen == f.question.answer for f in found) / len(found)])
        for each in found:
            chosen[each.question.id].add(each.chosen)
    measure = Measure.share(
        "steadiness",
        [len(choices) == 1 for choices in chosen.values()],
        f"How often a question gets the same answer in all of its wordings, of which there are up to {len(rows)}.",
    )
    return measure, Table("By wording", ("Wording", "Questions", "Accuracy"), rows)


def _can_encode(tokenizer: Tokenizer, question: Question) -> bool:
    """Whether no token of a question is unknown."""
    unknown = tokenizer.special_id("unk")
    ids = [i for choice in question.choices for i in tokenizer.encode(question.prompt + choice)]
    return unknown is None or unknown not in ids
