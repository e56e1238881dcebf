"""The settings under ``training``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sheepop.core.config import Config, PathText
from sheepop.core.errors import ConfigError
from sheepop.core.keys import MayChange
from sheepop.core.names import Names
from sheepop.data.batch_schedule import Stages, first_empty_step
from sheepop.data.difficulty import DifficultyName
from sheepop.data.mixing import ScheduledSource
from sheepop.train.schedule import Pace, ScheduleName, check_schedule
from sheepop.train.trouble import TroubleConfig

OPTIMIZER_NAMES = Names("adamw", "adam", "sgd", "muon", "lion", "adafactor", "schedule_free_adamw")
OptimizerName = Annotated[str, OPTIMIZER_NAMES]
OBJECTIVE_NAMES = Names("next_token")
ObjectiveName = Annotated[str, OBJECTIVE_NAMES]
Count = Annotated[int, Field(ge=1)]
Warmup = tuple[tuple[Count, Count], ...]
Precision = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
ActivationCheckpointing = Literal["none", "selective", "full", "auto"]
Beta = Annotated[float, Field(ge=0, lt=1)]
SchedulePoint = tuple[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=0)]]
_LEAST_EPS = 2.0**-126  # the least normal float32: the optimizers' sums are float32, in which less may count as 0
SinkName = Literal["tensorboard", "wandb", "mlflow"]
IntervalName = Literal["eval_interval", "sample_interval", "checkpoint_interval"]


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of an optimizer besides learning rate and weight decay; None if it does not have one."""

    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None


CUSTOMARY: dict[str, OptimizerSettings] = {
    # The second beta of Loshchilov and Hutter is 0.999; language models are trained with 0.95 (Brown et al. 2020).
    "adamw": OptimizerSettings(betas=(0.9, 0.95), eps=1e-8),
    "adam": OptimizerSettings(betas=(0.9, 0.999), eps=1e-8),
    "sgd": OptimizerSettings(momentum=0.9),
    "muon": OptimizerSettings(betas=(0.9, 0.95), eps=1e-8, momentum=0.95),
    "lion": OptimizerSettings(betas=(0.9, 0.99)),
    "adafactor": OptimizerSettings(eps=1e-30),
    "schedule_free_adamw": OptimizerSettings(betas=(0.9, 0.999), eps=1e-8),
}
SETTINGS = ("betas", "eps", "momentum")


def check_optimizer(name: str, given: OptimizerSettings, *, schedule: str, ema_decay: float | None) -> None:
    """Raises `ValueError` for a setting that the optimizer does not read, or for contradictory settings."""
    for key in SETTINGS:
        if getattr(given, key) is not None and getattr(CUSTOMARY[name], key) is None:
            readers = ", ".join(other for other, settings in CUSTOMARY.items() if getattr(settings, key) is not None)
            raise ValueError(
                f"{key} = {getattr(given, key)} is given, but optimizer = {name} does not read it (only {readers}). "
                f"Leave {key} out"
            )
    if name != "schedule_free_adamw":
        return
    if schedule != "constant":
        raise ValueError(
            f"schedule = {schedule}, but schedule_free_adamw averages its weights instead of decaying the rate. Set "
            "schedule = constant"
        )
    if ema_decay is not None:
        raise ValueError(
            f"ema_decay = {ema_decay}, but schedule_free_adamw already averages its weights. Leave ema_decay out"
        )
    if given.betas is not None and given.betas[0] == 0:
        raise ValueError("betas: the first one must be above 0 for schedule_free_adamw, because it weighs the average")


@dataclass(frozen=True)
class ResolvedTraining:
    """Settings that may be null in `TrainingConfig`, with their final values."""

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
        """The steps of the run by its current pace."""
        return self.pace.total_steps


