"""Which part of a run each rank has: of every batch, of its rows, of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sheepop.core.errors import ConfigError
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from sheepop.parallel.context import ContextRanks

PIPELINE, REPLICA, PIECE, TENSOR, CONTEXT = "pipeline", "replica", "piece", "tensor", "context"


@dataclass(frozen=True)
class Layout:
    """`ranks` as (stages, data ranks, context ranks, tensor ranks), those that talk most side by side."""

    ranks: Ranks
    config: ParallelConfig

    def __post_init__(self) -> None:
        size, data, shard = self.ranks.size, self.config.data, self.config.shard
        asked = {name: getattr(self.config, name) or 1 for name in ("data", TENSOR, CONTEXT, PIPELINE)}
        needed = math.prod(asked.values())
        if size % needed or (data is not None and size != needed):
            there = "there is one" if size == 1 else f"there are {size}"
            words = " with ".join(f"parallel.{name} = {value}" for name, value in asked.items() if value > 1)
            many = f"{'a multiple of ' if data is None else ''}{needed} processes"
            raise ConfigError(
                f"{words or 'parallel.data = 1'} asks for {many}, and {there}. Start the command with sheepop launch "
                f"--processes {needed}, or lay it out otherwise: parallel.data=null parallel.tensor=1 "
                "parallel.context=1 parallel.pipeline=1 takes all there are."
            )
        if shard is not None and self.num_copies % shard:
            raise ConfigError(
                f"parallel.shard = {shard} does not divide {self.num_copies}, the ranks that would each have a copy of "
                "all weights. Use a divisor, or parallel.shard=null for one group."
            )

    @property
    def stage_size(self) -> int:
        """How many ranks have the same layers."""
        return self.ranks.size // self.config.pipeline

    @property
    def num_copies(self) -> int:
        """How many ranks, or groups of tensor ranks, would have the same weights: data and context ranks."""
        return self.stage_size // self.config.tensor

    @property
    def num_data(self) -> int:
        """How many ranks, or groups of others, share a batch."""
        return self.num_copies // self.config.context

    @property
    def data_rank(self) -> int:
        """Which of those this one is."""
        return self.ranks.rank % self.stage_size // (self.config.tensor * self.config.context)

    @property
    def tensor_rank(self) -> int:
        """Which of those that split tensors this one is."""
        return self.ranks.rank % self.config.tensor

    @property
    def num_pieces(self) -> int:
        """Into how many pieces weights or the state of optimizers are cut over data ranks."""
        return 1 if self.config.zero == 0 else self.config.shard or self.num_copies

    def mesh(self, device: str) -> DeviceMesh:
        """The ranks as (stages, replicas, pieces of one copy, tensor ranks)."""
        return self._mesh(
            device,
            {
                PIPELINE: self.config.pipeline,
                REPLICA: self.num_copies // self.num_pieces,
                PIECE: self.num_pieces,
                TENSOR: self.config.tensor,
            },
        )

    def context_ranks(self, device: str) -> ContextRanks | None:
        """Those that have parts of the same rows as this one, None where rows are whole."""
        if self.config.context == 1:
            return None
        from sheepop.parallel.context import ContextRanks

        sizes = {
            "outer": self.config.pipeline * self.num_data,
            CONTEXT: self.config.context,
            TENSOR: self.config.tensor,
        }
        mesh = self._mesh(device, sizes)[CONTEXT]
        return ContextRanks(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def _mesh(self, device: str, sizes: Mapping[str, int]) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def share(self, count: int) -> range:
        """Which of `count` micro-batches of a step are this rank's: as many for all data ranks, side by side.

        Raises `ValueError` where they cannot have as many.
        """
        if count % self.num_data:
            raise ValueError(f"{count} micro-batches cannot be shared evenly by {self.num_data} data ranks")
        each = count // self.num_data
        return range(self.data_rank * each, (self.data_rank + 1) * each)
