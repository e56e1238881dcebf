"""What a model is asked while it is trained, so that one sees what it learns when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sheepop.core.errors import ConfigError, DataError, UsageError
from sheepop.data import Corpus
from sheepop.evaluate.choices import evaluate_choices
from sheepop.evaluate.questions import Question, questions_of
from sheepop.evaluate.results import scores_of
from sheepop.generate import Generator
from sheepop.jobs.config import SheepOpConfig
from sheepop.model import Transformer
from sheepop.tokenizer import Tokenizer

_KEY = "evaluation.tasks"


class TrainingEvaluations:
    """Asks the questions of some tasks, the same ones every time; the callback of the loop."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, questions: Mapping[str, Sequence[Question]], device: str
    ) -> None:
        self._generator, self._questions = Generator(model, tokenizer, device=device), questions

    def __call__(self) -> Sequence[Mapping[str, Any]]:
        """The scores of every task."""
        return [
            score
            for task, questions in self._questions.items()
            for score in scores_of(evaluate_choices(self._generator, task, questions))
        ]


def task_questions(config: SheepOpConfig, corpus: Corpus | None = None) -> dict[str, list[Question]]:
    """The questions of `evaluation.tasks` by the names of the tasks; `corpus` has the text for ``cloze``.

    Raises `ConfigError` for questions that cannot be read, and for a model that answers none.
    """
    tasks, found = config.evaluation.tasks, {}
    if tasks and config.model.architecture == "encoder_decoder":
        raise ConfigError(f"{_KEY}: an encoder-decoder writes targets of sources and answers no questions.")
    held_out = None if corpus is None else (document.text for document in corpus.documents("validation"))
    for task in tasks:
        try:
            found[Path(task).stem] = questions_of(task, config.evaluation.questions, config.seed, held_out)
        except (DataError, UsageError) as error:
            raise ConfigError(f"{_KEY}: {error}") from None
    return found


def evaluation_interval(config: SheepOpConfig) -> int | None:
    """Steps between two evaluations of a run: those between validations, or checkpoints where nothing is held out."""
    training = config.training.resolved()
    return config.evaluation.interval or training.eval_interval or training.checkpoint_interval
