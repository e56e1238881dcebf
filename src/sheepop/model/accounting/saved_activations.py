"""The activations that a forward pass saves for the backward pass, counted on fake tensors (shapes without data).

The network itself runs on fake tensors, so the count follows its configuration and the kernels that PyTorch chooses,
and works for networks that do not fit this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sheepop.model.accounting.live_bytes import LiveBytes, tensors_of
from sheepop.model.attention.blocks import has_block_kernel
from sheepop.model.block import BlockInputs
from sheepop.model.config import ModelConfig
from sheepop.model.initialization import blank_model
from sheepop.model.transformer import Outputs, Transformer

Mode = Literal["none", "selective", "full"]
"""What the backward pass recomputes: nothing, everything except the results of `kept_operations`, or whole blocks."""

Change = Callable[[Transformer], None]
"""Changes a network in place; equal changes do the same."""

_ATEN = torch.ops.aten
# The operations whose results save the most computation for their memory.
_PRODUCTS = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN._scaled_mm.default,
    _ATEN._grouped_mm.default,
    torch.ops.sheepop.grouped_product.default,
}
# Not kept with dropout: attention draws random numbers, and skipping it would shift those of the recomputed operations.
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    torch.ops.sheepop.causal_products.default,
    torch.ops.sheepop.document_attention.default,
    torch.ops.higher_order.flex_attention,
}


def kept_operations(config: ModelConfig) -> set[Any]:
    """Returns the operations whose results selective recomputation keeps: products, and without dropout attention."""
    return _PRODUCTS if config.dropout else _PRODUCTS | _ATTENTION


@dataclass(frozen=True)
class BlockBytes:
    """The bytes that one block keeps: `everything`, or in addition to its input with ``selective`` and ``full``.

    `full` is 0 unless the block has experts, whose routing the loss needs.
    """

    everything: int
    selective: int
    full: int = 0


@dataclass(frozen=True)
class Activations:
    """The bytes that a micro-batch keeps for the backward pass.

    `block_input` is the residual stream before a block. `masks` are inputs of blocks that only recomputation keeps.
    `rest` is outside the blocks or shared by them, and includes the hidden states that enter the loss.
    """

    blocks: tuple[BlockBytes, ...]
    block_input: int
    masks: int
    rest: int

    def kept(self, number: int, mode: Mode, num_blocks: int | None = None) -> int:
        """Returns the bytes that block `number` keeps if `mode` applies to the first `num_blocks` blocks (all if None).

        What is recomputed keeps the input of the block.
        """
        block = self.blocks[number]
        if mode == "none" or (num_blocks is not None and number >= num_blocks):
            return block.everything
        return self.block_input + (block.selective if mode == "selective" else block.full)

    def total(self, mode: Mode = "none", num_blocks: int | None = None) -> int:
        """Returns the bytes kept if `mode` applies to the first `num_blocks` blocks (all if None)."""
        blocks = sum(self.kept(number, mode, num_blocks) for number in range(len(self.blocks)))
        return self.rest + blocks + (0 if mode == "none" or num_blocks == 0 else self.masks)


def count_activations(
    config: ModelConfig,
    rows: int,
    length: int,
    *,
    precision: str = "fp32",
    device: str = "cpu",
    change: Change | None = None,
) -> Activations:
    """Counts what the network keeps for `rows` sequences of `length` tokens in an uncompiled training step.

    `precision` is ``fp32``, ``bf16`` (weights cast once per step), ``fp16`` (autocast) or ``fp8``, which is counted
    as autocast to bf16. An encoder-decoder reads sources of the same length. `device` determines the kernels; this
    machine must have it. A `change` of the network, such as frozen weights below adapters, may make its layers unlike.
    """
    if change is not None:
        return _counted(_count, config.model_dump_json(), rows, length, precision, device, change)
    few, kinds = _one_of_each(config)
    found = _counted(_count, few.model_dump_json(), rows, length, precision, device)
    return replace(found, blocks=tuple(found.blocks[kind] for kind in kinds))


def count_going_back(
    config: ModelConfig,
    rows: int,
    length: int,
    *,
    precision: str = "fp32",
    device: str = "cpu",
    change: Change | None = None,
) -> tuple[int, ...]:
    """Returns the peak bytes that the backward pass of each block allocates, in addition to the saved activations.

    They are the gradients of activations, from the block's output to its input, and of one weight at a time. Arguments
    as in `count_activations`.
    """
    if change is not None:
        return tuple(_counted(_count_going_back, config.model_dump_json(), rows, length, precision, device, change))
    few, kinds = _one_of_each(config)
    found = _counted(_count_going_back, few.model_dump_json(), rows, length, precision, device)
    return tuple(found[kind] for kind in kinds)


@lru_cache
def _counted(
    count: Callable[..., Any], config: str, rows: int, length: int, precision: str, device: str,
    change: Change | None = None,
) -> Any:  # fmt: skip
    """The count for a network of fake tensors with the configuration in this JSON, made once for each."""
    network = ModelConfig.model_validate_json(config)
    with _on_fake_tensors(network, rows, length, precision, device) as (model, run):
        if change is not None:
            change(model)
        return count(model, run, _arithmetic(precision, device))


def _one_of_each(config: ModelConfig) -> tuple[ModelConfig, list[int]]:
    """Returns the configuration of a network with one layer of each kind, and the index of each layer's kind."""
    if config.architecture != "decoder":
        return config, list(range((config.num_encoder_layers or 0) + config.num_layers))
    if config.shared_kv_layers or config.layer_inputs is not None:  # where one layer's activations depend on others
        return config, list(range(config.num_layers))
    kinds = [
        (config.window(layer), config.rotates(layer), config.mixer(layer), config.has_experts(layer),
         config.ffn_width(layer), layer in (config.keys_as_values or ()))
        for layer in range(config.num_layers)
    ]  # fmt: skip
    first = list(dict.fromkeys(kinds))
    settings: dict[str, Any] = {"num_layers": len(first)}
    if config.sliding_layers is not None:
        settings["sliding_layers"] = [place for place, (window, *_) in enumerate(first) if window is not None]
    if config.rotary_layers is not None:
        rotating = [place for place, (_, rotates, *_) in enumerate(first) if rotates]
        settings["rotary_layers"] = rotating
    for name in ("gated_convolution", "gated_delta_net"):
        if (section := getattr(config, name)) is not None:
            settings[name] = section.replace(layers=[place for place, kind in enumerate(first) if kind[2] == name])
    if config.layer_d_ff is not None:
        settings["layer_d_ff"] = [kind[4] for kind in first]
    if config.keys_as_values is not None:
        settings["keys_as_values"] = [place for place, kind in enumerate(first) if kind[5]]
    if config.experts is not None and config.experts.layers is not None:
        having = [place for place, kind in enumerate(first) if kind[3]]
        settings["experts"] = config.experts.replace(layers=having)
    return config.replace(**settings), [first.index(kind) for kind in kinds]


