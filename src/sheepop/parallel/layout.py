"""Which part of a run each rank has: ranks side by side split tensors, and groups of those split every batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sheepop.core.errors import ConfigError
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.ranks import Ranks

REPLICA, PIECE, TENSOR = "replica", "piece", "tensor"


@dataclass(frozen=True)
class Layout:
    """`ranks` as (data ranks, tensor ranks), the latter side by side, since they talk most."""

    ranks: Ranks
    config: ParallelConfig

    def __post_init__(self) -> None:
        size, tensor, data, shard = self.ranks.size, self.config.tensor, self.config.data, self.config.shard
        needed = tensor * (data or 1)
        if size % tensor or (data is not None and size != needed):
            there = "there is one" if size == 1 else f"there are {size}"
            asked = f"parallel.tensor = {tensor}" if data is None else f"parallel.data = {data}"
            times = f" with parallel.tensor = {tensor}" if data is not None and tensor > 1 else ""
            raise ConfigError(
                f"{asked}{times} asks for {'a multiple of ' if data is None else ''}{needed} processes, and {there}. "
                f"Start the command with sheepop launch --processes {needed}, or lay it out otherwise: "
                "parallel.data=null parallel.tensor=1 takes all there are."
            )
        if shard is not None and self.num_data % shard:
            raise ConfigError(
                f"parallel.shard = {shard} does not divide the number of data ranks, {self.num_data}, into whole "
                "groups. Use a divisor, or parallel.shard=null for one group."
            )

    @property
    def num_data(self) -> int:
        """How many ranks, or groups of tensor ranks, share a batch."""
        return self.ranks.size // self.config.tensor

    @property
    def data_rank(self) -> int:
        """Which of those this one is."""
        return self.ranks.rank // self.config.tensor

    @property
    def tensor_rank(self) -> int:
        """Which of those that split tensors this one is."""
        return self.ranks.rank % self.config.tensor

    @property
    def num_pieces(self) -> int:
        """Into how many pieces weights or the state of optimizers are cut over data ranks."""
        return 1 if self.config.zero == 0 else self.config.shard or self.num_data

    @property
    def is_of_first_replica(self) -> bool:
        """Whether this rank's pieces are those that count, where others have the same."""
        return self.data_rank < self.num_pieces

    def mesh(self, device: str) -> DeviceMesh:
        """The ranks as (replicas, pieces of one copy), and (..., tensor ranks) where there are several of these."""
        shape: tuple[int, ...] = (self.num_data // self.num_pieces, self.num_pieces)
        names: tuple[str, ...] = (REPLICA, PIECE)
        if self.config.tensor > 1:
            shape, names = (*shape, self.config.tensor), (*names, TENSOR)
        return init_device_mesh(device, shape, mesh_dim_names=names)

    def share(self, count: int) -> range:
        """Which of `count` micro-batches of a step are this rank's: as many for all data ranks, side by side.

        Raises `ValueError` where they cannot have as many.
        """
        if count % self.num_data:
            raise ValueError(f"{count} micro-batches cannot be shared evenly by {self.num_data} data ranks")
        each = count // self.num_data
        return range(self.data_rank * each, (self.data_rank + 1) * each)
