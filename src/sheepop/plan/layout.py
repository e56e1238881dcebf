"""Layouts over the ranks of a machine, chosen by what each would hold, send and compute."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer, blank_model
from sheepop.model.accounting.saved_activations import Mode
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout, check_network
from sheepop.parallel.plan import Plan
from sheepop.parallel.ranks import Ranks
from sheepop.parallel.stage_memory import StepShape
from sheepop.plan.machine import MachineConfig
from sheepop.plan.timing import Interval

USABLE = 0.9  # of a device's memory; an allocator and a communication library hold the rest
# The shares of the nominal rate that products of a training step reach: 40 percent is what blocks that are not
# compiled reached on an H100 by count, 50 what compiled ones with large chunks of logits may.
EFFICIENCY = Interval(0.3, 0.4, 0.5)
_RECOMPUTED = 4 / 3  # forward, forward again, and backward, which costs two forwards
_ENOUGH_TOKENS = 16_384  # of a micro-batch; more tokens make its products no faster
_BETWEEN_NEIGHBOURS = ("sums of layers", "tokens of embedding and head", "keys and values", "tokens for heads")
_WHILE_IT_COMPUTES = ("weights", "gradients")


@dataclass(frozen=True)
class Laid:
    """A layout with its plan: rows of a micro-batch, what is recomputed, and seconds of a step."""

    plan: Plan
    rows: int
    micro_batches: int
    recomputed: Mode
    seconds: Interval

    @property
    def settings(self) -> dict[str, object]:
        """The keys that ask for the layout."""
        config, found = self.plan.layout.config, dict[str, object]()
        for name in ("tensor", "context", "pipeline"):
            if getattr(config, name) > 1:
                found[f"parallel.{name}"] = getattr(config, name)
        if config.zero:
            found["parallel.zero"] = config.zero
        if config.shard is not None:
            found["parallel.shard"] = config.shard
        return {
            **found,
            "training.micro_batch_size": self.rows,
            "training.activation_checkpointing": self.recomputed,
        }


@dataclass(frozen=True)
class Work:
    """A step to lay out: `batch` rows of `num_tokens`, `flops` operations in all, `state` numbers kept for a weight."""

    model: ModelConfig
    batch: int
    num_tokens: int
    precision: str
    device: str
    flops: float
    state: float
    rows: int | None = None
    recomputed: Mode | None = None


def lay_out(work: Work, machine: MachineConfig, given: ParallelConfig | None) -> list[Laid]:
    """The layouts of `work` that fit `machine`, the fastest first; only `given` if the user chose one.

    Empty if none fits its memory. Raises `ConfigError` if `given` cannot be.
    """
    with torch.device("meta"):
        network = blank_model(work.model)
    if given is not None:
        layout = Layout(Ranks(0, machine.devices), given)
        check_network(work.model, given)
        return _fastest_first(_fitting(network, work, machine, layout))
    found: list[Laid] = []
    for context in (1, 2, 4, 8):
        for parallel in _choices(machine, context):
            possible = _possible(work, machine, parallel)
            if possible is not None:
                found += _fitting(network, work, machine, possible)
        if found:  # tokens of a row are shared only if a whole row fits nowhere
            break
    return _fastest_first(found)


def _fastest_first(found: Iterable[Laid]) -> list[Laid]:
    return sorted(found, key=lambda laid: laid.seconds.middle)


def _choices(machine: MachineConfig, context: int) -> Iterator[ParallelConfig]:
    """Layouts to consider: tensor and context ranks within a node, pipelines across, copies whole or in pieces."""
    for tensor in (1, 2, 4, 8):
        if tensor * context > machine.devices_per_node:
            break
        for pipeline in (1, 2, 4, 8, 16):
            stage = machine.devices // pipeline
            copies = stage // tensor
            shards: Sequence[int | None] = (None,)
            if copies > machine.devices_per_node > 1:
                shards = (None, machine.devices_per_node)
            for zero in (0, 1, 3) if copies > 1 else (0,):
                for shard in shards if zero else (None,):
                    yield ParallelConfig(tensor=tensor, context=context, pipeline=pipeline, zero=zero, shard=shard)


def _possible(work: Work, machine: MachineConfig, parallel: ParallelConfig) -> Layout | None:
    try:
        layout = Layout(Ranks(0, machine.devices), parallel)
        check_network(work.model, parallel)
    except ConfigError:
        return None
    return None if work.num_tokens % layout.parts_of_rows else layout


def _fitting(network: Transformer, work: Work, machine: MachineConfig, layout: Layout) -> Iterator[Laid]:
    """Yields this layout with the largest micro-batch that fits, recomputing only if nothing fits without."""
    usable = USABLE * machine.memory_gb * 1e9
    modes: Sequence[Mode] = ("none", "selective", "full") if work.recomputed is None else (work.recomputed,)
    for mode in modes:
        best: Laid | None = None
        for rows in _row_counts(work, layout):
            laid = laid_out(network, work, machine, layout, rows, mode)
            if laid.plan.peak > usable:
                break
            best = laid
        if best is not None:
            yield best
            return


def _row_counts(work: Work, layout: Layout) -> Iterator[int]:
    """Yields the sizes of micro-batches that the ranks share evenly, ascending."""
    share, uneven = divmod(work.batch, layout.num_data)
    if uneven:
        return
    for rows in (work.rows,) if work.rows is not None else (2**power for power in range(11)):
        if rows * work.num_tokens > _ENOUGH_TOKENS and rows > 1 and work.rows is None:
            return
        if share % rows == 0 and _is_pipelined_evenly(layout, share // rows):
            yield rows


def _is_pipelined_evenly(layout: Layout, micro_batches: int) -> bool:
    stages = layout.config.pipeline
    return stages == 1 or (micro_batches % stages == 0 and micro_batches >= layout.config.fewest_micro_batches)


def laid_out(network: Transformer, work: Work, machine: MachineConfig, layout: Layout, rows: int, mode: Mode) -> Laid:
    """This layout with micro-batches of `rows`, which recompute as `mode` says."""
    micro_batches = work.batch // layout.num_data // rows
    step = StepShape(rows, work.num_tokens, micro_batches, work.precision, work.device, mode)
    plan = Plan.largest(network, layout, step, state=work.state)
    return Laid(plan, rows, micro_batches, mode, _step_seconds(plan, work, machine, micro_batches, mode))


def _step_seconds(plan: Plan, work: Work, machine: MachineConfig, micro_batches: int, mode: Mode) -> Interval:
    """The seconds of a step: arithmetic, the idle share of a pipeline, and messages.

    A pipeline of p ranks with m micro-batches is idle for p - 1 of m + p - 1 turns (Huang et al. 2019, section 2.3).
    Weights and gradients are sent while it computes; other messages wait.
    """
    config, again = plan.layout.config, _RECOMPUTED if mode == "full" else 1.0
    turns = (micro_batches + config.pipeline - 1) / micro_batches
    ideal = work.flops * again * turns / (machine.devices * machine.teraflops * 1e12)
    is_one_node = machine.devices <= machine.devices_per_node
    far = (machine.link_gb_per_second if is_one_node else machine.network_gb_per_second) * 1e9
    near = machine.link_gb_per_second * 1e9
    hidden = waits = 0.0
    for purpose, sent in plan.sent.items():
        is_near = purpose in _BETWEEN_NEIGHBOURS
        if purpose in _WHILE_IT_COMPUTES:
            is_in_node = config.shard is not None and config.shard * config.tensor <= machine.devices_per_node
            hidden += sent / (near if is_in_node and purpose == "weights" else far)
        else:
            waits += sent / (near if is_near else far)
    computing = [ideal / share for share in (EFFICIENCY.high, EFFICIENCY.middle, EFFICIENCY.low)]
    return Interval(*(max(seconds, hidden) + waits for seconds in computing))
