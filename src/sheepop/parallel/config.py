"""How a model and its batches are laid out over ranks; the ranks themselves are started by torchrun."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sheepop.core.config import Config


class ParallelConfig(Config):
    """How many ranks share a step, and which parts of the training state each of them keeps."""

    data: int | None = Field(None, ge=1, strict=True)
    """Ranks, or groups of tensor ranks, that each compute their share of every batch; `null` is all there are."""
    tensor: int = Field(1, ge=1, strict=True)
    """Ranks that split the matrices of every block among them, and compute a forward pass together."""
    context: int = Field(1, ge=1, strict=True)
    """Ranks that have parts of the tokens of every row, which attention brings together."""
    context_method: Literal["ulysses", "ring"] = "ulysses"
    """How: `ulysses` exchanges tokens for heads, of which ranks then have some each; `ring` hands keys and values on
    from rank to rank, for any number of heads, and rows of one document with plain causal attention."""
    expert: int = Field(1, ge=1, strict=True)
    """Neighbouring ranks, whatever else they share, that have some of the experts each and send tokens to them."""
    pipeline: int = Field(1, ge=1, strict=True)
    """Ranks, or groups of others, that have some of the layers each, and hand micro-batches on to the next."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """In which order the ranks of a pipeline compute: `gpipe` all forward passes first, `1f1b` forward and backward
    passes in turn, `interleaved` the same with two stages a rank, `zero_bubble` with gradients of weights put off to
    where a rank would wait (ZB-V)."""
    zero: Literal[0, 1, 2, 3] = 0
    """What ranks share instead of each keeping all of it (ZeRO): `0` nothing (DDP), `1` the optimizer's state, `2` also
    gradients, `3` also weights (FSDP)."""
    shard: int | None = Field(None, ge=2, strict=True)
    """Data ranks that share one copy of that state; groups of them are replicas (HSDP). `null` is all of them."""

    patience: float = Field(1800.0, gt=0)
    """Seconds that a step may take before every rank writes down where it stands, and all of them end."""

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
        """How many a step needs for every rank of a pipeline to have one; of fewer ZB-V leaves gradients out."""
        return self.pipeline * (2 if self.puts_off_weights else 1)

    @property
    def num_stages(self) -> int:
        """Into how many parts a pipeline cuts the layers."""
        return self.pipeline * (2 if self.schedule in ("interleaved", "zero_bubble") else 1)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank of a pipeline has, by number: of two, the second lies behind all first ones."""
        behind = 2 * self.pipeline - 1 - rank if self.schedule == "zero_bubble" else self.pipeline + rank
        return (rank,) if self.num_stages == self.pipeline else (rank, behind)