class LayerConfig(Config):
    """Settings for the parameters whose names match a pattern."""

    pattern: str = Field(min_length=1)
    """Names of parameters, as a shell-style pattern such as `blocks.0.*`; `*` matches any text, including dots."""
    learning_rate: float = Field(1.0, ge=0)
    """A factor of the learning rate; 0 leaves the weights unchanged."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """The decay of the matrices among them; `null` means `training.weight_decay`."""


class MemoryConfig(Config):
    """A memory of the training text, which corrects the model's predictions by what followed the same words there.

    It is built after the last step and stored with the best checkpoint.
    """

    max_tokens: Annotated[int, Field(ge=1, le=2**26)] = 2**24
    """Most training tokens that it holds: 2 bytes each on disk for a vocabulary up to 65,536, else 4, and 12 in memory.
    Of a longer text it holds whole documents, drawn at random."""
    longest: Annotated[int, Field(ge=1, le=64)] = 24
    """Most tokens of a context that it looks up."""
    reserved_tokens: Annotated[int, Field(ge=1)] = 2**16
    """About how many tokens of training documents, at most a fiftieth of the text, the network is not trained on, so
    that the memory learns from them how far to trust its finds."""


class TrainingConfig(Config):
    """The settings of training. Steps are optimizer steps; batch sizes count sequences."""

    max_steps: MayChange[Annotated[int, Field(ge=1, le=10**12)] | None] = None
    """Budget in steps; with several budgets, the one reached first ends the run; with none, the run makes one epoch."""
    max_epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Budget in passes over the training rows, fractions allowed; turned into `max_steps`."""
    max_tokens: Annotated[int, Field(ge=1, le=10**18)] | None = None
    """Budget in tokens, counted as full rows; turned into `max_steps`."""
    max_minutes: Annotated[float, Field(gt=0, le=1e7)] | None = None
    """Budget in minutes, from reading the data to the last score: the run times one step and turns the minutes that
    remain, at least half, into `max_steps`, which the schedule follows; if the clock later shows that the steps are too
    many or too few, the run changes them and writes `pace`."""
    pace: tuple[tuple[Annotated[int, Field(ge=0)], Count], ...] = ()
    """How the clock changed the number of steps: pairs `[step, total steps from there on]`, beginning with the plan. A
    run with `max_minutes` writes it, and a run that repeats it reads it; if empty, `max_steps` is the plan."""
    global_batch_size: Count = 32
    """Rows in one step."""
    batch_size_warmup: Warmup = ()
    """Smaller batches first: pairs `[until step, rows]`, growing; after the last, `global_batch_size`."""
    micro_batch_size: MayChange[Count | None] = None
    """Rows in one forward pass; must divide `global_batch_size`. If it does not divide a smaller batch of the warm-up,
    the last pass has fewer rows. `null` means all rows of the step."""
    sequence_length_warmup: Warmup = ()
    """Shorter rows first: pairs `[until step, tokens]`, growing; each must divide the length of a row. Rows are cut
    into more rows, so that a step has equally many tokens."""
    curriculum: Literal["none", "easy_to_hard"] = "none"
    """Order of rows: `none` is random, `easy_to_hard` follows `difficulty`."""
    difficulty: DifficultyName = "rarity"
    """Measure of difficulty: `rarity` of a row's tokens, `compression` (text that compresses badly is hard), or
    `length` of its documents."""
    curriculum_epochs: Count = 1
    """Epochs from easy to hard; later epochs are in random order."""
    curriculum_jitter: float = Field(0.1, ge=0, le=1)
    """How far a row may move from its position by difficulty, as a share of an epoch."""
    mixture: tuple[ScheduledSource, ...] = ()
    """Sources whose weights change during training; with an empty list, all rows have the same weight."""
    prefetch: MayChange[int] = Field(2, ge=0, le=1000)
    """Number of steps whose batches a thread prepares in advance; with 0, the loop prepares each batch itself."""
    optimizer: OptimizerName = "adamw"
    """The optimizer; `muon` updates the matrices inside the network and leaves the rest to AdamW."""
    objective: ObjectiveName = "next_token"
    """The loss to minimise: cross-entropy of the `next_token`, or an objective of a plugin."""
    momentum: Beta | None = None
    """Momentum of `sgd` and `muon`; `null` means 0.9 and 0.95."""
    layers: tuple[LayerConfig, ...] = ()
    """Learning-rate factors and decays for some parameters; if several entries match a name, the first one counts."""
    initial_embeddings: PathText | None = None
    """A file of word vectors to start token embeddings from (word2vec, GloVe, fastText's `.vec`); `null` means none."""
    learning_rate: float = Field(1e-3, gt=0)
    """The highest rate, reached at the end of the warm-up."""
    min_learning_rate: float = Field(0.0, ge=0)
    """The rate at the end of the decay, at most `learning_rate`; refused for a schedule without decay."""
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    """Steps of linear warm-up; `null` means 5 percent of the steps, and none for `piecewise`. A warm-up longer than the
    run gives a warning."""
    schedule: ScheduleName = "cosine"
    """The course of the rate after the warm-up; `wsd` keeps it constant and then decays it; `schedule_free_adamw`
    requires `constant`."""
    decay_steps: Count | None = None
    """Steps of the decay at the end of `wsd`; `null` means 20 percent of the steps."""
    schedule_points: tuple[SchedulePoint, ...] | None = None
    """Points of `piecewise`, which requires them: pairs of a step and a factor of `learning_rate`, such as `[[0, 0.1],
    [100, 1.0], [1000, 0.0]]`."""
    betas: tuple[Beta, Beta] | None = None
    """The two decay rates of Adam, AdamW (also with `muon`), Lion and schedule-free AdamW; `null` means the usual pair
    of the optimizer, 0.9 and 0.95 for AdamW."""
    eps: Annotated[float, Field(ge=_LEAST_EPS)] | None = None
    """The term that avoids division by zero, for the same optimizers except Lion, and for Adafactor; `null` means the
    usual value of the optimizer, 1e-8 for AdamW."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of matrices, decoupled from the gradient except in `adam` and `sgd`; biases and norms do not decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients with a larger global norm are scaled down to this norm; `null` does not clip."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay, such as 0.999, of an exponential moving average of the weights, which is then validated, sampled from and
    saved instead of the trained weights; `null` does not average."""
    precision: Precision = "auto"
    """Arithmetic of the forward pass: `fp32`, `bf16`, `fp16`, `fp8`, or `auto`: `bf16` on a GPU that computes in
    it; on a CPU with fast bf16 products `fp32`, unless a short measurement shows that `bf16` is clearly faster; `fp32`
    elsewhere."""
    activation_checkpointing: MayChange[ActivationCheckpointing] = "none"
    """What the backward pass recomputes to save memory: `none`, `selective` (all but matrix products and attention),
    `full`, or `auto`, the cheapest that fits `memory_budget`."""
    checkpointed_blocks: MayChange[Count | None] = None
    """Number of blocks that recompute, for `selective` and `full`; `null` means all blocks."""
    memory_budget: MayChange[Annotated[float, Field(gt=0)] | None] = None
    """GB (10^9 bytes) that training may use, for `activation_checkpointing: auto`; `null` means 80 percent of the
    memory that is free when the run starts."""
    compile: bool | Literal["auto"] | None = None
    """`torch.compile` of the blocks; `null` means `auto` on a GPU with Triton, else `false`. On a CPU it needs a C++
    compiler, and without one the run gives a warning and continues. `auto` times a step with and without it, and
    compiles if that is clearly faster."""
    z_loss: float = Field(0.0, ge=0)
    """Coefficient of the square of every token's log-sum-exp, which is added to the loss."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Share of every target that is spread evenly over the vocabulary."""
    log_interval: MayChange[Count] = 10
    """Steps between two rows of training metrics."""
    log_batch_hash: MayChange[bool] = False
    """Write the SHA-256 of the global batch into every row of training metrics."""
    sinks: MayChange[tuple[SinkName, ...]] = ("tensorboard",)
    """Services that get the metrics in addition to `metrics.jsonl`; each at most once."""
    eval_interval: MayChange[Count | None] = None
    """Steps between two validations; `null` means a tenth of the steps, or more in a short run with `max_minutes`, in
    which validations may take a fifth of the time."""
    eval_tokens: MayChange[Count | None] = None
    """Tokens of the held-out text per validation during training; `null` means all. The scoring at the end uses all, or
    with `max_minutes` at most what a fifth of the minutes allow."""
    eval_length: MayChange[Count | None] = None
    """Tokens of a row of held-out text, and of the reserved text of `memory`; `null` means rows as in training. A
    network whose attention has a window learns from rows as long as the window, and predicts longer ones."""
    eval_stride: MayChange[Count | None] = None
    """Tokens between the beginnings of two held-out rows, at most the length of a row; `null` means that length. With
    fewer, rows overlap: every token is still scored once, but with more context."""
    early_stopping: MayChange[Count | None] = None
    """The run ends after this many validations in a row without improvement; `null` never ends it early."""
    early_stopping_delta: MayChange[float] = Field(0.0, ge=0)
    """An improvement lowers the validation loss by more than this many nats per token."""
    sample_interval: MayChange[Count | None] = None
    """Steps between two samples; `null` means a fifth of the steps."""
    sample_prompts: MayChange[tuple[str, ...] | None] = None
    """Prompts that the model continues before its first step and during training; `null` means the beginning of a
    held-out text, an empty list none."""
    sample_tokens: MayChange[Count] = 64
    """Tokens of a sample; its seed follows from the step, its other settings from `generation`."""
    checkpoint_interval: MayChange[Count | None] = None
    """Steps between two checkpoints; `null` means a tenth of the steps."""
    paced_intervals: MayChange[tuple[IntervalName, ...]] = ()
    """Intervals in steps of the plan, which follow it when `pace` changes the number of steps. A run with `max_minutes`
    writes those that it derived."""
    keep_checkpoints: MayChange[Count] = 3
    """Number of newest checkpoints to keep, in addition to the best and the milestones."""
    keep_milestones: MayChange[bool] = True
    """Also save and keep checkpoints at the milestones, 10, 25 and 50 percent of the plan."""
    memory: MemoryConfig | None = None
    """A memory of the training text, which the model looks words up in; `null` builds none."""
    trouble: TroubleConfig = Field(default_factory=TroubleConfig)
    """How a run treats a step whose loss or gradient cannot be right."""
    verify_interval: MayChange[Count | None] = None
    """Steps between two checks that compute a step twice and compare the bits; `null` never checks."""

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

    def at_pace(self, pace: Pace) -> TrainingConfig:
        """These settings with `pace`, to which the clock has changed the number of steps."""
        return self.replace(max_steps=pace.total_steps, pace=((0, pace.planned), *pace.revisions))

    def batch_sizes(self) -> Stages:
        """Returns the number of sequences in every step."""
        return Stages(self.batch_size_warmup, self.global_batch_size)

    def row_lengths(self, max_length: int) -> Stages:
        """Returns the row length of every step; raises `ConfigError` for a length that does not divide `max_length`."""
        for _, length in self.sequence_length_warmup:
            if max_length % length:
                raise ConfigError(
                    f"training.sequence_length_warmup has the length {length}, which does not divide the rows of "
                    f"{max_length} tokens (data.max_length, or else model.max_seq_len). Choose a divisor."
                )
        return Stages(self.sequence_length_warmup, max_length)

    def resolved(self) -> ResolvedTraining:
        """Returns the settings of the loop; raises `ValueError` if one of them is still null or ``auto``."""
        known: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(ResolvedTraining)}
        known["pace"] = None
        if self.max_steps is not None:
            known["pace"] = Pace(self.pace[0][1], self.pace[1:]) if self.pace else Pace(self.max_steps)
        known["decay_steps"] = self.decay_steps if self.schedule == "wsd" else 0
        known["compile"] = self.compile or False  # null counts as false
        unknown = [name for name, value in known.items() if value is None or value == "auto"]
        if unknown:
            keys = ("max_steps" if name == "pace" else name for name in unknown)
            raise ValueError("not resolved yet: " + ", ".join(f"training.{key}" for key in keys))
        return ResolvedTraining(**known)
