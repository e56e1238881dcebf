"""Transformer blocks that run in one native call, for decoding on a CPU.

A decoding pass has few tokens, so the calls from Python between its matrix products would take longer than their
arithmetic. The C++ code runs all blocks in one call, or each of them if some are not supported; long chunks and traced
passes run in PyTorch.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sheepop.adapt.native_products import matrices, missing_kernel, wants_native_kernels, with_native_products
from sheepop.adapt.row_adapters import Adapter, RowAdapters
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.core.kernel_build import KERNELS
from sheepop.core.native import COUNT, POINTER, address, native_function, native_library, say_once
from sheepop.generate.native_steps import (
    ACTIVATIONS,
    MODULES,
    NORMS,
    Change,
    Step,
    TokensOfKind,
    described_layer,
    linears,
    tokens_of,
)
from sheepop.generate.paged_cache import PagedCache
from sheepop.generate.paged_kernels import attention_kernel, storing_kernel
from sheepop.generate.runner import is_led
from sheepop.model import Transformer
from sheepop.model.block import Block, BlockInputs, BlockOutputs
from sheepop.model.cache import Cache
from sheepop.model.probe import someone_watches

_SOURCE = KERNELS / "block.cpp"
_OF_NATIVE = ("_layer", "_most_rows", "_about", "_adapters", "_changes")


class NativeBlock(Block):
    """A decoder block over the modules of `block`, which runs in one native call if the pass allows it."""

    def __init__(
        self, block: Block, activation: str, slopes: Tensor | None, adapters: RowAdapters | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(block.__dict__)
        self._layer, self._about = described_layer(block, activation, slopes), (activation, slopes)
        self._adapters = adapters
        self._changes: weakref.WeakKeyDictionary[Adapter, _Changes | None] = weakref.WeakKeyDictionary()
        weights = [weight for weight in block.parameters() if isinstance(weight, StoredWeight)]
        self._most_rows = min(weight.most_native_rows for weight in weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        """Returns a plain block, because the native structures point to the weights of the original."""
        block = memo[id(self)] = Block.__new__(Block)
        nn.Module.__init__(block)
        kept = {key: value for key, value in vars(self).items() if key not in _OF_NATIVE}
        block.__dict__.update(copy.deepcopy(kept, memo))
        return block

    def forward(self, x_BTD: Tensor, inputs: BlockInputs, cache: Cache | None = None) -> BlockOutputs:
        """Returns what `Block.forward` returns."""
        found_BTD = run_together([self], x_BTD, [inputs], cache)
        return super().forward(x_BTD, inputs, cache) if found_BTD is None else BlockOutputs(found_BTD)

    def step(self, inputs: BlockInputs, cache: PagedCache, count: int) -> tuple[Step, TokensOfKind, Any] | None:
        """Describes a pass of `count` tokens through this block, with the tokens and what else must stay alive.

        Returns None if PyTorch runs it. Raises `ValueError` if a tensor is not as the native code assumes.
        """
        metadata = cache.metadata(inputs.attending)
        changes = None if metadata is None or count > self._most_rows else self._changes_of(count)
        if metadata is None or changes is None:
            return None
        assert self.attention is not None
        tokens = tokens_of(metadata, inputs.rotary, cache.block_size, count)
        if 2 * tokens.width > self._layer.key_width:
            raise ValueError(f"{tokens.width} angles rotate more than the {self._layer.key_width} numbers of a head")
        keys, values = cache.keys[self.attention.layer], cache.values[self.attention.layer]
        stored = (
            blocks.described(len(blocks.numbers), self._layer.kv_heads, cache.block_size, width)
            for blocks, width in ((keys, self._layer.key_width), (values, self._layer.value_width))
        )
        parts = self._layer, tokens.described
        step = Step(*(ctypes.addressof(part) for part in parts), *stored, ctypes.addressof(changes))
        return step, tokens, changes

    def with_adapters(self, block: Block, adapters: RowAdapters) -> NativeBlock:
        """The native block over the layers of `block`, to whose products the rows of `adapters` add."""
        return NativeBlock(block, *self._about, adapters)

    def _changes_of(self, count: int) -> ctypes.Array[Any] | None:
        """The addresses of what each of `count` rows adds to the products; None if native code cannot add it."""
        found = (POINTER * count)()
        for adapter, rows in () if self._adapters is None else self._adapters.selected:
            if adapter not in self._changes:
                self._changes[adapter] = self._made(adapter)
            if (made := self._changes[adapter]) is None:
                return None
            for row in range(count) if rows is None else rows.tolist():
                found[row] = ctypes.addressof(made.of_layers)
        return found

    def _made(self, adapter: Adapter) -> _Changes | None:
        layers = linears(self)
        made = _Changes((Change * len(layers))(), [])
        for place, layer in enumerate(layers):
            change = adapter.changes.get(getattr(layer, "path", ""))
            if change is None or layer is None:
                continue
            if change.magnitude is not None or change.down.dtype != torch.float32:
                return None
            rank, up = len(change.down), change.up.detach().t().contiguous()
            made.weights.append(up)
            made.of_layers[place] = Change(
                address("A", change.down, torch.float32, rank, layer.in_features),
                address("B", up, torch.float32, rank, layer.out_features),
                *(rank, change.config.scale),
            )
        return made


class _Changes(NamedTuple):
    """What an adapter adds to the products of each layer of a block, and new weights that it points to."""

    of_layers: ctypes.Array[Change]
    weights: list[Tensor]


def run_together(
    blocks: Sequence[nn.Module], x_BTD: Tensor, inputs: Sequence[BlockInputs], cache: Cache | None
) -> Tensor | None:
    """Returns the residual stream (B, T, D) after these blocks; None if native code cannot run all of them.

    Raises `ValueError` if a tensor is not as the native code assumes.
    """
    if not isinstance(cache, PagedCache) or someone_watches():
        return None
    steps = _steps(blocks, inputs, cache, x_BTD.shape[:-1].numel())
    if steps is None:
        return None
    x_BTD = x_BTD.contiguous()
    out_BTD = torch.empty_like(x_BTD)
    stored = cache.keys[0].numbers.dtype
    _run()(
        *(steps.described, len(blocks)),
        address("x", x_BTD, torch.float32, *x_BTD.shape),
        out_BTD.data_ptr(),
        *(kernel(stored) for kernel in (attention_kernel, storing_kernel)),
        torch.get_num_threads(),
    )
    return out_BTD


class _Steps:
    """A pass through several blocks as native code sees it, with the tokens of each block and what must stay alive."""

    def __init__(self, made: Sequence[tuple[Step, TokensOfKind, Any]]) -> None:
        steps, self.tokens, self._kept = zip(*made, strict=True)
        self.described = (Step * len(made))(*steps)


def _steps(blocks: Sequence[nn.Module], inputs: Sequence[BlockInputs], cache: PagedCache, count: int) -> _Steps | None:
    """Describes a pass of `count` tokens through these blocks; None if PyTorch runs one of them.

    A pass over static buffers is described once: later only its angles are new.
    """
    kept: dict[Any, _Steps] = {} if cache.static is None else cache.static.described
    if (known := kept.get((blocks[0], len(blocks)))) is not None:
        for tokens, own in zip(known.tokens, inputs, strict=True):
            tokens.move(own.rotary)
        return known
    made = []
    for block, own in zip(blocks, inputs, strict=True):
        step = block.step(own, cache, count) if isinstance(block, NativeBlock) else None
        if step is None:
            return None
        made.append(step)
    found = kept[blocks[0], len(blocks)] = _Steps(made)
    return found


def prepared(model: Transformer) -> tuple[Transformer, list[tuple[Tensor, Tensor]]]:
    """A copy of the modules over the same weights, with the fastest layers for its device.

    Also returns the few weights that had to be copied, to be more exact, each with its original.
    """
    if not wants_native_kernels(model) or is_led(model):
        copy = model.sharing_copy().eval()
        if copy.device.type == "cuda":
            copy.pack_projections()
        return copy, []
    copy = with_native_products(model).eval()
    both = zip(*((*network.parameters(), *network.buffers()) for network in (copy, model)), strict=True)
    copies = [(mine, own.detach()) for mine, own in both if mine.dtype != own.dtype]
    return with_native_blocks(copy), [pair for pair in copies if not isinstance(pair[0], StoredWeight)]


def with_native_blocks(model: Transformer) -> Transformer:
    """Replaces each supported block of `model`, whose weights are in the kernels' format, and returns the model.

    Why other blocks stay as they are is said once.
    """
    if native_library(_SOURCE) is None:
        return model
    for layer, block in enumerate(model.layers):
        if (lacking := _lacking(model, block)) is None:
            model.blocks[layer] = NativeBlock(block, model.config.activation, model.slopes)
        else:
            say_once(f"Blocks of this model run in PyTorch, step by step, because the native block lacks {lacking}.")
    if all(isinstance(block, NativeBlock) for block in model.layers):
        model.run_together = run_together
    return model


def _lacking(model: Transformer, block: Block) -> str | None:
    """What `block` has and the native block does not compute; None if it computes everything."""
    attention, modules = block.attention, list(block.modules())
    unknown = sorted({type(module).__name__ for module in modules if type(module) not in MODULES})
    missing = next(filter(None, map(missing_kernel, matrices(block))), None)
    lacking = {
        "encoders and decoders": model.architecture != "decoder",
        f"{', '.join(unknown)}": bool(unknown) or attention is None,
        f"the activation {model.config.activation}": model.config.activation not in ACTIVATIONS,
        "factors of layers": block.factor is not None,
        "keys and values that layers share, and keys that are the values": attention is not None
        and (attention.v_proj is None or attention.gives_keys),
        "gates and convolutions of attention": attention is not None
        and (attention.gate_proj is not None or attention.convolutions is not None),
        f"{missing}": missing is not None,
        "other data types than float32": any(parameter.dtype != torch.float32 for parameter in block.parameters()),
        "norms without weights": any(type(module) in NORMS and module.weight is None for module in modules),
    }
    return next((part for part, found in lacking.items() if found), None)


@cache
def _run() -> Any:
    return native_function(_SOURCE, "run_blocks", [POINTER, COUNT, *[POINTER] * 4, COUNT])
