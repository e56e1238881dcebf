"""Activation checkpointing, which wraps the blocks of a finished network: less memory for more arithmetic.

``full`` keeps only the input of a block and recomputes the block in the backward pass (Chen et al. 2016). ``selective``
also keeps the results of matrix products and attention, so that it recomputes only cheap operations (Korthikanti et al.
2022, section 5). Neither changes a result: dropout draws the same mask the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer
from sheepop.model.accounting.cost import training_bytes
from sheepop.model.accounting.saved_activations import Activations, Change, Mode, count_activations, kept_operations
from sheepop.model.initialization import blank_model
from sheepop.model.logits import adds_in_place, kept_rows, logits_bytes
from sheepop.model.streamed_log_probabilities import streamed_bytes
from sheepop.train.config import TrainingConfig
from sheepop.train.precision import torch_dtype

GIGABYTE = 10**9
_DEFERRING = ("adamw", "adam", "sgd", "muon")  # whose optimizer of the head is one of `rows.ELEMENTWISE`
_FREE_SHARE = 0.8  # the share of free memory to use without a given budget; the rest is for memory not counted


def apply_activation_checkpointing(model: Transformer, mode: Mode, num_blocks: int | None = None) -> None:
    """Wraps the forward pass of the first `num_blocks` blocks (None: all); names and weights do not change.

    It affects only passes that need gradients. Raises `ConfigError` if the network has fewer blocks.
    """
    layers: Sequence[nn.Module] = model.layers
    count = len(layers) if num_blocks is None else num_blocks
    if count > len(layers):
        raise ConfigError(
            f"training.checkpointed_blocks = {count}, but the network has only {len(layers)} blocks "
            "(model.num_layers, plus those of an encoder)."
        )
    if mode == "none":
        return
    options = {"context_fn": partial(_contexts, kept_operations(model.config))} if mode == "selective" else {}
    for block in layers[:count]:
        block.forward = partial(_run_checkpointed, block.forward, options)


def _run_checkpointed(forward: Callable[..., Any], options: dict[str, Any], *arguments: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments)
    return checkpoint(forward, *arguments, use_reentrant=False, **options)


def _contexts(kept: set[Any]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The contexts of the first pass, which keeps results, and of the recomputation, which reuses them."""

    def policy(context: Any, operation: Any, *arguments: Any, **settings: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    keeping, taking = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return keeping, _Reusing(taking, kept)


class _Reusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the results of the `kept` operations from `mode`, and runs all other operations.

    torch's `mode` alone raises an error if an operation runs more or less often than in the first pass. That happens
    in a block of which FSDP gathers a part, such as experts, separately: in the backward pass that part may be there
    already, or may have been freed.
    """

    def __init__(self, mode: TorchDispatchMode, kept: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode, self._kept = mode, kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, as in torch's own modes: compiled code inside does not run operation by operation."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the result of one operation."""
        if func in self._kept:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class StepBytes:
    """The memory of a training step in bytes: activations of the blocks in a micro-batch, loss, permanent state."""

    activations: Activations
    loss: int
    state: int

    def peak(self, mode: Mode, num_blocks: int) -> int:
        """The estimated peak with `mode` applied to the first `num_blocks` blocks.

        It is the sum of everything that is kept, the gradients of the activations outside the blocks, which are equally
        large, and the activations of the largest block while it is recomputed.
        """
        kept = self.state + self.loss + self.activations.total(mode, num_blocks) + self.activations.rest
        if mode == "none" or num_blocks == 0:
            return kept
        return kept + max(block.everything for block in self.activations.blocks[:num_blocks])

    def cheapest(self, budget: int) -> tuple[Mode, int] | None:
        """The first of none, selective and full that fits, with the fewest blocks; None if none fits."""
        if self.peak("none", 0) <= budget:
            return "none", 0
        modes: tuple[Mode, ...] = ("selective", "full")
        for mode in modes:
            for count in range(1, len(self.activations.blocks) + 1):
                if self.peak(mode, count) <= budget:
                    return mode, count
        return None


def step_bytes(
    model: ModelConfig,
    training: TrainingConfig,
    precision: str,
    rows: int,
    length: int,
    device: str,
    change: Change | None = None,
) -> StepBytes:
    """The memory of a step on micro-batches of `rows` sequences of `length` tokens.

    The loss needs some logits, and a second gradient of the head unless it is added to the first in place. A gradient
    that is deferred never exists, but a step keeps some gradients of logits for it. The gradient of the hidden states
    is counted with the activations outside the blocks.
    A `change` freezes the weights, so there is no gradient of the head. On a CPU there are then no logits of the whole
    vocabulary, unless it adapts the head or the loss has further terms.
    """
    head = 4 * model.vocabulary * model.d_model
    is_large = adds_in_place(head, device)
    deferred = head if is_large and training.optimizer in _DEFERRING else 0
    dtype = torch_dtype(precision)
    logits = logits_bytes(rows * length, model.vocabulary, dtype, device)
    is_plain = not (training.z_loss or training.label_smoothing)
    if change is not None and device == "cpu" and is_plain and not _adapts_head(model, change):
        logits = streamed_bytes(rows * length, model.vocabulary, model.d_model, dtype)
    elif deferred and change is None:
        learnt = length * max(rows, training.global_batch_size)
        logits += min(learnt, kept_rows(model.vocabulary, dtype)) * model.vocabulary * dtype.itemsize
    return StepBytes(
        count_activations(model, rows, length, precision=precision, device=device, change=change),
        loss=logits if is_large or change is not None else head + logits,
        state=training_bytes(model, training.optimizer, precision, averaged=training.ema_decay is not None).total
        - deferred,
    )


def _adapts_head(config: ModelConfig, change: Change) -> bool:
    with torch.device("meta"):
        network = blank_model(config)
    change(network)
    return any(parameter.requires_grad for parameter in network.lm_head.parameters())


def usable_memory(config: TrainingConfig, device: str) -> int:
    """The bytes that training may use: `memory_budget`, or 80 percent of the memory that is free."""
    if config.memory_budget is not None:
        return int(config.memory_budget * GIGABYTE)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    return int(free * _FREE_SHARE)


def resolve_activation_checkpointing(
    config: TrainingConfig, measure: Callable[[], StepBytes], device: str
) -> TrainingConfig:
    """Replaces ``auto`` in `config` by the cheapest mode that fits; other modes do not change.

    Raises `ConfigError` if no mode fits the budget.
    """
    if config.activation_checkpointing != "auto":
        return config
    found, budget = measure(), usable_memory(config, device)
    chosen = found.cheapest(budget)
    if chosen is None:
        least = found.peak("full", len(found.activations.blocks))
        raise ConfigError(
            f"A step needs about {least / GIGABYTE:.2f} GB with every block checkpointed, and the budget is "
            f"{budget / GIGABYTE:.2f} GB (training.memory_budget). Lower training.micro_batch_size, or data.max_length."
        )
    mode, count = chosen
    return config.replace(activation_checkpointing=mode, checkpointed_blocks=count or None, memory_budget=None)
