"""LoRA: a low-rank change beside weights that stay as they are (Hu et al. 2021).

A linear layer ``W x + b`` becomes ``W x + b + s B A x`` with A (r, K), B (N, r) and s = alpha / r, or alpha / sqrt(r)
where it is rank-stabilised (Kalajdzievski 2023). B begins at 0, so the network begins as it was. W may be stored in
integers (QLoRA, Dettmers et al. 2023). With DoRA (Liu et al. 2024) the rows of W + s B A have lengths of their own,
which are learnt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.core.errors import ConfigError
from sheepop.core.random import derive_seed
from sheepop.model import Transformer


class LowRank(nn.Module):
    """One change: `down` A (r, K), `up` B (N, r), and for DoRA the lengths `magnitude` (N,)."""

    def __init__(self, config: LoraConfig, down: Tensor, up: Tensor, magnitude: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)
        self.magnitude = None if magnitude is None else nn.Parameter(magnitude)

    def factors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """A, B and the lengths, as they are computed with."""
        return self.down, self.up, self.magnitude

    def change(self) -> Tensor:
        """``s B A`` (N, K)."""
        down, up, _ = self.factors()
        return self.config.scale * (up @ down)

    def lengths(self, changed_NK: Tensor) -> Tensor:
        """Those of the rows of W + s B A (N,)."""
        return row_lengths(changed_NK)


class _Adapted(nn.Module):
    """What layers with changes have in common: changes by name, of which those that are `active` count."""

    changes: nn.ModuleDict
    active: tuple[str, ...]

    def _take(self, layer: nn.Module) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(layer.__dict__)
        # The layer that is taken over keeps its own list of modules.
        self._modules = dict(layer._modules)
        self.changes, self.active = nn.ModuleDict(), ()

    @property
    def _counting(self) -> Iterator[LowRank]:
        for name in self.active:
            if name in self.changes:
                change = self.changes[name]
                assert isinstance(change, LowRank)
                yield change


class LoraLinear(_Adapted, nn.Linear):
    """A linear layer with changes beside its weight, which is that of the layer it is made of."""

    def __init__(self, layer: nn.Linear) -> None:
        self._take(layer)

    def forward(self, x: Tensor) -> Tensor:
        """``W x + b`` and the changes that are active."""
        return self.changed(x, self.weight, self.bias)

    def changed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same with a weight and a bias that are given."""
        product = F.linear(x, weight)
        found = product
        for change in self._counting:
            dropped = F.dropout(x, change.config.dropout, self.training and change.config.dropout > 0)
            down, up, magnitude = change.factors()
            low = F.linear(F.linear(dropped.to(down.dtype), down), up) * change.config.scale
            if magnitude is None:
                found = found + low.to(product.dtype)
                continue
            # The length is a constant where gradients are taken (section 4.3), and dropout is not on what it scales.
            factor = magnitude / change.lengths((full(weight) + change.change()).detach())
            base = product if dropped is x else F.linear(dropped, weight)
            found = found + ((factor - 1) * base + factor * low).to(product.dtype)
        return found if bias is None else found + bias


class LoraEmbedding(_Adapted, nn.Embedding):
    """An embedding with changes beside its table: A (r, V), B (D, r), and row t of the change is s B A[:, t]."""

    def __init__(self, layer: nn.Embedding) -> None:
        self._take(layer)

    def forward(self, input_ids: Tensor) -> Tensor:
        """The rows of the tokens, with the changes that are active."""
        found = super().forward(input_ids)
        for change in self._counting:
            down, up, _ = change.factors()
            low = F.linear(F.embedding(input_ids, down.t()), up) * change.config.scale
            found = found + low.to(found.dtype)
        return found


def full(weight: Tensor) -> Tensor:
    """A weight without a gradient as plain numbers."""
    weight = weight.detach()
    return weight.rows() if isinstance(weight, StoredWeight) else weight


def row_lengths(weight_NK: Tensor) -> Tensor:
    """The Euclidean length of each row (N,)."""
    return torch.linalg.vector_norm(weight_NK, dim=1)


