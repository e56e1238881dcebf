"""What one kind of run has of its own. The life of a run, in `train` and `training_run`, is the same for all kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.model_form import ModelForm
from sheepop.core.console import Console
from sheepop.data import Batches, StepPlan
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.fork import Fork
from sheepop.jobs.run_record import StoredRun
from sheepop.jobs.training_evaluations import Asked, TrainingEvaluations
from sheepop.model import Transformer
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.tokenizer import Tokenizer
from sheepop.train import Scores, TrainingConfig, validate
from sheepop.train.objective import Objective
from sheepop.train.placement import Placement
from sheepop.train.source import StepSource

Samples = Callable[[int], list[dict[str, Any]]]
Evaluations = Callable[[], Sequence[Mapping[str, Any]]]


class RunData(Protocol):
    """What a run learns from, opened, and what follows from it: steps, objective, scores, samples.

    `fingerprint` names the data: a run goes on with the same data only. With 0 `held_out_tokens` nothing is scored.
    `begin`, `score`, `evaluations`, `provenance` and `asked` have a body for the usual case; inherit them.
    """

    @property
    def directory(self) -> Path:
        """Where the data lies, tokenised."""

    @property
    def fingerprint(self) -> str:
        """A checksum of what decides the batches."""

    @property
    def held_out_tokens(self) -> int:
        """How many tokens are held out from training."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer whose ids the data consists of."""

    def describe(self) -> str:
        """How much there is, in words."""

    def settle(self, config: SheepOpConfig, console: Console) -> SheepOpConfig:
        """`config` with what the data decides; raises `ConfigError` or `DataError` for what cannot be trained."""

    def check(self, config: SheepOpConfig) -> None:
        """Raises `ConfigError` for what would end a run, new or resumed, in its middle."""

    def batches(self, config: SheepOpConfig) -> Batches:
        """The rows to train on."""

    def plan(self, config: SheepOpConfig, run: RunDirectory, console: Console) -> StepPlan:
        """Which rows every step reads."""

    def objective(self, config: SheepOpConfig) -> Objective:
        """What is minimised."""

    def network(self, config: SheepOpConfig, device: str) -> Transformer:
        """A network with the weights that a run begins with, or a range test, or measuring."""

    def form(self, model: Transformer, config: SheepOpConfig) -> ModelForm:
        """What checkpoints store of it."""

    def begin(self, model: Transformer, config: SheepOpConfig, console: Console) -> bool:
        """Changes the weights of a network that was never trained, where settings say so; whether it did."""
        return False

    def source(self, config: SheepOpConfig, plan: StepPlan, objective: Objective, placement: Placement) -> StepSource:
        """Where every step's data comes from."""

    def held_out(self, config: SheepOpConfig) -> Batches | None:
        """The rows that a model is scored on; None where nothing is held out."""

    def score(
        self,
        model: Transformer,
        held_out: Batches,
        config: SheepOpConfig,
        device: str,
        *,
        max_tokens: int | None = None,
        on_batch: Callable[[int], None] | None = None,
        ranks: Ranks = ALONE,
    ) -> Scores:
        """The scores of a model on those rows, or on about `max_tokens` of them; `on_batch` hears of finished rows.

        They say how well the labels are predicted, unless a kind of run has others. Several `ranks` share the rows.
        """
        return validate(
            model,
            held_out,
            self.tokenizer().byte_lengths(),
            batch_size=evaluation_batch(config),
            precision=config.training.precision,
            device=device,
            max_tokens=max_tokens,
            on_batch=on_batch,
            ranks=ranks,
        )

    def samples(self, model: Transformer, config: SheepOpConfig, device: str) -> Samples | None:
        """Lets a model write while it learns: one row for each text, by the step; None where it is not to."""

    def evaluations(
        self, model: Transformer, config: SheepOpConfig, device: str, ranks: Ranks = ALONE
    ) -> Evaluations | None:
        """Measures a model while it learns, as `evaluation` says; None where nothing is asked for."""
        asked = self.asked(config)
        return None if asked is None else TrainingEvaluations(model, self.tokenizer(), asked, device, ranks)

    def provenance(self) -> dict[str, Any]:
        """What a model says of the data that it was made from, beside the fingerprint."""
        return {}

    def asked(self, config: SheepOpConfig) -> Asked | None:
        """What `evaluation` asks; raises `ConfigError` for what cannot be asked."""
        return Asked.of(config)

    def try_out(self, run: Path, config: SheepOpConfig) -> str:
        """What to type to try the finished model of `run`."""


class RunKind(Protocol):
    """How runs of one kind come to their data. `stage` names that work where times are shown."""

    stage: str

    def inputs(self, config: SheepOpConfig) -> Sequence[str]:
        """Every path that a new run is made from, which it must not replace."""

    def open(
        self, asked: SheepOpConfig, run: RunDirectory, origin: Fork | None, console: Console
    ) -> tuple[SheepOpConfig, RunData]:
        """Data for a new run, made in `run` where it is not finished already, and `asked` with the sizes of `origin`.

        Raises `ConfigError` for settings that do not fit each other, the data or the model to begin with.
        """

    def reopen(self, stored: StoredRun, asked: SheepOpConfig, run: RunDirectory, console: Console) -> RunData:
        """The data of a run that goes on, which may lie in another place by now."""


def evaluation_batch(config: SheepOpConfig) -> int:
    """Rows in a forward pass of validation."""
    return config.training.micro_batch_size or config.training.global_batch_size


def with_training(config: SheepOpConfig, training: TrainingConfig) -> SheepOpConfig:
    """`config` with other settings of its training."""
    return config.replace(training=training.model_dump())
