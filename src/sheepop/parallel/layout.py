"""Which part of a run each rank has: of every batch, of its rows, of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sheepop.core.errors import ConfigError
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from sheepop.parallel.context import ContextRanks

REPLICA, PIECE, TENSOR, CONTEXT = "replica", "piece", "tensor", "context"


@dataclass(frozen=True)
class Layout:
    """`ranks` as (data ranks, context ranks, tensor ranks), those that talk most side by side."""

    ranks: Ranks
    config: ParallelConfig

    def __post_init__(self) -> None:
        size, data, shard = self.ranks.size, self.config.data, self.config.shard
        asked = {name: getattr(self.config, name) or 1 for name in ("data", TENSOR, CONTEXT)}
        needed = self.config.tensor * self.config.context * (data or 1)
        if size % needed or (data is not None and size != needed):
            there = "there is one" if size == 1 else f"there are {size}"
            words = " with ".join(f"parallel.{name} = {value}" for name, value in asked.items() if value > 1)
            many = f"{'a multiple of ' if data is None else ''}{needed} processes"
            raise ConfigError(
                f"{words or 'parallel.data = 1'} asks for {many}, and {there}. Start the command with sheepop launch "
                f"--processes {needed}, or lay it out otherwise: parallel.data=null parallel.tensor=1 "
                "parallel.context=1 takes all there are."
            )
        if shard is not None and self.num_copies % shard:
            raise ConfigError(
                f"parallel.shard = {shard} does not divide {self.num_copies}, the ranks that would each have a copy of "
                "all weights. Use a divisor, or parallel.shard=null for one group."
            )

    @property
    def num_copies(self) -> int:
        """How many ranks, or groups of tensor ranks, would have the same weights: data and context ranks."""
        return self.ranks.size // self.config.tensor

    @property
    def num_data(self) -> int:
        """How many ranks, or groups of others, share a batch."""
        return self.num_copies // self.config.context

    @property
    def data_rank(self) -> int:
        """Which of those this one is."""
        return self.ranks.rank // (self.config.tensor * self.config.context)

    @property
    def tensor_rank(self) -> int:
        """Which of those that split tensors this one is."""
        return self.ranks.rank % self.config.tensor

    @property
    def num_pieces(self) -> int:
        """Into how many pieces weights or the state of optimizers are cut over data ranks."""
        return 1 if self.config.zero == 0 else self.config.shard or self.num_copies

    @property
    def is_of_first_replica(self) -> bool:
        """Whether this rank's pieces are those that count, where others have the same."""
        return self.ranks.rank // self.config.tensor < self.num_pieces

    def mesh(self, device: str) -> DeviceMesh:
        """The ranks as (replicas, pieces of one copy), and (..., tensor ranks) where there are several of these."""
        from torch.distributed.device_mesh import init_device_mesh

        shape: tuple[int, ...] = (self.num_copies // self.num_pieces, self.num_pieces)
        names: tuple[str, ...] = (REPLICA, PIECE)
        if self.config.tensor > 1:
            shape, names = (*shape, self.config.tensor), (*names, TENSOR)
        return init_device_mesh(device, shape, mesh_dim_names=names)

    def context_ranks(self, device: str) -> ContextRanks | None:
        """Those that have parts of the same rows as this one, None where rows are whole."""
        if self.config.context == 1:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        from sheepop.parallel.context import ContextRanks

        shape = (self.num_data, self.config.context, self.config.tensor)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("data", CONTEXT, TENSOR))[CONTEXT]
        return ContextRanks(mesh.get_group(), mesh.get_local_rank(), mesh.size())

    def share(self, count: int) -> range:
        """Which of `count` micro-batches of a step are this rank's: as many for all data ranks, side by side.

        Raises `ValueError` where they cannot have as many.
        """
        if count % self.num_data:
            raise ValueError(f"{count} micro-batches cannot be shared evenly by {self.num_data} data ranks")
        each = count // self.num_data
        return range(self.data_rank * each, (self.data_rank + 1) * each)
