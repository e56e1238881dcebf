"""LoRA: low-rank adapters of frozen weights (Hu et al. 2021).

A linear layer ``W x + b`` becomes ``W x + b + s B A x`` with A (r, K), B (N, r) and s = alpha / r, or alpha / sqrt(r)
if rank-stabilised (Kalajdzievski 2023). B is initialised with 0, so the network's outputs do not change at first. W may
be stored in integers (QLoRA, Dettmers et al. 2023). DoRA (Liu et al. 2024) also learns the lengths of the rows of
W + s B A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.core.errors import ConfigError
from sheepop.core.random import derive_seed
from sheepop.model import Transformer
from sheepop.model.head import OutputHead
from sheepop.model.logits import cap

_OF_VOCABULARY = ("embedding", "lm_head")


class LowRank(nn.Module):
    """The adapter of one layer: `down` A (r, K), `up` B (N, r), and for DoRA the row lengths `magnitude` (N,)."""

    def __init__(self, config: LoraConfig, down: Tensor, up: Tensor, magnitude: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)
        self.magnitude = None if magnitude is None else nn.Parameter(magnitude)

    def factors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns A, B and the row lengths as tensors to compute with."""
        return self.down, self.up, self.magnitude

    def change(self) -> Tensor:
        """Returns ``s B A`` (N, K)."""
        down, up, _ = self.factors()
        return self.config.scale * (up @ down)

    def lengths(self, changed_NK: Tensor) -> Tensor:
        """Returns the lengths of the rows of W + s B A (N,)."""
        return row_lengths(changed_NK)


class Parts(Protocol):
    """The adapters of a batch whose rows have different ones."""

    def of(self, path: str, count: int) -> Iterable[tuple[LowRank, Tensor | None]]:
        """The changes of the layer at `path`, each with the rows of the `count` that have it; None is all of them."""


class _Adapted(nn.Module):
    """The base of layers with adapters: `changes` by adapter name, of which only the `active` ones are applied.

    `of_rows` adds those of the rows of a batch, for the layer at `path`.
    """

    changes: nn.ModuleDict
    active: tuple[str, ...]
    of_rows: Parts | None = None
    path = ""

    def __init__(self, layer: nn.Module) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        # A new dict, so that the original layer keeps its own modules.
        self._modules = dict(layer._modules)
        self.changes, self.active = nn.ModuleDict(), ()

    @property
    def _counting(self) -> Iterator[LowRank]:
        for name in self.active:
            if name in self.changes:
                change = self.changes[name]
                assert isinstance(change, LowRank)
                yield change

    def _added(self, x: Tensor, product: Tensor, change: Callable[[LowRank, Tensor, Tensor], Tensor]) -> Tensor:
        """Returns `product` (B, ...) plus the `change` that each adapter makes of the rows of `x` and `product`."""
        found = product
        for each in self._counting:
            found = found + change(each, x, product)
        for each, rows in () if self.of_rows is None else self.of_rows.of(self.path, len(x)):
            if rows is None:
                found = found + change(each, x, product)
            else:
                found = found.index_add(0, rows, change(each, x[rows], product[rows]))
        return found


class LoraLinear(_Adapted, nn.Linear):
    """A linear layer with adapters, which shares the weight of the original layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``W x + b`` plus the active adapters."""
        return self.changed(x, self.weight, self.bias)

    def changed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns ``weight x + bias`` plus the active adapters."""

        def change(adapter: LowRank, x: Tensor, product: Tensor) -> Tensor:
            dropped = F.dropout(x, adapter.config.dropout, self.training and adapter.config.dropout > 0)
            down, up, magnitude = adapter.factors()
            low = F.linear(F.linear(dropped.to(down.dtype), down), up) * adapter.config.scale
            if magnitude is None:
                return low.to(product.dtype)
            # The length is a constant for gradients (DoRA, section 4.3); dropout does not apply to the base product.
            factor = magnitude / adapter.lengths((full(weight) + adapter.change()).detach())
            base = product if dropped is x else F.linear(dropped, weight)
            return ((factor - 1) * base + factor * low).to(product.dtype)

        alone = self._alone(x, weight)
        if alone is not None:
            found = _LowRankProduct.apply(x, weight, *alone.factors()[:2], alone.config.scale)  # type: ignore[no-untyped-call]
        else:
            found = self._added(x, F.linear(x, weight), change)
        return found if bias is None else found + bias

    def _alone(self, x: Tensor, weight: Tensor) -> LowRank | None:
        """Returns the adapter, if one without more than A and B changes a frozen weight in the data type of `x`."""
        active = list(self._counting)
        if len(active) != 1 or self.of_rows is not None or isinstance(weight, StoredWeight) or weight.requires_grad:
            return None
        (adapter,), is_dropping = active, self.training and active[0].config.dropout > 0
        is_cast = torch.is_autocast_enabled(x.device.type) or not x.dtype == weight.dtype == adapter.down.dtype
        return None if is_cast or is_dropping or adapter.magnitude is not None else adapter


class _LowRankProduct(torch.autograd.Function):
    """``x W^T + s x A^T B^T`` without further tensors of that size; W (N, K) gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        x_MK = x.flatten(0, -2)
        low_MR = x_MK @ down.t()
        ctx.save_for_backward(x, weight, down, up)
        ctx.scale = scale
        return (x_MK @ weight.t()).addmm_(low_MR, up.t(), alpha=scale).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up = ctx.saved_tensors
        x_MK, gradient_MN = x.flatten(0, -2), gradient.flatten(0, -2)
        of_low_MR = (gradient_MN @ up).mul_(ctx.scale)
        of_x = (gradient_MN @ weight).addmm_(of_low_MR, down).view_as(x) if ctx.needs_input_grad[0] else None
        # The low product is computed again, so that a second derivative goes through it.
        of_up = (gradient_MN.t() @ (x_MK @ down.t())).mul_(ctx.scale)
        return of_x, None, of_low_MR.t() @ x_MK, of_up, None


