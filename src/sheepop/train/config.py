"""The training subtree of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from sheepop.core.config import Config
from sheepop.train.schedule import ScheduleName

Count = Annotated[int, Field(ge=1)]
Precision = Literal["auto", "fp32", "bf16"]
OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True)
class ResolvedTraining:
    """The settings that may be null in `TrainingConfig`, all known."""

    total_steps: int
    warmup_steps: int
    micro_batch_size: int
    precision: str
    compile: bool
    eval_interval: int
    sample_interval: int
    checkpoint_interval: int


class TrainingConfig(Config):
    """How a model is trained. Steps are optimizer steps; sizes of batches count sequences.

    Of the four budgets the one that is reached first ends the run; without any, the run makes one epoch.
    """

    max_steps: Count | None = None
    max_epochs: Annotated[float, Field(gt=0)] | None = None
    max_tokens: Count | None = None
    max_minutes: Annotated[float, Field(gt=0)] | None = Field(
        None, description="measured once, turned into steps, and written back as max_steps"
    )
    global_batch_size: Count = Field(32, description="sequences per optimizer step")
    micro_batch_size: Count | None = Field(None, description="sequences per forward pass; null is all of them")
    optimizer: OptimizerName = "adamw"
    learning_rate: float = Field(1e-3, gt=0)
    min_learning_rate: float = Field(0.0, ge=0)
    warmup_steps: Annotated[int, Field(ge=0)] | None = Field(None, description="null is 5 percent of the steps")
    schedule: ScheduleName = "cosine"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(1.0, description="null does not clip")
    precision: Precision = Field("auto", description="auto measures fp32 and bf16 once and keeps the faster")
    compile: bool | Literal["auto"] = Field(
        False,
        description="torch.compile; auto measures once and keeps the faster; needs a C++ compiler on a CPU",
    )
    z_loss: float = Field(0.0, ge=0, description="coefficient of the squared log-sum-exp of every token's logits")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target spread over the vocabulary")
    log_interval: Count = 10
    eval_interval: Count | None = Field(None, description="null is a tenth of the steps")
    eval_tokens: Count | None = Field(
        None, description="tokens per validation while training; null is all. The last one always sees all"
    )
    sample_interval: Count | None = Field(None, description="null is a fifth of the steps")
    sample_prompts: tuple[str, ...] = ()
    sample_tokens: Count = 64
    checkpoint_interval: Count | None = Field(None, description="null is a tenth of the steps")
    keep_checkpoints: Count = Field(3, description="the last K are kept, beside best and the milestones")

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.micro_batch_size is not None and self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size = {self.micro_batch_size} does not divide "
                f"global_batch_size = {self.global_batch_size}"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate = {self.min_learning_rate} is above learning_rate = {self.learning_rate}"
            )
        return self

    def resolved(self) -> ResolvedTraining:
        """The settings a loop needs; raises `ValueError` while one of them is still null or ``auto``."""
        known = {
            "total_steps": self.max_steps,
            "warmup_steps": self.warmup_steps,
            "micro_batch_size": self.micro_batch_size,
            "precision": None if self.precision == "auto" else self.precision,
            "compile": None if self.compile == "auto" else self.compile,
            "eval_interval": self.eval_interval,
            "sample_interval": self.sample_interval,
            "checkpoint_interval": self.checkpoint_interval,
        }
        unknown = [name for name, value in known.items() if value is None]
        if unknown:
            keys = ("max_steps" if name == "total_steps" else name for name in unknown)
            raise ValueError("not resolved yet: " + ", ".join(f"training.{key}" for key in keys))
        return ResolvedTraining(**known)  # type: ignore[arg-type]
