"""Activation checkpointing, put round the blocks of a finished network: less memory for more arithmetic.

``full`` keeps only the input of a block and runs the block again in the backward pass (Chen et al. 2016).
``selective`` keeps the results of matrix products and of attention as well, so that only cheap operations are run
again (Korthikanti et al. 2022, section 5). Neither changes a number: dropout draws the same mask the second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sheepop.core.errors import ConfigError
from sheepop.model import Transformer
from sheepop.train.config import TrainingConfig
from sheepop.train.network import Network
from sheepop.train.objective import TensorBatch

Mode = Literal["none", "selective", "full"]

GIGABYTE = 10**9
_FREE_SHARE = 0.8  # of what is free, when no budget is given: the rest is for what is not counted
_STATE_COPIES = 4  # of every weight in float32: itself, its gradient, and up to two moments of the optimizer

_ATEN = torch.ops.aten
# Operations whose results `selective` keeps: what costs most to compute for what it takes to keep.
_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN._scaled_mm.default}
# Not kept under dropout: a kernel that draws its mask and is not run again would leave the others another stream.
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    torch.ops.sheepop.document_attention.default,
    torch.ops.higher_order.flex_attention,
}


def apply_activation_checkpointing(model: Transformer, mode: Mode, num_blocks: int | None = None) -> None:
    """Wraps the forward pass of the first `num_blocks` blocks (all when None); names and weights stay as they are.

    Only passes that need gradients are affected. Raises `ConfigError` for more blocks than there are.
    """
    layers: Sequence[nn.Module] = model.layers
    count = len(layers) if num_blocks is None else num_blocks
    if count > len(layers):
        raise ConfigError(
            f"training.checkpointed_blocks = {count}, but the network has {len(layers)} (model.num_layers, and "
            "those of an encoder)."
        )
    if mode == "none":
        return
    policy = partial(_policy, _kept_operations(model))
    options = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if mode == "selective" else {}
    for block in layers[:count]:
        block.forward = partial(_run_checkpointed, block.forward, options)


def _run_checkpointed(forward: Callable[..., Tensor], options: dict[str, Any], *arguments: Any) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*arguments)
    result: Tensor = checkpoint(forward, *arguments, use_reentrant=False, **options)
    return result


def _kept_operations(model: Transformer) -> set[Any]:
    return _PRODUCTS if model.config.dropout else _PRODUCTS | _ATTENTION


def _policy(kept: set[Any], context: Any, operation: Any, *arguments: Any, **settings: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class ActivationBytes:
    """What one micro-batch keeps for the backward pass, in bytes.

    `block` is what a block keeps when nothing is recomputed, `products` what `selective` keeps of it beside its
    input, `block_input` that input, and `rest` what everything outside the blocks keeps. `fixed` is independent of
    the micro-batch: weights, gradients and the optimizer's moments.
    """

    block: int
    products: int
    block_input: int
    rest: int
    fixed: int
    num_blocks: int

    def peak(self, mode: Mode, num_blocks: int) -> int:
        """The estimated peak when `num_blocks` blocks are checkpointed.

        ``fixed + 3 rest + (L - n) block + n kept``, and ``block`` once more while one of n is run again. Most of
        `rest` are log-probabilities; their gradient and that of the logits are as large and alive at the same time.
        """
        if mode == "none" or num_blocks == 0:
            return self.fixed + 3 * self.rest + self.num_blocks * self.block
        kept = self.block_input + (self.products if mode == "selective" else 0)
        plain = (self.num_blocks - num_blocks) * self.block
        return self.fixed + 3 * self.rest + plain + num_blocks * kept + self.block

    def cheapest(self, budget: int) -> tuple[Mode, int] | None:
        """The first mode of none, selective and full that fits, with the fewest blocks; None when none fits."""
        if self.peak("none", 0) <= budget:
            return "none", 0
        modes: tuple[Mode, ...] = ("selective", "full")
        for mode in modes:
            for count in range(1, self.num_blocks + 1):
                if self.peak(mode, count) <= budget:
                    return mode, count
        return None


def measure_activations(network: Network, row: TensorBatch, rows: int) -> ActivationBytes:
    """Counts what the hidden states of `row`, a batch of one row, keep, and multiplies it by `rows`.

    The last block stands for all of them; where others keep more, it counts among the rest. The loss holds the
    gradients of hidden states and head, and a chunk of logits, however many rows there are.
    """
    model = network.modules
    kept, inner = _Kept(model), _Kept(model)
    products = _Products(_kept_operations(model))
    block: nn.Module = model.layers[-1]
    inputs: list[Tensor] = []

    def counted(forward: Callable[..., Tensor], x_BTD: Tensor, *arguments: Any) -> Tensor:
        inputs.append(x_BTD)
        with torch.autograd.graph.saved_tensors_hooks(inner.pack, inner.unpack), products:
            return forward(x_BTD, *arguments)

    original = block.forward
    block.forward = partial(counted, original)
    network.begin_step()
    try:
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack), network.arithmetic():
            network.hidden_states(row.inputs)
    finally:
        del block.forward
    count = len(model.layers)
    # The last block's tensors were packed by its own hooks, the others' by the outer ones.
    rest = max(0, kept.num_bytes - (count - 1) * inner.num_bytes)
    return ActivationBytes(
        block=rows * inner.num_bytes,
        products=rows * products.num_bytes,
        block_input=rows * inputs[0].nbytes,
        rest=rows * rest,
        fixed=_fixed_bytes(network),
        num_blocks=count,
    )


def _fixed_bytes(network: Network) -> int:
    """Weights, gradients and moments in float32, the working copy of the weights, and what the loss holds at a time."""
    weights = {id(weight): weight.numel() for weight in network.modules.parameters()}
    weights[id(network.head)] = network.head.numel()
    copies = sum(weight.nbytes for weight in network.modules.parameters() if weight.dtype != torch.float32)
    return 4 * _STATE_COPIES * sum(weights.values()) + copies + network.head.nbytes


class _Kept:
    """Bytes of the tensors that autograd keeps, each storage once, weights left out."""

    def __init__(self, model: nn.Module) -> None:
        self.num_bytes = 0
        self._tensors: list[Tensor] = []  # alive, so that no storage takes the place of another that was counted
        self._known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._tensors.append(tensor)
            self.num_bytes += storage.nbytes()
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        return tensor


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the results that `selective` keeps."""

    def __init__(self, kept: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self._operations = kept

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), settings: dict[str, Any] | None = None
    ) -> Any:
        found = operation(*arguments, **(settings or {}))
        if operation in self._operations:
            results = found if isinstance(found, tuple) else (found,)
            self.num_bytes += sum(result.nbytes for result in results if isinstance(result, Tensor))
        return found


def resolve_activation_checkpointing(
    config: TrainingConfig, measure: Callable[[], ActivationBytes], device: str
) -> TrainingConfig:
    """`config` with ``auto`` replaced by the cheapest mode that fits; other modes are returned as they are.

    Raises `ConfigError` when no mode fits the budget.
    """
    if config.activation_checkpointing != "auto":
        return config
    budget = int(config.memory_budget * GIGABYTE) if config.memory_budget is not None else _free_bytes(device)
    found = measure()
    chosen = found.cheapest(budget)
    if chosen is None:
        least = found.peak("full", found.num_blocks)
        raise ConfigError(
            f"A step needs about {least / GIGABYTE:.2f} GB with every block checkpointed, and the budget is "
            f"{budget / GIGABYTE:.2f} GB (training.memory_budget). Lower training.micro_batch_size, or data.max_length."
        )
    mode, count = chosen
    return config.replace(activation_checkpointing=mode, checkpointed_blocks=count or None, memory_budget=None)


def _free_bytes(device: str) -> int:
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    return int(free * _FREE_SHARE)
