"""The network of a run, where it is computed, and what its steps cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.task.interface import Task
from sheepop.model import Transformer, blank_model
from sheepop.parallel.layout import Layout
from sheepop.train import TrainingConfig
from sheepop.train.activation_checkpointing import StepBytes, apply_activation_checkpointing, step_bytes
from sheepop.train.optimizers.build import optimizer_slots
from sheepop.train.placement import OneDevice, Placement
from sheepop.train.precision import apply_precision, candidates

if TYPE_CHECKING:
    from sheepop.parallel.plan import Plan


def build_network(task: Task, device: str) -> Transformer:
    """The initial network of a run, prepared for its precision and activation checkpointing."""
    model, training = task.network(device), task.config.training
    apply_precision(model, training.precision)
    if training.activation_checkpointing != "auto":
        apply_activation_checkpointing(model, training.activation_checkpointing, training.checkpointed_blocks)
    return model


def place_network(
    model: Transformer,
    optimizers: Sequence[torch.optim.Optimizer],
    config: SheepOpConfig,
    layout: Layout | None,
    device: str,
) -> Placement:
    """Places the model and its optimizers on this device, or with a `layout` over its ranks."""
    settings = config.training.resolved()
    precision, compiled = settings.precision, settings.compile
    if layout is None:
        return OneDevice(model, precision=precision, device=device, compiled=compiled)
    # These load what one device does not need.
    if config.parallel.pipeline > 1:
        from sheepop.train.pipelined import PipelinedModel as Placed
    else:
        from sheepop.train.sharded import ShardedModel as Placed  # type: ignore[assignment]
    placement = Placed(model, layout, precision=precision, device=device, compiled=compiled)
    placement.take_over(optimizers)
    return placement


def bytes_of_a_step(config: SheepOpConfig, training: TrainingConfig, length: int, device: str) -> StepBytes:
    """The memory of a step, in the candidate precision that needs most."""
    rows = training.micro_batch_size or training.global_batch_size
    found = [
        step_bytes(config.model, training, precision, rows, length, device)
        for precision in candidates(training.precision, device)
    ]
    return max(found, key=lambda needed: needed.peak("none", 0))


def costs(
    config: SheepOpConfig,
    optimizers: Sequence[torch.optim.Optimizer],
    layout: Layout,
    num_tokens: int,
    device: str,
) -> Plan:
    """Predicts memory, messages and computation of the rank that needs most memory, for rows of `num_tokens`."""
    from sheepop.parallel.plan import Plan
    from sheepop.parallel.stage_memory import StepShape

    settings = config.training.resolved()
    rows = settings.micro_batch_size
    step = StepShape(
        rows=rows,
        num_tokens=num_tokens,
        micro_batches=max(1, config.training.global_batch_size // rows // layout.num_data),
        precision=settings.precision,
        device=device,
        recomputed=settings.activation_checkpointing,
        recomputed_blocks=config.training.checkpointed_blocks,
    )
    # By the shapes of the parameters here, which are those of pieces.
    numbers, kept = 0, 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                slots = optimizer_slots(optimizer, group, parameter).values()
                numbers += parameter.numel()
                kept += sum(math.prod(shape) for shape in slots if shape is not None)
    averages = 0 if config.training.ema_decay is None else 1
    with torch.device("meta"):
        whole = blank_model(config.model)
    return Plan.largest(whole, layout, step, state=kept / max(1, numbers) + averages)
