"""The training subtree of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sheepop.core.config import Config, PathText
from sheepop.core.errors import ConfigError
from sheepop.core.keys import MayChange
from sheepop.data.difficulty import DifficultyName
from sheepop.data.mixing import ScheduledSource
from sheepop.data.mixture_schedule import first_empty_step
from sheepop.data.stages import Stages
from sheepop.train.objective_names import ObjectiveName
from sheepop.train.optimizer_settings import OptimizerName, OptimizerSettings, check_optimizer
from sheepop.train.pace import Pace
from sheepop.train.schedule import ScheduleName, check_schedule
from sheepop.train.trouble import TroubleConfig

Count = Annotated[int, Field(ge=1)]
Warmup = tuple[tuple[Count, Count], ...]
Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
ActivationCheckpointing = Literal["none", "selective", "full", "auto"]
Beta = Annotated[float, Field(ge=0, lt=1)]
SchedulePoint = tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0)]]
_LEAST_EPS = 2.0**-126  # the least normal float32, which the optimizers' sums are kept in; less would count as 0
SinkName = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True)
class ResolvedTraining:
    """The settings that may be null in `TrainingConfig`, all known."""

    pace: Pace
    warmup_steps: int
    decay_steps: int
    micro_batch_size: int
    precision: str
    activation_checkpointing: Literal["none", "selective", "full"]
    compile: bool
    eval_interval: int
    sample_interval: int
    checkpoint_interval: int

    @property
    def total_steps(self) -> int:
        """The steps of the run as things stand."""
        return self.pace.total_steps


class LayerConfig(Config):
    """Settings of the parameters whose names match a pattern."""

    pattern: str = Field(min_length=1)
    """Names of parameters, as a shell-style pattern such as `blocks.0.*`; `*` matches any text, including dots."""
    learning_rate: float = Field(1.0, ge=0)
    """A factor of the learning rate; 0 leaves the weights as they are."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """The decay of the matrices among them; `null` is the general one."""


class TrainingConfig(Config):
    """How a model is trained. Steps are optimizer steps; sizes of batches count sequences."""

    max_steps: MayChange[Annotated[int, Field(ge=1, le=10**12)] | None] = None
    """Budget in steps; with several budgets, the one reached first ends the run; with none, the run makes one epoch."""
    max_epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Budget in passes over the training rows, fractions allowed; turned into `max_steps`."""
    max_tokens: Annotated[int, Field(ge=1, le=10**18)] | None = None
    """Budget in tokens, counted as full rows; turned into `max_steps`."""
    max_minutes: Annotated[float, Field(gt=0, le=1e7)] | None = None
    """Budget in minutes: one step is timed, the minutes become `max_steps`, and the schedule fits them; where the clock
    later shows that they were too many or too few, `pace` changes them."""
    pace: tuple[tuple[Annotated[int, Field(ge=0)], Count], ...] = ()
    """How the clock changed the number of steps: pairs `[step, total steps from there on]`, the first being the plan;
    written by a run with `max_minutes`, and read by one that repeats it; when empty, `max_steps` is the plan."""
    global_batch_size: Count = 32
    """Rows in one step."""
    batch_size_warmup: Warmup = ()
    """Smaller steps first: pairs `[until step, rows]`, growing; after the last, `global_batch_size`."""
    micro_batch_size: MayChange[Count | None] = None
    """Rows in one forward pass; must divide `global_batch_size`, and where it does not divide the rows of a warm-up
    the last pass has fewer; `null` is all of them."""
    sequence_length_warmup: Warmup = ()
    """Shorter rows first: pairs `[until step, tokens]`, growing; each must divide the length of a row; rows are cut,
    and a step has as many tokens as without it."""
    curriculum: Literal["none", "easy_to_hard"] = "none"
    """`none` reads rows in random order, `easy_to_hard` by `difficulty`."""
    difficulty: DifficultyName = "rarity"
    """What makes a row hard: `rarity` of its tokens, bad `compression` of its text, or `length` of its documents."""
    curriculum_epochs: Count = 1
    """Epochs from easy to hard; those after them are in random order."""
    curriculum_jitter: float = Field(0.1, ge=0, le=1)
    """How far a row may come before or after its place by difficulty, as a share of an epoch."""
    mixture: tuple[ScheduledSource, ...] = ()
    """Sources whose weights change during training; an empty list reads all rows alike."""
    prefetch: MayChange[int] = Field(2, ge=0, le=1000)
    """Steps whose batches are prepared ahead, in a thread of their own; 0 prepares each when it is needed."""
    optimizer: OptimizerName = "adamw"
    """What turns gradients into steps; `muon` is for the matrices inside the network, with AdamW for the rest."""
    objective: ObjectiveName = "next_token"
    """What is minimised: the cross-entropy of the `next_token`, or what a plugin adds."""
    momentum: Beta | None = None
    """Of `sgd` and `muon`; `null` is 0.9 and 0.95."""
    layers: tuple[LayerConfig, ...] = ()
    """Rates and decays of some parameters; if several entries match a name, the first one counts."""
    initial_embeddings: PathText | None = None
    """A file of word vectors that token embeddings start from (word2vec, GloVe, fastText's `.vec`); `null` is none."""
    learning_rate: float = Field(1e-3, gt=0)
    """The highest rate, reached at the end of the warm-up."""
    min_learning_rate: float = Field(0.0, ge=0)
    """The rate that the decay ends at; at most `learning_rate`; refused where there is no decay."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of linear warm-up; `null` is 5 percent of the steps, and none for `piecewise`; a warm-up longer than the
    run gives a warning."""
    schedule: ScheduleName = "cosine"
    """The course of the rate after the warm-up; `wsd` holds it and then decays it; with `schedule_free_adamw` it must
    be `constant`."""
    decay_steps: Count | None = None
    """Steps of the decay at the end of `wsd`; `null` is 20 percent of the steps."""
    schedule_points: tuple[SchedulePoint, ...] | None = None
    """Of `piecewise`, which needs them: pairs of a step and a factor of `learning_rate`, such as `[[0, 0.1], [100,
    1.0], [1000, 0.0]]`."""
    betas: tuple[Beta, Beta] | None = None
    """The two decay rates of Adam, AdamW (with `muon` too), Lion and schedule-free AdamW; `null` is the usual pair for
    the optimizer, 0.9 and 0.95 for AdamW."""
    eps: Annotated[float, Field(ge=_LEAST_EPS)] | None = None
    """The term that avoids division by zero, for the same optimizers except Lion, and for Adafactor; `null` is the
    usual one for the optimizer, 1e-8 for AdamW."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of matrices, decoupled from the gradient except in `adam` and `sgd`; biases and norms are not decayed."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients with a larger global norm are scaled down to it; `null` does not clip."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Validate, sample from and save an exponential average of the weights with this decay, such as 0.999; `null`
    does not average."""
    precision: Precision = "auto"
    """Arithmetic of the forward pass: `fp32`, `bf16`, `fp16`, `fp8`, or `auto`: `bf16` on a GPU that computes in
    it; on a CPU with fast bf16 products `fp32`, unless a short measurement shows that `bf16` is clearly faster; `fp32`
    elsewhere."""
    activation_checkpointing: MayChange[ActivationCheckpointing] = "none"
    """What the backward pass computes again to save memory: `none`, `selective` (all but matrix products and
    attention), `full`, or `auto`, the cheapest that fits `memory_budget`."""
    checkpointed_blocks: MayChange[Count | None] = None
    """How many blocks that applies to, for `selective` and `full`; `null` is all of them."""
    memory_budget: MayChange[Annotated[float, Field(gt=0)] | None] = None
    """GB (10^9 bytes) that training may use, for `activation_checkpointing: auto`; `null` is 80 percent of what is
    free when the run starts."""
    compile: bool | Literal["auto"] | None = None
    """`torch.compile` of the blocks; `null` is `auto` on a GPU with Triton, else `false`; needs a C++ compiler on a
    CPU, and without one the run says so and continues; `auto` times a step with and without it once, and keeps the
    faster."""
    z_loss: float = Field(0.0, ge=0)
    """Coefficient of the square of every token's log-sum-exp, added to what is minimised."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of every target that is spread evenly over the vocabulary."""
    log_interval: MayChange[Count] = 10
    """Steps between two rows of training metrics."""
    log_batch_hash: MayChange[bool] = False
    """Write the SHA-256 of the global batch into every row of training metrics."""
    sinks: MayChange[tuple[SinkName, ...]] = ("tensorboard",)
    """Where metrics go in addition to `metrics.jsonl`; each at most once."""
    eval_interval: MayChange[Count | None] = None
    """Steps between two validations; `null` is a tenth of the steps, or more in a run of few minutes, where
    validations may take a fifth of them."""
    eval_tokens: MayChange[Count | None] = None
    """Tokens of the held-out text per validation while training; `null` is all; the scoring at the end always takes
    all."""
    eval_stride: MayChange[Count | None] = None
    """Tokens between the beginnings of two held-out rows, at most the length of a row; `null` is that length. With
    fewer, rows overlap: every token is still scored once, and from more of the text before it."""
    early_stopping: MayChange[Count | None] = None
    """Validations in a row without improvement that end the run; `null` never does."""
    early_stopping_delta: MayChange[float] = Field(0.0, ge=0)
    """By how many nats per token a validation loss must be lower to count as an improvement."""
    sample_interval: MayChange[Count | None] = None
    """Steps between two samples; `null` is a fifth of the steps."""
    sample_prompts: MayChange[tuple[str, ...] | None] = None
    """Prompts that the model continues before its first step and during training; `null` is the beginning of a held-out
    text, an empty list none."""
    sample_tokens: MayChange[Count] = 64
    """Tokens of such a sample; its seed follows from the step, the rest from `generation`."""
    checkpoint_interval: MayChange[Count | None] = None
    """Steps between two checkpoints; `null` is a tenth of the steps."""
    keep_checkpoints: MayChange[Count] = 3
    """How many of the newest checkpoints are kept, in addition to the best and those at 10, 25 and 50 percent."""
    trouble: TroubleConfig = Field(default_factory=TroubleConfig)
    """What happens when the loss or the gradient of a step cannot be right."""
    verify_interval: MayChange[Count | None] = None
    """Steps between two checks, in which a step is computed twice and compared bit by bit; `null` never checks."""

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.micro_batch_size is not None and self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size = {self.micro_batch_size} does not divide "
                f"global_batch_size = {self.global_batch_size}"
            )
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"sinks = {list(self.sinks)} names a sink twice")
        if self.early_stopping_delta and self.early_stopping is None:
            raise ValueError("early_stopping_delta has no effect without early_stopping, the validations to wait for")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate = {self.min_learning_rate} is above learning_rate = {self.learning_rate}"
            )
        check_schedule(
            self.schedule,
            min_learning_rate=self.min_learning_rate,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps,
            points=self.schedule_points,
            max_steps=self.pace[0][1] if self.pace else self.max_steps,
        )
        given = OptimizerSettings(self.betas, self.eps, self.momentum)
        check_optimizer(self.optimizer, given, schedule=self.schedule, ema_decay=self.ema_decay)
        if self.memory_budget is not None and self.activation_checkpointing != "auto":
            raise ValueError(
                f"memory_budget = {self.memory_budget} is for activation_checkpointing = auto, "
                f"not {self.activation_checkpointing}"
            )
        if self.checkpointed_blocks is not None and self.activation_checkpointing not in ("selective", "full"):
            raise ValueError(
                f"checkpointed_blocks = {self.checkpointed_blocks} is for activation_checkpointing = selective or "
                f"full, not {self.activation_checkpointing}"
            )
        return self

    @model_validator(mode="after")
    def _check_order(self) -> TrainingConfig:
        for name in ("batch_size_warmup", "sequence_length_warmup"):
            stages = getattr(self, name)
            if any(step <= before or size < smaller for (before, smaller), (step, size) in pairwise(stages)):
                raise ValueError(f"{name} = {[list(stage) for stage in stages]}: steps and sizes must increase")
        if any(size > self.global_batch_size for _, size in self.batch_size_warmup):
            raise ValueError(f"batch_size_warmup exceeds global_batch_size = {self.global_batch_size}")
        if self.curriculum == "none":
            for name in ("difficulty", "curriculum_epochs", "curriculum_jitter"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} has no effect without curriculum = easy_to_hard")
        if self.mixture and (step := first_empty_step([source.weights for source in self.mixture])) is not None:
            raise ValueError(f"mixture: all weights are 0 at step {step}; at least one source must have one there")
        return self

    @model_validator(mode="after")
    def _check_pace(self) -> TrainingConfig:
        if not self.pace:
            return self
        written = [list(entry) for entry in self.pace]
        if self.pace[0][0] != 0 or any(before >= after for (before, _), (after, _) in pairwise(self.pace)):
            raise ValueError(f"pace = {written}: its steps must begin with 0 and increase")
        if any(total <= step for step, total in self.pace):
            raise ValueError(f"pace = {written}: each total must be more than the steps taken by then")
        if self.pace[-1][1] != self.max_steps:
            raise ValueError(
                f"pace = {written} belongs to a run of {self.pace[-1][1]} steps, but max_steps is {self.max_steps}. "
                "For another number of steps, set pace = []"
            )
        return self

    def _pace(self, max_steps: int) -> Pace:
        if not self.pace:
            return Pace(max_steps)
        (_, planned), *revisions = self.pace
        return Pace(planned, tuple(revisions))

    def at_pace(self, pace: Pace) -> TrainingConfig:
        """These settings for a run whose steps the clock has changed to those of `pace`."""
        return self.replace(max_steps=pace.total_steps, pace=((0, pace.planned), *pace.revisions))

    def batch_sizes(self) -> Stages:
        """The sequences of every step."""
        return Stages(self.batch_size_warmup, self.global_batch_size)

    def row_lengths(self, max_length: int) -> Stages:
        """The tokens in a row at every step; raises `ConfigError` for a length that does not divide `max_length`."""
        for _, length in self.sequence_length_warmup:
            if max_length % length:
                raise ConfigError(
                    f"training.sequence_length_warmup has the length {length}, which does not divide the rows of "
                    f"{max_length} tokens (data.max_length, or else model.max_seq_len). Choose a divisor."
                )
        return Stages(self.sequence_length_warmup, max_length)

    def resolved(self) -> ResolvedTraining:
        """The settings a loop needs; raises `ValueError` while one of them is still null or ``auto``."""
        known = {
            "pace": None if self.max_steps is None else self._pace(self.max_steps),
            "warmup_steps": self.warmup_steps,
            "decay_steps": self.decay_steps if self.schedule == "wsd" else 0,
            "micro_batch_size": self.micro_batch_size,
            "precision": None if self.precision == "auto" else self.precision,
            "activation_checkpointing": (
                None if self.activation_checkpointing == "auto" else self.activation_checkpointing
            ),
            "compile": None if self.compile == "auto" else bool(self.compile),
            "eval_interval": self.eval_interval,
            "sample_interval": self.sample_interval,
            "checkpoint_interval": self.checkpoint_interval,
        }
        unknown = [name for name, value in known.items() if value is None]
        if unknown:
            keys = ("max_steps" if name == "pace" else name for name in unknown)
            raise ValueError("not resolved yet: " + ", ".join(f"training.{key}" for key in keys))
        return ResolvedTraining(**known)  # type: ignore[arg-type]
