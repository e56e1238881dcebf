"""What a model is asked while it is trained, so that one sees what it learns when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sheepop.core.errors import ConfigError, DataError, UsageError
from sheepop.data import Corpus
from sheepop.evaluate.choices import evaluate_choices
from sheepop.evaluate.harness import LoadedTask, ask_tasks, load_tasks
from sheepop.evaluate.perplexity import evaluate_perplexity
from sheepop.evaluate.questions import Question, is_own, questions_of
from sheepop.evaluate.results import scores_of
from sheepop.evaluate.texts import Held, held_texts
from sheepop.generate import Generator
from sheepop.jobs.config import SheepOpConfig
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.tokenizer import Tokenizer

_KEY = "evaluation"


@dataclass(frozen=True)
class Asked:
    """What a model is asked: questions by task, tasks of lm-eval, and texts to predict by name."""

    questions: Mapping[str, Sequence[Question]]
    tasks: Sequence[LoadedTask]
    texts: Mapping[str, Held]
    limit: int

    @classmethod
    def of(cls, config: SheepOpConfig, corpus: Corpus | None = None) -> Asked | None:
        """What `evaluation` says, None where it asks for nothing; `corpus` has the text for ``cloze``.

        Raises `ConfigError` for what cannot be read or asked.
        """
        asked = config.evaluation
        if not asked.tasks and not asked.texts:
            return None
        if config.model.architecture == "encoder_decoder":
            raise ConfigError(f"{_KEY}: an encoder-decoder writes targets of sources and answers no questions.")
        if config.tuning.method == "reward":
            raise ConfigError(f"{_KEY}: a reward model judges answers and gives none. Leave it out.")
        held_out = None if corpus is None else (document.text for document in corpus.documents("validation"))
        try:
            questions = {
                Path(task).stem: questions_of(task, asked.questions, config.seed, held_out)
                for task in asked.tasks
                if is_own(task)
            }
            others = [task for task in asked.tasks if not is_own(task)]
            tasks = load_tasks(others, include=[Path(place) for place in asked.include]) if others else []
            texts = {Path(path).name: held_texts([Path(path)]).sample(asked.questions) for path in asked.texts}
        except (DataError, UsageError) as error:
            raise ConfigError(f"{_KEY}: {error}") from None
        return cls(questions, tasks, texts, asked.questions)


class TrainingEvaluations:
    """Asks a model the same every time; the callback of the loop. Several `ranks` share the answering."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, asked: Asked, device: str, ranks: Ranks = ALONE
    ) -> None:
        self._generator, self._asked = Generator(model, tokenizer, device=device, ranks=ranks), asked

    def __call__(self) -> Sequence[Mapping[str, Any]]:
        """The scores of everything that is asked."""
        asked, generator = self._asked, self._generator
        found = [evaluate_choices(generator, task, questions) for task, questions in asked.questions.items()]
        if asked.tasks:
            found += ask_tasks(generator, asked.tasks, limit=asked.limit)
        found += [evaluate_perplexity(generator, texts.read(), name=name) for name, texts in asked.texts.items()]
        return [score for evaluation in found for score in scores_of(evaluation)]


def evaluation_interval(config: SheepOpConfig) -> int | None:
    """Steps between two evaluations of a run: those between validations, or checkpoints where nothing is held out."""
    training = config.training.resolved()
    return config.evaluation.interval or training.eval_interval or training.checkpoint_interval
