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

    from sheepop.parallel.ulysses import ContextRanks

PIPELINE, REPLICA, PIECE, TENSOR, CONTEXT = "pipeline", "replica", "piece", "tensor", "context"
EXPERT_REPLICA, EXPERT_PIECE, EXPERT = "expert_replica", "expert_piece", "expert"


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
                "parallel.context=1 parallel.pipeline=1 parallel.expert=1 takes all there are."
            )
        if shard is not None and self.num_copies % shard:
            raise ConfigError(
                f"parallel.shard = {shard} does not divide {self.num_copies}, the ranks that would each have a copy of "
                "all weights. Use a divisor, or parallel.shard=null for one group."
            )

        expert, sharing = self.config.expert, self.num_pieces * self.config.tensor
        if self.stage_size % expert or (self.num_pieces > 1 and sharing % expert and expert % sharing):
            sizes = f"{self.stage_size}, the ranks of a stage"
            if shard is not None:
                sizes += f", or does not go with {sharing}, those that share a copy of all else (parallel.shard)"
            raise ConfigError(f"parallel.expert = {expert} does not divide {sizes}. Use a divisor, such as 1.")

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
    def pipeline_rank(self) -> int:
        """Which of those that share the layers this one is."""
        return self.ranks.rank // self.stage_size

    @property
    def tensor_rank(self) -> int:
        """Which of those that split tensors this one is."""
        return self.ranks.rank % self.config.tensor

    @property
    def parts_of_rows(self) -> int:
        """Into how many parts the tokens of a row are cut, at most: rows have a multiple of so many."""
        return self.config.tensor * self.config.context

    @property
    def context_rank(self) -> int:
        """Which of those that have parts of the same rows this one is."""
        return self.ranks.rank // self.config.tensor % self.config.context

    @property
    def expert_rank(self) -> int:
        """Which of those that share experts this one is."""
        return self.ranks.rank % self.stage_size % self.config.expert

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

    @property
    def num_expert_pieces(self) -> int:
        """Into how many pieces the weights of an expert or the state of optimizers for them are cut."""
        if self.config.zero == 0:
            return 1
        shared = self.stage_size if self.config.shard is None else self.num_pieces * self.config.tensor
        return max(1, shared // self.config.expert)

    def expert_mesh(self, device: str) -> DeviceMesh | None:
        """The ranks as (stages, replicas of experts, pieces of one, ranks that share experts).

        To experts tensor ranks are as others are, since they have tokens of their own. None where they are laid out as
        all else is.
        """
        config = self.config
        if config.expert == config.tensor == 1:
            return None
        pieces = self.num_expert_pieces
        replicas = self.stage_size // (pieces * config.expert)
        return self._mesh(
            device,
            {PIPELINE: config.pipeline, EXPERT_REPLICA: replicas, EXPERT_PIECE: pieces, EXPERT: config.expert},
        )

    def context_ranks(self, device: str) -> ContextRanks | None:
        """Those that have parts of the same rows as this one, None where rows are whole."""
        if self.config.context == 1:
            return None
        from sheepop.parallel.ulysses import ContextRanks

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

    def micro_batch_rows(self, rows: int) -> int:
        """Rows of a micro-batch where the user leaves them open: a data rank's share of `rows` at once.

        In a pipeline a share is at least four micro-batches for each stage, so that ranks wait for each other less
        than a fifth of the time (Huang et al. 2019, section 2.3). Raises `ConfigError` where rows do not divide.
        """
        if rows % self.num_data:
            raise ConfigError(
                f"The {rows} rows of a step (training.global_batch_size, training.batch_size_warmup) cannot be shared "
                f"evenly by {self.num_data} data ranks. Use a multiple of {self.num_data}."
            )
        share, stages, fewest = rows // self.num_data, self.config.pipeline, self.config.fewest_micro_batches
        if stages == 1:
            return share
        counts = [count for count in range(fewest, share + 1, stages) if share % count == 0]
        if not counts:
            raise ConfigError(
                f"The {share} rows that each data rank has of a step (training.global_batch_size, "
                f"training.batch_size_warmup) cannot be cut into equal micro-batches, {fewest} or more and a multiple "
                f"of parallel.pipeline = {stages}. Use a multiple of {fewest * self.num_data} rows."
            )
        return share // next((count for count in counts if count >= 4 * stages), counts[-1])

    def check_micro_batches(self, rows: int, micro_batch: int) -> None:
        """Raises `ConfigError` where a step of so many rows in micro-batches of so many cannot be shared evenly."""
        count, stages = math.ceil(rows / micro_batch), self.config.pipeline
        step = f"A step of {rows} rows makes {count} micro-batches of training.micro_batch_size = {micro_batch}"
        if count % self.num_data:
            raise ConfigError(
                f"{step}, which {self.num_data} data ranks cannot share evenly. Leave micro_batch_size out, or give "
                f"one that makes a multiple of {self.num_data}."
            )
        share, fewest = count // self.num_data, self.config.fewest_micro_batches
        if stages > 1 and (rows % micro_batch or share % stages or share < fewest):
            least = f", {fewest} at least" if fewest > stages else ""
            raise ConfigError(
                f"{step}. A pipeline needs equal ones, in every data rank a multiple of parallel.pipeline = {stages}"
                f"{least}. Leave micro_batch_size out, or give one that makes a multiple of {fewest * self.num_data}."
            )

    def share(self, count: int) -> range:
        """Which of `count` micro-batches of a step are this rank's: as many for all data ranks, side by side.

        Raises `ValueError` where they cannot have as many.
        """
        if count % self.num_data:
            raise ValueError(f"{count} micro-batches cannot be shared evenly by {self.num_data} data ranks")
        each = count // self.num_data
        return range(self.data_rank * each, (self.data_rank + 1) * each)
