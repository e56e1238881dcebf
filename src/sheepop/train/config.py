"""The training subtree of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sheepop.core.config import Config, PathText
from sheepop.core.errors import ConfigError
from sheepop.data.difficulty import DifficultyName
from sheepop.data.mixing import ScheduledSource
from sheepop.data.mixture_schedule import first_empty_step
from sheepop.data.stages import Stages
from sheepop.train.optimizer_settings import OptimizerName, OptimizerSettings, check_optimizer
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

    total_steps: int
    warmup_steps: int
    decay_steps: int
    micro_batch_size: int
    precision: str
    activation_checkpointing: Literal["none", "selective", "full"]
    compile: bool
    eval_interval: int
    sample_interval: int
    checkpoint_interval: int


class LayerConfig(Config):
    """Settings of the parameters whose names match a shell-style pattern, in which * stands for dots too."""

    pattern: str = Field(min_length=1)
    learning_rate: float = Field(1.0, ge=0, description="a factor; 0 leaves the weights as they are")
    weight_decay: Annotated[float, Field(ge=0)] | None = Field(None, description="of matrices; null is the general one")


class TrainingConfig(Config):
    """How a model is trained. Steps are optimizer steps; sizes of batches count sequences.

    Of the four budgets the one that is reached first ends the run; without any, the run makes one epoch.
    """

    max_steps: Annotated[int, Field(ge=1, le=10**12)] | None = None
    max_epochs: Annotated[float, Field(gt=0, le=1e9)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=10**18)] | None = None
    max_minutes: Annotated[float, Field(gt=0, le=1e7)] | None = Field(
        None, description="measured once, turned into steps, and written back as max_steps"
    )
    global_batch_size: Count = Field(32, description="sequences per optimizer step")
    batch_size_warmup: Warmup = Field((), description="pairs [until step, sequences]; then global_batch_size")
    micro_batch_size: Count | None = Field(None, description="sequences per forward pass; null is all of them")
    sequence_length_warmup: Warmup = Field((), description="pairs [until step, tokens]; then rows are whole")
    curriculum: Literal["none", "easy_to_hard"] = "none"
    difficulty: DifficultyName = Field("rarity", description="what easy_to_hard sorts by")
    curriculum_epochs: Count = Field(1, description="epochs from easy to hard, before those in random order")
    curriculum_jitter: float = Field(0.1, ge=0, le=1, description="how far rows move at random, in shares of an epoch")
    mixture: tuple[ScheduledSource, ...] = ()
    prefetch: int = Field(2, ge=0, le=1000, description="steps whose batches are prepared ahead")
    optimizer: OptimizerName = "adamw"
    momentum: Beta | None = Field(None, description="null is the customary one of the optimizer")
    layers: tuple[LayerConfig, ...] = Field((), description="of several that match a name the first counts")
    initial_embeddings: PathText | None = Field(
        None, description="a file of word vectors that tokens begin with: word2vec, GloVe or fastText's .vec"
    )
    learning_rate: float = Field(1e-3, gt=0)
    min_learning_rate: float = Field(0.0, ge=0)
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(None, description="null is 5 percent of the steps")
    schedule: ScheduleName = "cosine"
    decay_steps: Count | None = Field(None, description="of wsd, at the end; null is 20 percent of the steps")
    schedule_points: tuple[SchedulePoint, ...] | None = Field(None, description="of piecewise: [step, factor] pairs")
    betas: tuple[Beta, Beta] | None = Field(None, description="null is the customary pair of the optimizer")
    eps: Annotated[float, Field(ge=_LEAST_EPS)] | None = Field(
        None, description="null is the customary one of the optimizer"
    )
    weight_decay: float = Field(0.1, ge=0)
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(1.0, description="null does not clip")
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="validate, sample and save an exponential average of the weights; null does not average"
    )
    precision: Precision = Field(
        "auto", description="arithmetic of the forward pass; auto measures fp32 and bf16 once and keeps the faster"
    )
    activation_checkpointing: ActivationCheckpointing = Field(
        "none", description="what the backward pass computes again to save memory; auto fits memory_budget"
    )
    checkpointed_blocks: Count | None = Field(None, description="how many blocks it applies to; null is all of them")
    memory_budget: Annotated[float, Field(gt=0)] | None = Field(
        None, description="GB that training may use, for auto; null is most of what is free"
    )
    compile: bool | Literal["auto"] | None = Field(
        None,
        description="torch.compile; auto measures once and keeps the faster; null is auto on a GPU with Triton, else "
        "false; needs a C++ compiler on a CPU",
    )
    z_loss: float = Field(0.0, ge=0, description="coefficient of the squared log-sum-exp of every token's logits")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread over the vocabulary")
    log_interval: Count = 10
    log_batch_hash: bool = False
    sinks: tuple[SinkName, ...] = Field(("tensorboard",), description="where metrics go beside metrics.jsonl")
    eval_interval: Count | None = Field(None, description="null is a tenth of the steps")
    eval_tokens: Count | None = Field(
        None, description="tokens per validation while training; null is all. The last one always sees all"
    )
    early_stopping: Count | None = Field(
        None, description="validations without improvement that end the run; null never does"
    )
    early_stopping_delta: float = Field(
        0.0, ge=0, description="by how many nats per token a loss must be lower to count as an improvement"
    )
    sample_interval: Count | None = Field(None, description="null is a fifth of the steps")
    sample_prompts: tuple[str, ...] = ()
    sample_tokens: Count = 64
    checkpoint_interval: Count | None = Field(None, description="null is a tenth of the steps")
    keep_checkpoints: Count = Field(3, description="the last K are kept, beside best and the milestones")
    trouble: TroubleConfig = Field(default_factory=TroubleConfig)
    verify_interval: Count | None = Field(
        None, description="steps between two at which a micro-batch is computed twice and compared bit for bit"
    )

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.micro_batch_size is not None and self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size = {self.micro_batch_size} does not divide "
                f"global_batch_size = {self.global_batch_size}"
            )
        if len(set(self.sinks)) < len(self.sinks):
            raise ValueError(f"sinks = {list(self.sinks)} names one twice")
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
            max_steps=self.max_steps,
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
                raise ValueError(f"{name} = {[list(stage) for stage in stages]}: steps and sizes must grow")
        if any(size > self.global_batch_size for _, size in self.batch_size_warmup):
            raise ValueError(f"batch_size_warmup goes above global_batch_size = {self.global_batch_size}")
        if self.curriculum == "none":
            for name in ("difficulty", "curriculum_epochs", "curriculum_jitter"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} has no effect without curriculum = easy_to_hard")
        if self.mixture and (step := first_empty_step([source.weights for source in self.mixture])) is not None:
            raise ValueError(f"mixture: all weights are 0 at step {step}; at least one source must have one there")
        return self

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
            "total_steps": self.max_steps,
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
            keys = ("max_steps" if name == "total_steps" else name for name in unknown)
            raise ValueError("not resolved yet: " + ", ".join(f"training.{key}" for key in keys))
        return ResolvedTraining(**known)  # type: ignore[arg-type]