@contextmanager
def _on_fake_tensors(
    config: ModelConfig, rows: int, length: int, precision: str, device: str
) -> Iterator[tuple[Transformer, Callable[[], Outputs]]]:
    """Yields a network of fake tensors in training mode, and a function that runs it on a micro-batch."""
    narrowest = config.narrowest_head
    in_blocks = config.attention_backend in ("auto", "flex") and config.dropout == 0
    if in_blocks and has_block_kernel(torch.device(device), narrowest):
        # FlexAttention then computes all special cases, and saves the same tensors as the plain kernel.
        plain = dict.fromkeys(("sliding_window", "sliding_layers", "sliding_position_base", "attention_soft_cap"))
        config = config.replace(attention_backend="sdpa", attention_sinks=False, **plain)
        if config.position_encoding == "alibi":
            config = config.replace(position_encoding="none")
    with FakeTensorMode():
        with torch.device(device):
            model = blank_model(config).train()
            input_ids = torch.zeros(rows, length, dtype=torch.int64)
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        if precision == "bf16":
            exact = set(map(id, model.exact_parameters))
            for parameter in model.parameters():
                if id(parameter) not in exact:
                    parameter.data = parameter.data.bfloat16()
        sources: dict[str, Any] = {"source_ids": input_ids} if config.architecture == "encoder_decoder" else {}
        yield model, partial(model.run, input_ids, **sources)


def _arithmetic(precision: str, device: str) -> AbstractContextManager[Any]:
    dtype = {"fp16": torch.float16, "fp8": torch.bfloat16}.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


