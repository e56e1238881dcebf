"""Evaluations during training, which show what a model learns when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sheepop.core.errors import ConfigError, DataError, UsageError
from sheepop.evaluate.choices import evaluate_choices
from sheepop.evaluate.harness import LoadedTask, ask_tasks, load_tasks
from sheepop.evaluate.perplexity import Held, evaluate_perplexity, held_texts
from sheepop.evaluate.questions import Question, is_own, questions_of
from sheepop.evaluate.results import scores_of
from sheepop.generate import Generator
from sheepop.jobs.config import SheepOpConfig
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.tokenizer import Tokenizer

_KEY = "evaluation"


@dataclass(frozen=True)
class EvaluationSet:
    """The evaluations of a run, loaded: questions by task, tasks of lm-eval, and held-out texts by name."""

    questions: Mapping[str, Sequence[Question]]
    tasks: Sequence[LoadedTask]
    texts: Mapping[str, Held]
    limit: int

    @classmethod
    def load(cls, config: SheepOpConfig, held_out: Iterable[str] | None) -> Self:
        """Loads the tasks and texts of `evaluation`; `held_out` are the documents for ``cloze``.

        Raises `ConfigError` for what cannot be read, or evaluated with this kind of model.
        """
        settings = config.evaluation
        if config.model.architecture == "encoder_decoder":
            raise ConfigError(f"{_KEY}: an encoder-decoder writes targets of sources and answers no questions.")
        if config.tuning.method == "reward":
            raise ConfigError(f"{_KEY}: a reward model judges answers and gives none. Leave it out.")
        try:
            questions = {
                name: questions_of(task, settings.questions, config.seed, held_out)
                for name, task in _named([task for task in settings.tasks if is_own(task)], lambda path: path.stem)
            }
            others = [task for task in settings.tasks if not is_own(task)]
            tasks = load_tasks(others, include=[Path(place) for place in settings.include]) if others else []
            texts = {
                name: held_texts([Path(path)]).sample(settings.questions)
                for name, path in _named(settings.texts, lambda path: path.name)
            }
        except (DataError, UsageError) as error:
            raise ConfigError(f"{_KEY}: {error}") from None
        return cls(questions, tasks, texts, settings.questions)


def _named(paths: Sequence[str], short: Callable[[Path], str]) -> list[tuple[str, str]]:
    """Pairs each path with its short name, or with itself if several paths have the same short name."""
    counts = Counter(short(Path(path)) for path in paths)
    return [(short(Path(path)) if counts[short(Path(path))] == 1 else path, path) for path in paths]


class TrainingEvaluations:
    """Runs the same evaluations each time; a callback of the loop. Several `ranks` share the work."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, wanted: EvaluationSet, device: str, ranks: Ranks = ALONE
    ) -> None:
        self._generator, self._wanted = Generator(model, tokenizer, device=device, ranks=ranks), wanted

    def __call__(self) -> Sequence[Mapping[str, Any]]:
        """Returns all scores."""
        wanted, generator = self._wanted, self._generator
        found = [evaluate_choices(generator, task, questions) for task, questions in wanted.questions.items()]
        if wanted.tasks:
            found += ask_tasks(generator, wanted.tasks, limit=wanted.limit)
        found += [evaluate_perplexity(generator, texts.read(), name=name) for name, texts in wanted.texts.items()]
        generator.close()  # training needs the memory
        return [score for evaluation in found for score in scores_of(evaluation)]
