"""Which part of a run each rank has: of every batch, of its rows, of the weights; and what networks allow it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sheepop.core.errors import ConfigError
from sheepop.core.facts import counted
from sheepop.model import ModelConfig
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from sheepop.parallel.parts import SharingRanks

PIPELINE, REPLICA, PIECE, TENSOR, CONTEXT = "pipeline", "replica", "piece", "tensor", "context"
EXPERT_REPLICA, EXPERT_PIECE, EXPERT = "expert_replica", "expert_piece", "expert"
_CAPABILITY = (8, 0)  # Ampere, the first GPUs that FlashAttention supports
_MULTIPLE, _WIDEST = 8, 256  # the head dimensions that FlashAttention supports
_WHOLE = ("sliding_head_dim", "sliding_num_kv_heads", "shared_kv_layers", "layer_d_ff", "layer_inputs")


@dataclass(frozen=True)
class Layout:
    """A grid of `ranks`: stages, data ranks, context ranks, tensor ranks. Tensor ranks have consecutive numbers."""

    ranks: Ranks
    config: ParallelConfig

    def __post_init__(self) -> None:
        size, data, shard = self.ranks.size, self.config.data, self.config.shard
        requested = {name: getattr(self.config, name) or 1 for name in ("data", TENSOR, CONTEXT, PIPELINE)}
        needed = math.prod(requested.values())
        if size % needed or (data is not None and size != needed):
            there = "there is one" if size == 1 else f"there are {size}"
            words = " with ".join(f"parallel.{name} = {value}" for name, value in requested.items() if value > 1)
            many = f"{'a multiple of ' if data is None else ''}{needed} processes"
            raise ConfigError(
                f"{words or 'parallel.data = 1'} asks for {many}, and {there}. Start the command with sheepop launch "
                f"--processes {needed}, or change the layout: parallel.data=null parallel.tensor=1 parallel.context=1 "
                "parallel.pipeline=1 parallel.expert=1 uses all processes as data ranks."
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

    def at(self, rank: int) -> Layout:
        """Returns the same layout for another rank."""
        return replace(self, ranks=Ranks(rank, self.ranks.size))

    @property
    def words(self) -> str:
        """The kinds of ranks and their numbers."""
        config = self.config
        sizes = {PIPELINE: config.pipeline, "data": self.num_data, CONTEXT: config.context, TENSOR: config.tensor}
        parts = " times ".join(f"{size:,} {name}" for name, size in sizes.items() if size > 1)
        experts = f", groups of {config.expert:,} share experts" if config.expert > 1 else ""
        return f"{counted(self.ranks.size, 'rank')}: {parts}{experts}"

    @property
    def stage_size(self) -> int:
        """The number of ranks that have the same layers."""
        return self.ranks.size // self.config.pipeline

    @property
    def num_copies(self) -> int:
        """The number of ranks, or groups of tensor ranks, that have the same weights: data times context ranks."""
        return self.stage_size // self.config.tensor

    @property
    def num_data(self) -> int:
        """The number of data ranks, which share the rows of a batch."""
        return self.num_copies // self.config.context

    @property
    def parts_of_rows(self) -> int:
        """The number of parts that a row's tokens are cut into; row lengths are multiples of it."""
        return self.config.tensor * self.config.context

    @property
    def num_pieces(self) -> int:
        """The number of pieces that weights or optimizer state are cut into over data and context ranks."""
        return 1 if self.config.zero == 0 else self.config.shard or self.num_copies

    @property
    def num_expert_pieces(self) -> int:
        """The number of pieces that an expert's weights or their optimizer state are cut into."""
        if self.config.zero == 0:
            return 1
        shared = self.stage_size if self.config.shard is None else self.num_pieces * self.config.tensor
        return max(1, shared // self.config.expert)

    @property
    def pipeline_rank(self) -> int:
        """This rank's number among those that share the layers."""
        return self.ranks.rank // self.stage_size

    @property
    def data_rank(self) -> int:
        """This rank's number among those that share the rows of a batch."""
        return self.ranks.rank % self.stage_size // self.parts_of_rows

    @property
    def context_rank(self) -> int:
        """This rank's number among those that share the tokens of a row."""
        return self.ranks.rank // self.config.tensor % self.config.context

    @property
    def tensor_rank(self) -> int:
        """This rank's number among those that split matrices."""
        return self.ranks.rank % self.config.tensor

    @property
    def expert_rank(self) -> int:
        """This rank's number among those that share experts."""
        return self.ranks.rank % self.stage_size % self.config.expert

    def mesh(self, device: str) -> DeviceMesh:
        """Returns the ranks as (stages, replicas, pieces of one copy, tensor ranks)."""
        replicas = self.num_copies // self.num_pieces
        sizes = {REPLICA: replicas, PIECE: self.num_pieces, TENSOR: self.config.tensor}
        return _mesh(device, {PIPELINE: self.config.pipeline, **sizes})

    def expert_mesh(self, device: str) -> DeviceMesh | None:
        """Returns the ranks as (stages, replicas of experts, pieces of one, expert ranks); None if `mesh` is used.

        Experts treat tensor ranks like all other ranks, because each has tokens of its own.
        """
        config, pieces = self.config, self.num_expert_pieces
        if config.expert == config.tensor == 1:
            return None
        replicas = self.stage_size // (pieces * config.expert)
        sizes = {EXPERT_REPLICA: replicas, EXPERT_PIECE: pieces, EXPERT: config.expert}
        return _mesh(device, {PIPELINE: config.pipeline, **sizes})

    def context_ranks(self, device: str) -> SharingRanks | None:
        """Returns the ranks that share rows with this one, None if rows are whole."""
        if self.config.context == 1:
            return None
        from sheepop.parallel.parts import SharingRanks

        sizes = {CONTEXT: self.config.context, TENSOR: self.config.tensor}
        return SharingRanks.of(_mesh(device, {"outer": self.config.pipeline * self.num_data, **sizes})[CONTEXT])

    def micro_batch_rows(self, rows: int) -> int:
        """Returns the rows of a micro-batch if the user does not set them: a data rank's whole share of `rows`.

        In a pipeline a share makes at least four micro-batches per stage if it can, so that ranks wait less than a
        fifth of the time (Huang et al. 2019, section 2.3). Raises `ConfigError` if the rows do not divide.
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
        """Raises `ConfigError` if ranks cannot evenly share a step of `rows` in micro-batches of `micro_batch` rows."""
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
        """Returns this data rank's micro-batches of the `count` of a step; raises `ValueError` for an uneven share."""
        if count % self.num_data:
            raise ValueError(f"{count} micro-batches cannot be shared evenly by {self.num_data} data ranks")
        each = count // self.num_data
        return range(self.data_rank * each, (self.data_rank + 1) * each)


def _mesh(device: str, sizes: Mapping[str, int]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def check_network(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ConfigError` for a network that ranks cannot share as `parallel` says."""
    check_split(config, parallel.tensor)
    check_context(config, parallel)
    check_experts(config, parallel.expert)
    check_ring(config, parallel)
    check_pipeline(config, parallel)


def check_split(config: ModelConfig, count: int, *, writes: bool = False) -> None:
    """Raises `ConfigError` if `count` ranks cannot split the matrices, for training or with `writes` for generation."""
    if count == 1:
        return
    sizes = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads, "d_ff": config.ffn_size}
    if config.experts is not None and (config.experts.shared or writes):
        sizes["experts.d_ff"] = config.experts.d_ff or config.ffn_size
    for name, size in sizes.items():
        if size % count:
            raise ConfigError(
                f"Matrices cannot be split over {count} ranks, because {count} does not divide model.{name} = {size}. "
                "Use a divisor."
            )
    vocabulary = config.vocab_size  # None before the tokenizer is known
    if vocabulary is not None and vocabulary <= (count - 1) * (each := -(-vocabulary // count)):
        raise ConfigError(
            f"A vocabulary of {vocabulary} tokens cannot be split over {count} ranks: with {each} each the last ones "
            "would have none. Use fewer ranks."
        )
    refused = {
        "model.qk_norm = width, which is over all heads": config.qk_norm == "width",
        "an encoder": config.architecture != "decoder",
        "layers without attention": any(map(config.mixer, range(config.num_layers))),
        "model.experts.shared_gate": getattr(config.experts, "shared_gate", False),
        "model.experts.own_norms": getattr(config.experts, "own_norms", False),
        "model.layer_factor": config.layer_factor,
        **{f"model.{name}": bool(getattr(config, name)) for name in _WHOLE},
    }
    for name in (name for name, is_so in refused.items() if is_so):
        raise ConfigError(f"Matrices are split over ranks for a decoder, and not for one with {name}.")


def check_context(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ConfigError` for a network whose rows cannot be split over `parallel.context` ranks."""
    if parallel.context == 1:
        return
    needed, sizes = parallel.context * parallel.tensor, {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads}
    sizes["sliding_num_kv_heads"] = config.sliding_num_kv_heads or config.kv_heads
    for name, size in sizes.items():
        if size % needed and parallel.context_method == "ulysses":
            with_tensor = f" times parallel.tensor = {parallel.tensor}" if parallel.tensor > 1 else ""
            raise ConfigError(
                f"parallel.context = {parallel.context}{with_tensor} does not divide model.{name} = {size}, of which "
                "every rank has a part in attention. Use a divisor, or parallel.context_method=ring."
            )
    if config.architecture != "decoder":
        raise ConfigError("parallel.context splits the rows of decoders. Use parallel.context=1.")
    if config.gated_delta_net is not None:
        raise ConfigError(
            "parallel.context splits rows, and a Gated DeltaNet (model.gated_delta_net) needs the state of all tokens "
            "before a rank's own. Use parallel.context=1."
        )
    if config.dropout:
        raise ConfigError(
            "parallel.context needs model.dropout = 0: ranks that have parts of a row would drop the same positions of "
            "each part."
        )


def check_experts(config: ModelConfig, count: int) -> None:
    """Raises `ConfigError` for a network whose experts cannot be divided among `count` ranks."""
    if count == 1:
        return
    if config.experts is None:
        raise ConfigError(f"parallel.expert = {count} shares experts, and the network has none (model.experts).")
    if config.experts.count % count:
        raise ConfigError(
            f"parallel.expert = {count} does not divide model.experts.count = {config.experts.count}. Use a divisor."
        )


def check_ring(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ConfigError` for a network whose attention a ring does not compute."""
    if parallel.context_method != "ring":
        return
    refused = {
        "model.position_encoding = alibi": config.position_encoding == "alibi",
        "model.sliding_window": config.sliding_window is not None,
        "model.attention_soft_cap": config.attention_soft_cap is not None,
        "model.attention_sinks": config.attention_sinks,
        "a model.value_head_dim of its own": config.value_size != config.head_size,
        f"model.attention_backend = {config.attention_backend}": config.attention_backend not in ("auto", "sdpa"),
    }
    for name in (name for name, is_so in refused.items() if is_so):
        raise ConfigError(
            f"parallel.context_method = ring is for plain causal attention, and not for {name}. Leave that out, or use "
            "parallel.context_method=ulysses."
        )


def check_ring_here(config: ModelConfig, parallel: ParallelConfig, device: str, precision: str) -> None:
    """Raises `ConfigError` if the flash attention of `device` does not compute this network in `precision`."""
    if parallel.context_method != "ring" or device == "cpu":
        return
    if (refused := _lacking(config, device, precision)) is not None:
        raise ConfigError(
            "parallel.context_method = ring is computed by FlashAttention, which needs an NVIDIA GPU (Ampere or "
            f"newer), 16-bit numbers, and a head dimension that is a multiple of {_MULTIPLE} up to {_WIDEST}. It has "
            f"nothing for {refused}. Use parallel.context_method=ulysses."
        )


def _lacking(config: ModelConfig, device: str, precision: str) -> str | None:
    if device != "cuda":
        return f"device = {device}"
    if precision == "fp32":
        return "training.precision = fp32"
    if config.head_size % _MULTIPLE or config.head_size > _WIDEST:
        return f"model.head_dim = {config.head_size}"
    import torch

    return "this GPU" if torch.cuda.get_device_capability() < _CAPABILITY else None


def check_pipeline(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises `ConfigError` for a network that cannot be cut into the stages of `parallel`."""
    if parallel.pipeline == 1:
        return
    if config.num_layers < parallel.num_stages:
        raise ConfigError(
            f"model.num_layers = {config.num_layers} are too few for {parallel.num_stages} stages: "
            f"parallel.pipeline = {parallel.pipeline} with parallel.schedule = {parallel.schedule}. Use fewer."
        )
    refused = {
        "an encoder": config.architecture != "decoder",
        "model.shared_kv_layers, whose keys and values other stages have": config.shared_kv_layers > 0,
        "model.layer_inputs, of which every stage needs some": config.layer_inputs is not None,
        "model.dropout, which stages would draw otherwise than one device": config.dropout > 0,
    }
    for name in (name for name, is_so in refused.items() if is_so):
        raise ConfigError(f"parallel.pipeline is for a decoder, and not for one with {name}.")
    if parallel.zero >= 2:
        raise ConfigError(
            f"parallel.zero = {parallel.zero} does not go with parallel.pipeline: a stage keeps its weights and "
            "gradients whole during a step, while micro-batches come and go. Use parallel.zero=1."
        )