def _count(model: Transformer, run: Callable[[], Outputs], arithmetic: AbstractContextManager[Any]) -> Activations:
    kept = _Kept(model)
    products: list[dict[int, int]] = []
    inputs: list[Tensor] = []
    operations = kept_operations(model.config)

    def counted(number: int, forward: Callable[..., Any], x_BTD: Tensor, given: BlockInputs, *others: Any) -> Any:
        inputs.append(x_BTD)
        with kept.inside(number, given), _Results(operations) as results:
            found = forward(x_BTD, given, *others)
        products.append(results.sizes)
        return found

    layers: tuple[nn.Module, ...] = model.layers
    for number, block in enumerate(layers):
        block.forward = partial(counted, number, block.forward)
    with arithmetic, torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        outputs = run()
        kept.add(outputs.hidden_states)
    for sizes in (*(sizes for layer, sizes in kept.sizes.items() if layer is not None), *products):
        kept.take_given(sizes)
    recorded: list[dict[int, int]] = [{} for _ in products]
    for layer, routing in zip(model.mixtures, outputs.routings, strict=True):
        recorded[layer] = dict(map(_storage, routing))
        kept.sizes.setdefault(layer, {}).update(recorded[layer])
    blocks = (
        BlockBytes(sum(kept.sizes.get(layer, {}).values()), sum((again | routed).values()), sum(routed.values()))
        for layer, (again, routed) in enumerate(zip(products, recorded, strict=True))
    )
    outside = kept.sizes.get(None, {})
    # The stream before the first block may be kept for layer inputs anyway, and is not kept again for recomputation.
    masks = kept.masks - outside.get(_storage(inputs[0])[0], 0)
    return Activations(tuple(blocks), inputs[0].nbytes, masks, sum(outside.values()))


def _count_going_back(
    model: Transformer, run: Callable[[], Outputs], arithmetic: AbstractContextManager[Any]
) -> list[int]:
    passes: list[tuple[Callable[..., Any], Tensor, BlockInputs, tuple[Any, ...]]] = []

    def noted(forward: Callable[..., Any], x_BTD: Tensor, given: BlockInputs, *others: Any) -> Any:
        memory = None if given.memory is None else given.memory.detach()
        passes.append((forward, x_BTD, replace(given, memory=memory), others))
        return forward(x_BTD, given, *others)

    layers: tuple[nn.Module, ...] = model.layers
    for block in layers:
        block.forward = partial(noted, block.forward)
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.register_post_accumulate_grad_hook(_forget)  # type: ignore[no-untyped-call]
    with arithmetic, torch.no_grad():
        run()
    return [
        _going_back(partial(forward, x_BTD.requires_grad_(), given, *others), arithmetic)
        for forward, x_BTD, given, others in passes
    ]


def _going_back(forward: Callable[[], tuple[Tensor, Any]], arithmetic: AbstractContextManager[Any]) -> int:
    with LiveBytes() as live:
        with arithmetic:
            found_BTD, *_ = forward()
        live.forget_peak()
        before = live.now
        torch.autograd.backward(found_BTD, torch.empty_like(found_BTD))
        return live.peak - before


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


class _Kept:
    """Collects the storages that autograd saves, except weights: their bytes, by the block that saved each one first.

    The key None is for storages outside the blocks or shared by them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sizes: dict[int | None, dict[int, int]] = {}
        self._block: int | None = None
        self._given: dict[int, int] = {}
        self._shared: set[int] = set()
        self._known = {_storage(tensor)[0] for tensor in (*model.parameters(), *model.buffers())}
        self._tensors: list[Tensor] = []  # kept alive, so that no new storage gets the identity of a counted one

    @property
    def masks(self) -> int:
        """The bytes of block inputs that autograd does not save."""
        return sum(size for identity, size in self._given.items() if identity not in self._known)

    def pack(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        return tensor

    def add(self, tensor: Tensor) -> None:
        identity, size = _storage(tensor)
        if identity not in self._known:
            self._known.add(identity)
            self._tensors.append(tensor)
            place = None if identity in self._given else self._block
            self.sizes.setdefault(place, {})[identity] = size

    def take_given(self, sizes: dict[int, int]) -> None:
        """Takes the storages that a block gave to others out of `sizes`: they outlive the block."""
        for identity in self._shared & sizes.keys():
            self.sizes.setdefault(None, {})[identity] = sizes.pop(identity)

    @contextmanager
    def inside(self, block: int, given: BlockInputs) -> Iterator[None]:
        tensors = list(tensors_of((given.attending, given.memory, given.rotary, given.vectors, given.shared)))
        self._given |= dict(map(_storage, tensors))
        self._shared |= {_storage(tensor)[0] for tensor in tensors_of(given.shared)}
        self._tensors += tensors
        self._block = block
        try:
            yield
        finally:
            self._block = None


class _Results(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The storages of the results of certain operations, and their bytes."""

    def __init__(self, operations: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations
        self._tensors: list[Tensor] = []

    @property
    def sizes(self) -> dict[int, int]:
        return dict(map(_storage, self._tensors))

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        found = operation(*arguments, **(settings or {}))
        if operation in self._operations:
            results = found if isinstance(found, tuple) else (found,)
            self._tensors += [result for result in results if isinstance(result, Tensor)]
        return found


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Returns an identity of the tensor's storage, unique among live storages, and its bytes."""
    storage = tensor.untyped_storage()
    # Fake tensors have no address.
    return storage._cdata, storage.nbytes()