def target_layers(model: Transformer, targets: Sequence[str]) -> dict[str, nn.Linear | nn.Embedding]:
    """The layers that patterns mean, by path; raises `ConfigError` for a pattern that means none.

    The output projection, routers and experts cannot be changed: their products are not those of a layer. Nor can an
    embedding that is also the output projection.
    """
    possible: dict[str, nn.Linear | nn.Embedding] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLinear | LoraEmbedding) or type(module) in (nn.Linear, nn.Embedding)
    }
    if model.config.tie_weights:
        possible.pop("embedding", None)
    chosen: dict[str, nn.Linear | nn.Embedding] = {}
    for pattern in targets:
        meant = [name for name in possible if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")]
        if not meant:
            tied = (
                " An embedding that is also the output projection cannot be changed." if pattern == "embedding" else ""
            )
            shown = ", ".join(sorted({name.rpartition(".")[2] for name in possible}))
            raise ConfigError(
                f"No layer of the model is called {pattern!r}. Layers that can be changed: {shown}.{tied}"
            )
        chosen |= {name: possible[name] for name in meant}
    return {name: layer for name, layer in possible.items() if name in chosen}


def add_lora(model: Transformer, config: LoraConfig, *, name: str = "default", seed: int = 0) -> None:
    """Puts a change beside the layers that `config` means, in place, and makes it the only one that is active.

    Its weights are in float32 and learn; all others of the network do not any longer. Raises `ConfigError` as
    `target_layers` does, for a `name` that is taken, and for DoRA on an embedding.
    """
    if name in adapters(model):
        raise ConfigError(f"The model has an adapter called {name!r} already. Choose another name.")
    layers = target_layers(model, config.targets)
    embeddings = [path for path, layer in layers.items() if isinstance(layer, nn.Embedding)]
    if config.dora and embeddings:
        raise ConfigError(f"DoRA changes linear layers, and {embeddings[0]} is none. Leave it out of the targets.")
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
        magnitude = row_lengths(full(layer.weight).float()).cpu() if config.dora else None
        put(model, path, name, LowRank(config, down, up, magnitude).to(layer.weight.device))
    activate(model, name)


def put(model: Transformer, path: str, name: str, change: LowRank) -> None:
    """Puts one change beside the layer at `path`, which becomes one that may have changes."""
    layer = model.get_submodule(path)
    if not isinstance(layer, LoraLinear | LoraEmbedding):
        assert isinstance(layer, nn.Linear | nn.Embedding)
        layer = LoraLinear(layer) if isinstance(layer, nn.Linear) else LoraEmbedding(layer)
        model.set_submodule(path, layer)
    layer.changes[name] = change


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear | LoraEmbedding]:
    """The layers that may have changes, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoraLinear | LoraEmbedding)}


def adapters(model: nn.Module) -> tuple[str, ...]:
    """The names of the changes that a network has."""
    return tuple(dict.fromkeys(name for layer in adapted_layers(model).values() for name in layer.changes))


def activate(model: Transformer, *names: str) -> None:
    """Lets these changes count, added up, and no other; only they learn. Raises `ConfigError` for an unknown name."""
    if unknown := [name for name in names if name not in adapters(model)]:
        known = ", ".join(adapters(model)) or "none"
        raise ConfigError(f"The model has no adapter called {unknown[0]!r}; it has: {known}.")
    for layer in adapted_layers(model).values():
        layer.active = names
        for name, change in layer.changes.items():
            change.requires_grad_(name in names)


def without_changes(model: Transformer) -> Transformer:
    """A copy over the same memory in which no change counts: the network as it was before."""
    copy = model.sharing_copy()
    for layer in adapted_layers(copy).values():
        layer.active = ()
    return copy


def can_merge(model: Transformer) -> bool:
    """Whether all changes may go into the weights that they are beside: not into integers."""
    weights = [layer.weight for layer in adapted_layers(model).values()]
    return not any(isinstance(weight, StoredWeight) and weight.scales is not None for weight in weights)


def merged(model: Transformer) -> Transformer:
    """A copy of the network with the active changes in its weights and no other; what is not changed is shared.

    Raises `ConfigError` where a changed weight is stored in integers, which would round the change away.
    """
    copy = model.sharing_copy()
    for path, layer in adapted_layers(copy).items():
        weight = layer.weight.detach()
        if isinstance(weight, StoredWeight) and weight.scales is not None and list(layer._counting):
            raise ConfigError(
                f"The weights of {path} are stored in {weight.stored}. Merge the adapter into the model that they were "
                "rounded from."
            )
        if changes := list(layer._counting):
            weight = _changed(weight, changes, layer)
        plain = nn.Linear if isinstance(layer, LoraLinear) else nn.Embedding
        made = plain.__new__(plain)
        nn.Module.__init__(made)
        made.__dict__.update({key: value for key, value in layer.__dict__.items() if key != "active"})
        made._modules = {key: value for key, value in layer._modules.items() if key != "changes"}
        made._parameters = {**layer._parameters, "weight": nn.Parameter(weight, layer.weight.requires_grad)}
        copy.set_submodule(path, made)
    return copy


def _changed(weight: Tensor, changes: Sequence[LowRank], layer: nn.Module) -> Tensor:
    """The weight with changes added up, each of them one of the weight as it was."""
    with torch.no_grad():
        before = weight.float()
        found = before.clone()
        for change in changes:
            difference = change.change() if isinstance(layer, LoraLinear) else change.change().t()
            if change.magnitude is not None:
                whole = before + difference
                difference = whole * (change.magnitude / row_lengths(whole))[:, None] - before
            found += difference
        return found.to(weight.dtype)
