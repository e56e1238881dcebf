"""The interface of a task: what one kind of run has of its own. The life of a run, in `sheepop.jobs.run`, is shared."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.model_form import ModelForm, WholeModel
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.data import Batches, BatchSchedule
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.task.fork import Fork
from sheepop.jobs.task.samples import Samples, TrainingSamples, TrainingTraces, check_samples
from sheepop.model import Transformer, build_model
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.tokenizer import Tokenizer
from sheepop.train import Scores, TrainingConfig, validate
from sheepop.train.objective import OBJECTIVES, Objective, with_experts
from sheepop.train.placement import Placement
from sheepop.train.source import ScheduledSource, StepSource

if TYPE_CHECKING:
    from sheepop.jobs.task.evaluations import EvaluationSet

Evaluations = Callable[[], Sequence[Mapping[str, Any]]]


class Task(ABC):
    """A kind of run bound to its configuration: data, steps, objective, scores and samples.

    `run` is the directory of the run, and `origin` the model that a new run starts from. A task opens its data when it
    first needs them. Methods with a body are the usual case.
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

    def local_paths(self) -> Sequence[str]:
        """The paths in `data.paths`; datasets on the hub that a task reads as text are downloaded first."""
        return self.config.data.paths

    @abstractmethod
    def prepared(self, given: Mapping[str, Any], num_ranks: int = 1) -> Self:
        """Makes the data of a new run in its directory; returns the task with the sizes of its model.

        `given` is the tree of settings as the user gave it, and `num_ranks` share each step. Raises `ConfigError` for
        settings that do not fit each other, the data or the model that the run starts from.
        """

    @abstractmethod
    def require_data_of(self, before: Mapping[str, Any]) -> None:
        """Raises `ConfigError` if a resumed run names other data than `before`, the configuration of its last start."""

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
    def manifest(self) -> Mapping[str, Any]:
        """What was read, left out and kept of the data, as the report shows it."""

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

    def check(self) -> None:
        """Raises `ConfigError` for settings that would end a new or resumed run halfway, such as unusable prompts."""
        if self.config.training.memory is not None and self.config.tuning.method is not None:
            raise ConfigError("training.memory is for runs that learn from text, not for post-training. Leave it out.")
        check_samples(self.config, self.tokenizer(), self.sample_prompts())

    @abstractmethod
    def batches(self) -> Batches:
        """The rows to train on."""

    @property
    def texts_of_row(self) -> int:
        """The texts that the network reads for one row of a step: two for a pair of answers."""
        return math.prod(self.batches().batch(np.zeros(1, np.int64)).input_ids.shape[:-1])

    @property
    @abstractmethod
    def schedule(self) -> BatchSchedule:
        """The schedule of the rows that each step reads."""

    def objective(self) -> Objective:
        """The objective to minimise, by default the one that `training.objective` names."""
        training = self.config.training
        return with_experts(OBJECTIVES[training.objective](training), self.config.model)

    def network(self, device: str) -> Transformer:
        """A network with the initial weights of the run: those of the model that it starts from, or from the seed."""
        model = build_model(self.config.model, self.config.seed, device)
        if self.origin is not None:
            model.load_state_dict(self.origin.loaded.model.state_dict())
        return model

    def form(self, model: Transformer, generation: Mapping[str, Any]) -> ModelForm:
        """How checkpoints store the model, with the generation settings of the model that the run started from."""
        return WholeModel(model, generation)

    def begin(self, model: Transformer) -> bool:
        """Changes initial weights as the settings say; returns whether it did."""
        return False

    def source(self, objective: Objective, placement: Placement) -> StepSource:
        """The source of each step's data, by default the batches of the schedule."""
        training = self.config.training
        return ScheduledSource(
            self.schedule,
            objective,
            training.resolved().micro_batch_size,
            placement.device,
            ahead=training.prefetch,
            hashed=training.log_batch_hash,
            documents=self.documents,
        )

    def documents(self, number: int) -> list[str]:
        """The names of the documents in batch `number` of the schedule; empty if there are none."""
        return []

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
        memory: CorpusMemory | None = None,
    ) -> Scores:
        """Scores a model on these rows, or on about `max_tokens` tokens of them: how well it predicts the labels.

        A `memory` corrects its predictions. Several `ranks` share the rows. `on_batch` is called with the number of
        rows scored since the last call.
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
            memory=memory,
        )

    def memory(self, model: Transformer) -> CorpusMemory | None:
        """The memory of the training text for the finished model; None if the settings ask for none."""
        return None

    @property
    def evaluation_batch(self) -> int:
        """The number of rows in a forward pass of validation: about as many tokens as in training."""
        training = self.config.training
        rows = training.micro_batch_size or training.global_batch_size
        if training.eval_length is None:
            return rows
        length = self.config.data.max_length or self.config.model.max_seq_len
        return max(1, rows * length // training.eval_length)

    def sample_prompts(self) -> Sequence[str | Sequence[int]]:
        """The prompts that the model continues during training, as text or tokens."""
        return self.config.training.sample_prompts or ()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end texts of the model, in addition to the tokenizer's own."""
        return ()

    def samples(self, model: Transformer, device: str) -> Samples | None:
        """Lets the model continue `sample_prompts` and traces `trace.prompt` during training; None without either."""
        prompts, trace = self.sample_prompts(), self.config.trace
        given = (model, self.tokenizer(), self.config, device, prompts, self.end_ids)
        samples = TrainingSamples(*given) if prompts else None
        if trace.prompt is None:
            return samples
        return TrainingTraces(model, self.tokenizer(), trace, self.run.traces, samples)

    @cached_property
    def evaluation_set(self) -> EvaluationSet | None:
        """The questions and texts of the `evaluation` settings, loaded; None if none are requested.

        Raises `ConfigError` if they cannot be loaded.
        """
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
        """Returns what a checkpoint records about its data besides the fingerprint."""
        return {}

    @abstractmethod
    def try_out(self) -> str:
        """The command that tries the finished model."""


def with_training(config: SheepOpConfig, training: TrainingConfig) -> SheepOpConfig:
    """`config` with these training settings."""
    return config.replace(training=training.model_dump())
