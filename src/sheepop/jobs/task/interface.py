"""The interface of a task: what one kind of run has of its own. The life of a run, in `sheepop.jobs.run`, is shared."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.model_form import ModelForm
from sheepop.core.console import Console
from sheepop.data import Batches, BatchSchedule
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.task.fork import Fork
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.tokenizer import Tokenizer
from sheepop.train import Scores, TrainingConfig, validate
from sheepop.train.objective import Objective
from sheepop.train.placement import Placement
from sheepop.train.source import StepSource

if TYPE_CHECKING:
    from sheepop.jobs.task.evaluations import EvaluationSet

Samples = Callable[[int], list[dict[str, Any]]]
Evaluations = Callable[[], Sequence[Mapping[str, Any]]]


class Task(ABC):
    """A kind of run bound to its configuration: data, steps, objective, scores and samples.

    `run` is the directory of the run, and `origin` the model that a new run starts from. A task opens its data when it
    first needs them. The usual case of `begin`, `score`, `evaluations` and `provenance` is implemented here.
    """

    stage: ClassVar[str]
    """The name of the data stage where times are shown."""

    def __init__(self, config: SheepOpConfig, run: RunDirectory, console: Console, origin: Fork | None = None) -> None:
        self.config, self.run, self.console, self.origin = config, run, console, origin

    def with_config(self, config: SheepOpConfig) -> Self:
        """The same task with other settings. It shares all data and models that are loaded already, so the settings
        that decide these must be the same.
        """
        other = copy.copy(self)
        other.config = config
        return other

    @property
    @abstractmethod
    def inputs(self) -> Sequence[str | None]:
        """Every path that a new run reads, and so must not replace."""

    @abstractmethod
    def prepared(self, given: Mapping[str, Any]) -> Self:
        """Makes the data of a new run in its directory; returns the task with the sizes of its model.

        `given` is the tree of settings as the user gave it. Raises `ConfigError` for settings that do not fit each
        other, the data or the model that the run starts from.
        """

    @abstractmethod
    def reopened(self, requested: SheepOpConfig, before: Mapping[str, Any]) -> Self:
        """The task of a resumed run, whose data may have moved.

        `before` is the requested configuration of the last start. Raises `ConfigError` if other data are requested now.
        """

    @property
    @abstractmethod
    def directory(self) -> Path:
        """The directory of the tokenised data."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A checksum of the data. A run resumes with the same data only."""

    @property
    @abstractmethod
    def held_out_tokens(self) -> int:
        """The number of tokens held out from training; with 0 nothing is scored."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data."""

    @abstractmethod
    def describe(self) -> str:
        """The amount of data, in words."""

    def settled(self) -> Self:
        """The task with the settings that its data decide; raises `ConfigError` or `DataError` if it cannot train."""
        self.check()
        return self

    @abstractmethod
    def check(self) -> None:
        """Raises `ConfigError` for settings that would end a new or resumed run halfway."""

    @abstractmethod
    def batches(self) -> Batches:
        """The rows to train on."""

    @cached_property
    def schedule(self) -> BatchSchedule:
        """Which rows each step reads."""
        return self.build_schedule()

    @abstractmethod
    def build_schedule(self) -> BatchSchedule:
        """Builds `schedule`."""

    @abstractmethod
    def objective(self) -> Objective:
        """The objective to minimise."""

    @abstractmethod
    def network(self, device: str) -> Transformer:
        """A network with the initial weights of the run."""

    @abstractmethod
    def form(self, model: Transformer, generation: Mapping[str, Any]) -> ModelForm:
        """How checkpoints store the model, with the generation settings of the model that the run started from."""

    def begin(self, model: Transformer) -> bool:
        """Changes initial weights as the settings say; returns whether it did."""
        return False

    @abstractmethod
    def source(self, objective: Objective, placement: Placement) -> StepSource:
        """The source of each step's data."""

    @abstractmethod
    def held_out(self) -> Batches | None:
        """The rows to score a model on; None if nothing is held out."""

    def score(
        self,
        model: Transformer,
        held_out: Batches,
        device: str,
        *,
        max_tokens: int | None = None,
        on_batch: Callable[[int], None] | None = None,
        ranks: Ranks = ALONE,
    ) -> Scores:
        """Scores a model on these rows, or on about `max_tokens` tokens of them: how well it predicts the labels.

        Several `ranks` share the rows. `on_batch` is called with the number of rows scored since the last call.
        """
        return validate(
            model,
            held_out,
            self.tokenizer().byte_lengths(),
            batch_size=self.evaluation_batch,
            precision=self.config.training.precision,
            device=device,
            max_tokens=max_tokens,
            on_batch=on_batch,
            ranks=ranks,
        )

    @property
    def evaluation_batch(self) -> int:
        """The number of rows in a forward pass of validation."""
        return self.config.training.micro_batch_size or self.config.training.global_batch_size

    def samples(self, model: Transformer, device: str) -> Samples | None:
        """A callback that lets the model write during training: step to one row a text; None if it writes nothing."""
        return None

    @cached_property
    def evaluation_set(self) -> EvaluationSet | None:
        """The questions and texts of the `evaluation` settings, loaded; raises `ConfigError` if they cannot be."""
        return self.load_evaluations()

    def load_evaluations(self) -> EvaluationSet | None:
        """Loads `evaluation_set`; None if no evaluation is requested."""
        evaluation = self.config.evaluation
        if not evaluation.tasks and not evaluation.texts:
            return None
        from sheepop.jobs.task.evaluations import EvaluationSet

        return EvaluationSet.load(self.config, self.held_out_texts())

    def held_out_texts(self) -> Iterable[str] | None:
        """The held-out documents for cloze questions; None if the task has no text."""
        return None

    def evaluations(self, model: Transformer, device: str, ranks: Ranks = ALONE) -> Evaluations | None:
        """A callback that runs the `evaluation` settings during training; None if no evaluation is requested."""
        if self.evaluation_set is None:
            return None
        from sheepop.jobs.task.evaluations import TrainingEvaluations

        return TrainingEvaluations(model, self.tokenizer(), self.evaluation_set, device, ranks)

    def provenance(self) -> dict[str, Any]:
        """What a checkpoint records about its data, besides the fingerprint."""
        return {}

    @abstractmethod
    def try_out(self) -> str:
        """The command that tries the finished model."""


def with_training(config: SheepOpConfig, training: TrainingConfig) -> SheepOpConfig:
    """`config` with these training settings."""
    return config.replace(training=training.model_dump())
