"""The memory of a step, and what follows from it: the rows of a micro-batch, and what is computed again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from sheepop.adapt.lora import Adapting
from sheepop.core.facts import counted
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.task.fork import Fork
from sheepop.jobs.task.interface import Task
from sheepop.model.accounting.cost import training_bytes
from sheepop.model.logits import block_rows
from sheepop.report import data_size
from sheepop.train import TrainingConfig
from sheepop.train.activation_checkpointing import (
    StepBytes,
    resolve_activation_checkpointing,
    step_bytes,
    usable_memory,
)
from sheepop.train.precision import candidates

# A micro-batch of a finished model may need as much as this, however small the model is.
_MODEST_BYTES = 10**9
# A CPU is about as fast with this many tokens in a micro-batch as with more, which only need more memory.
_CPU_TOKENS = 256
# More numbers than any network saves for a token, layer and unit of width.
_MOST_SAVED = 100


def in_memory(
    task: Task, training: TrainingConfig, given: Mapping[str, Any], device: str, *, chooses_rows: bool
) -> TrainingConfig:
    """`training` with what a step recomputes; with `chooses_rows` also with the rows that it reads at a time."""
    length = task.batches().max_length
    if chooses_rows:
        training = _fitting(task, training, given.get("training") or {}, length, device)
    origin, texts = task.origin, task.texts_of_row
    return resolve_activation_checkpointing(
        training, lambda: bytes_of_a_step(task.config, training, length, device, origin, texts), device
    )


def _fitting(
    task: Task, training: TrainingConfig, given: Mapping[str, Any], length: int, device: str
) -> TrainingConfig:
    """`training` of a finished model with open settings chosen such that a step on rows of `length` fits into memory.

    A micro-batch may need as much memory as the weights with their gradients and optimizer, or 1 GB, and on a CPU has
    at most 256 tokens. If not even one row fits beside the weights, blocks are recomputed.
    """
    model, usable, given_rows = task.config.model, usable_memory(training, device), training.micro_batch_size
    whole = math.gcd(training.global_batch_size, *(size for _, size in training.batch_size_warmup))
    texts = task.texts_of_row
    saved = 4 * whole * texts * length * _MOST_SAVED * model.d_model * model.num_layers
    if given_rows is None and saved < _MODEST_BYTES:
        return training
    most = max(1, _CPU_TOKENS // (texts * length)) if device == "cpu" else whole
    for rows in [given_rows] if given_rows is not None else [n for n in range(most, 0, -1) if whole % n == 0]:
        own = training.replace(micro_batch_size=rows)
        needed = bytes_of_a_step(task.config, own, length, device, task.origin, texts)
        peak = needed.peak("none", 0)
        if peak <= min(usable, needed.loss + needed.state + max(needed.state, _MODEST_BYTES)):
            break
    recomputes = peak > usable and "activation_checkpointing" not in given
    task.console.info(
        f"A step reads {counted(rows, 'row')} of {length:,} tokens at a time, which needs about {data_size(peak)}"
        f"{' if no block is recomputed' if recomputes else ''}; {data_size(usable)} are to use."
    )
    mode = "auto" if recomputes else training.activation_checkpointing
    return training.replace(micro_batch_size=rows, activation_checkpointing=mode)


def bytes_of_a_step(
    config: SheepOpConfig,
    training: TrainingConfig,
    length: int,
    device: str,
    origin: Fork | None = None,
    texts: int = 1,
) -> StepBytes:
    """The memory of a step, in the candidate precision that needs most; frozen weights are as `origin` stores them.

    Each row of a micro-batch is of so many `texts`.
    """
    rows = texts * (training.micro_batch_size or training.global_batch_size)
    found = [
        step_bytes(config.model, training, precision, rows, length, device, adapting(config))
        for precision in candidates(training.precision, device)
    ]
    most = max(found, key=lambda needed: needed.peak("none", 0))
    if config.tuning.method not in (None, "sft"):
        # Log-probabilities are weighted in the backward pass, in blocks of logits with three copies.
        size = min(rows * length, block_rows(config.model.vocabulary, torch.float32, device))
        most = replace(most, loss=most.loss + 3 * size * config.model.vocabulary * torch.float32.itemsize)
    if config.tuning.lora is None:
        return most
    # The frozen weights; those of adapters are few.
    frozen = training_bytes(config.model, training.optimizer, "fp32").weights if origin is None else origin.weight_bytes
    return replace(most, state=frozen)


def adapting(config: SheepOpConfig) -> Adapting | None:
    """What a run does to its network before the first step: with LoRA it freezes all weights below adapters."""
    return None if config.tuning.lora is None else Adapting(config.tuning.lora)