class LoraEmbedding(_Adapted, nn.Embedding):
    """An embedding with adapters A (r, V), B (D, r), which add s B A[:, t] to row t."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Returns the rows of the tokens plus the active adapters."""

        def change(adapter: LowRank, input_ids: Tensor, rows: Tensor) -> Tensor:
            down, up, _ = adapter.factors()
            return (F.linear(F.embedding(input_ids, down.t()), up) * adapter.config.scale).to(rows.dtype)

        return self._added(input_ids, super().forward(input_ids), change)


class LoraHead(_Adapted, OutputHead):
    """An output projection with adapters; the embedding that shares its weight, if one does, stays as it is."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the logits, with the active adapters, before a soft cap bounds them."""
        logits = self._added(hidden, F.linear(hidden, self.own_weight, self.own_bias), self._change)
        return cap(logits, self.soft_cap)

    def added(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns the bias and the active adapters as two factors."""
        pairs = [pair for pair in (super().added(hidden),) if pair is not None]
        pairs += [self._factors(each, hidden) for each in self._counting]
        if not pairs:
            return None
        lows, ups = zip(*pairs, strict=True)
        return torch.cat(lows, -1), torch.cat(ups, -1)

    def _factors(self, adapter: LowRank, hidden: Tensor) -> tuple[Tensor, Tensor]:
        dropped = F.dropout(hidden, adapter.config.dropout, self.training and adapter.config.dropout > 0)
        down, up, _ = adapter.factors()
        return F.linear(dropped.to(down.dtype), down) * adapter.config.scale, up

    def _change(self, adapter: LowRank, hidden: Tensor, logits: Tensor) -> Tensor:
        low, up = self._factors(adapter, hidden)
        return F.linear(low, up).to(logits.dtype)


AdaptedLayer = LoraLinear | LoraEmbedding | LoraHead
_KINDS: dict[type[nn.Module], type[AdaptedLayer]] = {
    nn.Linear: LoraLinear,
    nn.Embedding: LoraEmbedding,
    OutputHead: LoraHead,
}


def full(weight: Tensor) -> Tensor:
    """Returns a weight as a plain tensor without gradient, dequantised if it is stored in another format."""
    weight = weight.detach()
    return weight.rows() if isinstance(weight, StoredWeight) else weight


def row_lengths(weight_NK: Tensor) -> Tensor:
    """Returns the Euclidean length of each row (N,)."""
    return torch.linalg.vector_norm(weight_NK, dim=1)


def target_layers(model: Transformer, targets: Sequence[str]) -> dict[str, nn.Linear | nn.Embedding]:
    """Returns the layers that match the patterns, by path; raises `ConfigError` for a pattern without a match.

    Routers and experts cannot have adapters, since they are not plain linear layers. An embedding and an output
    projection that share a weight have adapters of their own, as in PEFT; they, and every output projection, match only
    their own name.
    """
    possible: dict[str, nn.Linear | nn.Embedding] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, AdaptedLayer) or type(module) in _KINDS
    }
    by_name = _OF_VOCABULARY if model.config.tie_weights else ("lm_head",)
    chosen: set[str] = set()
    for pattern in targets:
        meant = [
            name
            for name in possible
            if name == pattern
            or (name not in by_name and (fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")))
        ]
        if not meant:
            shown = ", ".join(sorted({name.rpartition(".")[2] for name in possible}))
            raise ConfigError(f"No layer of the model matches {pattern!r}. Layers that can have an adapter: {shown}.")
        chosen.update(meant)
    return {name: layer for name, layer in possible.items() if name in chosen}


def add_lora(model: Transformer, config: LoraConfig, *, name: str = "default", seed: int = 0) -> None:
    """Adds an adapter to the target layers of `config`, in place, and makes it the only active one.

    Its weights are in float32 and trainable; all other weights of the network are frozen. Raises `ConfigError` like
    `target_layers`, for a `name` that is taken, and for DoRA on an embedding or the output projection.
    """
    if name in adapters(model):
        raise ConfigError(f"The model already has an adapter called {name!r}. Choose another name.")
    layers = target_layers(model, config.targets)
    of_vocabulary = [path for path, layer in layers.items() if isinstance(layer, nn.Embedding | OutputHead)]
    if config.dora and of_vocabulary:
        why = "not linear" if of_vocabulary[0] == "embedding" else "computed in parts"
        raise ConfigError(f"DoRA adapts linear layers, and {of_vocabulary[0]} is {why}. Remove it from the targets.")
    model.requires_grad_(False)
    for path, layer in layers.items():
        draws = torch.Generator().manual_seed(derive_seed(seed, "lora", path))
        rows, length = full(layer.weight).shape
        if isinstance(layer, nn.Embedding):
            down, up = torch.zeros(config.rank, rows), torch.randn(length, config.rank, generator=draws)
        else:
            bound = 1 / math.sqrt(length)
            down = torch.empty(config.rank, length).uniform_(-bound, bound, generator=draws)
            up = torch.zeros(rows, config.rank)
        magnitude = row_lengths(full(layer.weight).float()) if config.dora else None
        device = layer.weight.device
        put(model, path, name, LowRank(config, down.to(device), up.to(device), magnitude))
    activate(model, name)


@dataclass(frozen=True)
class Adapting:
    """Adds an adapter of these settings to a network; equal settings make equal objects."""

    config: LoraConfig

    def __call__(self, model: Transformer) -> None:
        """Adds the adapter to `model`, as `add_lora` does."""
        add_lora(model, self.config)


def put(model: Transformer, path: str, name: str, change: LowRank) -> None:
    """Adds one adapter to the layer at `path`, on its device."""
    layer = adaptable(model, path)
    is_there = change.down.device == layer.weight.device  # and may be of fake tensors, which modules cannot move
    layer.changes[name] = change if is_there else change.to(layer.weight.device)


def adaptable(model: Transformer, path: str) -> AdaptedLayer:
    """Returns the layer at `path`, which becomes one that can hold adapters."""
    layer = model.get_submodule(path)
    if not isinstance(layer, AdaptedLayer):
        layer = _KINDS[type(layer)](layer)
        model.set_submodule(path, layer)
    return layer


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLayer]:
    """Returns the layers that can hold adapters, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, AdaptedLayer)}


