"""How a model and its batches are laid out over ranks; torchrun or `sheepop launch` starts the ranks."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sheepop.core.config import Config


class ParallelConfig(Config):
    """How many ranks share a step, and which parts of the training state each of them keeps."""

    data: int | None = Field(None, ge=1, strict=True)
    """Data ranks (groups of the ranks below), which each compute some rows of a batch; `null` uses all processes."""
    tensor: int = Field(1, ge=1, strict=True)
    """Ranks that split the matrices of every block and compute each pass together."""
    context: int = Field(1, ge=1, strict=True)
    """Ranks that have parts of the tokens of every row, and exchange them in attention."""
    context_method: Literal["ulysses", "ring"] = "ulysses"
    """How attention exchanges tokens: `ulysses` exchanges tokens for heads, which the ranks must divide; `ring` sends
    keys and values from rank to rank, for any number of heads, one document a row and plain causal attention."""
    expert: int = Field(1, ge=1, strict=True)
    """Neighbouring ranks, also ranks of the other kinds, that have some of the experts each and send tokens to them."""
    pipeline: int = Field(1, ge=1, strict=True)
    """Ranks, or groups of the others, that have some of the layers each, and send micro-batches on to the next."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """The order in which the ranks of a pipeline compute: `gpipe` runs all forward passes first, `1f1b` alternates
    forward and backward passes, `interleaved` does so with two stages a rank, and `zero_bubble` (ZB-V) also postpones
    gradients of weights to when a rank would wait."""
    zero: Literal[0, 1, 2, 3] = 0
    """What data ranks share instead of each keeping a copy (ZeRO): `0` nothing (DDP), `1` the optimizer's state, `2`
    also gradients, `3` also weights (FSDP)."""
    shard: int | None = Field(None, ge=2, strict=True)
    """Data ranks that share one copy of that state; groups of them are replicas (HSDP). `null` is all of them."""

    patience: float = Field(1800.0, gt=0)
    """Seconds that a step may take before every rank writes its stack traces to a file and the run ends."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pipeline == 1 and self.schedule != "1f1b":
            raise ValueError(f"schedule = {self.schedule} is for pipeline of 2 ranks or more; here it is 1")
        if self.context == 1 and self.context_method != "ulysses":
            raise ValueError(f"context_method = {self.context_method} is for context of 2 ranks or more; here it is 1")
        if self.shard is not None and self.zero == 0:
            raise ValueError("shard is for parallel.zero of 1, 2 or 3; at 0 every rank keeps everything")
        if self.shard is not None and self.data is not None and self.data % self.shard:
            raise ValueError(f"data = {self.data} ranks do not make whole groups of shard = {self.shard}")
        return self

    @property
    def puts_off_weights(self) -> bool:
        """Whether gradients of weights are computed apart from those of activations."""
        return self.pipeline > 1 and self.schedule == "zero_bubble"

    @property
    def fewest_micro_batches(self) -> int:
        """The micro-batches that a step needs to occupy every rank of a pipeline; with fewer ZB-V loses gradients."""
        return self.pipeline * (2 if self.puts_off_weights else 1)

    @property
    def num_stages(self) -> int:
        """The number of stages that a pipeline cuts the layers into."""
        return self.pipeline * (2 if self.schedule in ("interleaved", "zero_bubble") else 1)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Returns the numbers of a rank's stages; all second stages follow the first stages of all ranks."""
        behind = 2 * self.pipeline - 1 - rank if self.schedule == "zero_bubble" else self.pipeline + rank
        return (rank,) if self.num_stages == self.pipeline else (rank, behind)