def adapters(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the network's adapters."""
    return tuple(dict.fromkeys(name for layer in adapted_layers(model).values() for name in layer.changes))


def activate(model: Transformer, *names: str) -> None:
    """Makes exactly these adapters active (their sum) and trainable; raises `ConfigError` for an unknown name."""
    if unknown := [name for name in names if name not in adapters(model)]:
        known = ", ".join(adapters(model)) or "none"
        raise ConfigError(f"The model has no adapter called {unknown[0]!r}; it has: {known}.")
    for layer in adapted_layers(model).values():
        layer.active = names
        for name, change in layer.changes.items():
            change.requires_grad_(name in names)


def without_changes(model: Transformer) -> Transformer:
    """Returns a copy that shares memory and has no active adapter: the original network."""
    copy = model.sharing_copy()
    for layer in adapted_layers(copy).values():
        layer.active = ()
    return copy


def can_merge(model: Transformer) -> bool:
    """Whether all adapters can be merged into their weights, which must not be quantised."""
    weights = [layer.weight for layer in adapted_layers(model).values()]
    return not any(isinstance(weight, StoredWeight) and weight.has_scales for weight in weights)


def merged(model: Transformer) -> Transformer:
    """Returns a copy with the active adapters merged into its weights; unchanged weights are shared.

    An embedding and an output projection that shared a weight each have their own if one of them is changed. Raises
    `ConfigError` if such a weight is quantised, which would round the change away.
    """
    copy = model.sharing_copy()
    for path, layer in adapted_layers(copy).items():
        weight, changes = layer.weight.detach(), list(layer._counting)
        if changes:
            if isinstance(weight, StoredWeight) and weight.has_scales:
                raise ConfigError(
                    f"The weights of {path} are stored in {weight.stored}. Merge the adapter into the model before "
                    "quantisation."
                )
            weight = _changed(weight, changes, layer)
            if path in _OF_VOCABULARY:
                copy.config = copy.config.replace(tie_weights=False)
        plain = next(kind for kind, adapted in _KINDS.items() if isinstance(layer, adapted))
        made = plain.__new__(plain)
        nn.Module.__init__(made)
        own = ("active", "of_rows", "path")
        made.__dict__.update({key: value for key, value in layer.__dict__.items() if key not in own})
        made._modules = {key: value for key, value in layer._modules.items() if key != "changes"}
        made._parameters = {**layer._parameters, "weight": nn.Parameter(weight, layer.weight.requires_grad)}
        copy.set_submodule(path, made)
    return copy


def _changed(weight: Tensor, changes: Sequence[LowRank], layer: nn.Module) -> Tensor:
    """Returns the weight plus the sum of the adapters, each computed from the original weight."""
    with torch.no_grad():
        before = weight.float()
        found = before.clone()
        for change in changes:
            difference = change.change().t() if isinstance(layer, LoraEmbedding) else change.change()
            if change.magnitude is not None:
                whole = before + difference
                difference = whole * (change.magnitude / row_lengths(whole))[:, None] - before
            found += difference
        return found.to(weight.dtype)
