"""Tensor parallelism: matrices are split over ranks, so that each rank has some heads, features and tokens.

The first matrices of a sublayer are split by rows, so that each rank has heads or features of its own; its last matrix
is split by columns, and the sum over ranks is the result (Shoeybi et al. 2019, "Megatron-LM", section 3). Between
sublayers each rank has some of the tokens, which are gathered before a sublayer and scattered after it (Korthikanti et
al. 2022, section 4.2.2); that sends as much as one all-reduce per sublayer and direction. Each rank has some rows of
embedding and output head, the last one perhaps fewer than the others. In generation all ranks have all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sheepop.adapt.lora import AdaptedLayer, LoraLinear, adapted_layers
from sheepop.adapt.scalar_head import REWARD_HEAD, VALUE_HEAD, VALUE_MODEL
from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer
from sheepop.model.attention.latent import LatentAttention
from sheepop.model.attention.layer import Attention
from sheepop.model.cache import Cache
from sheepop.model.experts import MixtureOfExperts
from sheepop.model.feedforward import FeedForward
from sheepop.model.loss import PartOfVocabulary
from sheepop.model.norms import HeadNorms
from sheepop.parallel.collectives import alike, entered, gathered, part, scattered, summed, whole
from sheepop.parallel.experts import keep_tokens_apart, split_features
from sheepop.parallel.layout import check_split
from sheepop.parallel.parts import LayerPart, SharingRanks, give_part, here
from sheepop.parallel.split_vocabulary import SplitVocabulary


def split(model: Transformer, ranks: SharingRanks) -> None:
    """Cuts the layers of `model`, or of a pipeline stage, to this rank's parts, in place."""
    for block in model.layers:
        _split_attention(cast(Attention, block.attention), ranks)
        if isinstance(block.feed_forward, MixtureOfExperts):
            _split_mixture(block.feed_forward, ranks)
        else:
            _split_feed_forward(block.feed_forward, ranks)
    if model.slopes is not None:
        model.slopes = model.slopes.chunk(ranks.size)[ranks.rank]
    _split_vocabulary(model, ranks)
    if ranks.mesh is not None:
        _split_tokens(model, ranks)
    if (values := getattr(model, VALUE_MODEL, None)) is not None:
        split(values, ranks)


def _split_vocabulary(model: Transformer, ranks: SharingRanks) -> None:
    """Splits the rows of embedding and output head; a tied weight stays tied."""
    tied = has_embedding(model) and has_head(model) and model.lm_head.weight is model.embedding.weight
    if has_embedding(model):
        give_part(model.embedding, _SomeRows, ranks, {"weight": 0})
        _split_changes(model.embedding, ranks, _ColumnChange)
    if has_head(model):
        give_part(model.lm_head, _SomeLogits, ranks, {"bias": 0} if tied else {"weight": 0, "bias": 0})
        _split_changes(model.lm_head, ranks, _RowChange)
        if tied:
            model.lm_head.weight = model.embedding.weight
        for head in (getattr(model, name, None) for name in (REWARD_HEAD, VALUE_HEAD)):
            if head is not None:
                give_part(head, _BesideLogits, ranks, {})


def _split_tokens(model: Transformer, ranks: SharingRanks) -> None:
    """Splits the tokens between sublayers."""
    sublayers = {layer for block in model.layers for layer in (block.attention, block.feed_forward)}
    norms = [module for block in model.layers for module in block.children() if module not in sublayers]
    for layer in (*norms, model.final_norm, model.embedding_norm, model.added_positions):
        if layer is not None and any(True for _ in layer.parameters()):
            give_part(layer, _OfParts, ranks, {})
    give_part(model, _ByTokens, ranks, {})


def has_embedding(model: Transformer) -> bool:
    """Whether a network, or a pipeline stage, has the embedding."""
    return model._modules.get("embedding") is not None


def has_head(model: Transformer) -> bool:
    """Whether a network, or a pipeline stage, has the output head."""
    return model._modules.get("lm_head") is not None


def split_to_write(model: Transformer, ranks: SharingRanks) -> None:
    """Splits a model for generation; its config then has fewer heads, which is what its caches hold."""
    config = model.config
    check_split(config, ranks.size, writes=True)
    if not all(type(layer) is nn.Linear for layer in model.blocks.modules() if isinstance(layer, nn.Linear)):
        raise ConfigError("Quantised weights are not split over ranks. Use the model that they were quantised from.")
    if adapted_layers(model):
        raise ConfigError("A model is split over ranks with its adapters merged into it.")
    split(model, ranks)
    model.config = config_of_part(config, ranks.size)


def config_of_part(config: ModelConfig, count: int) -> ModelConfig:
    """Returns the config of a network with the heads and features of one of `count` tensor ranks."""
    return config.replace(
        num_heads=config.num_heads // count,
        num_kv_heads=config.kv_heads // count,
        head_dim=config.head_size,
        value_head_dim=config.value_size,
        d_ff=config.ffn_size // count,
    )


def _split_attention(attention: Attention, ranks: SharingRanks) -> None:
    _split_columns(attention.o_proj, ranks)
    for layer in filter(None, (attention.q_proj, attention.k_proj, attention.v_proj, attention.gate_proj)):
        _split_rows(layer, ranks)
    if attention.convolutions is not None:
        for convolution in attention.convolutions.values():
            give_part(convolution, LayerPart, ranks, {"taps": 1})
    undivided = (attention.q_norm, attention.k_norm)
    for module in attention.whole_layers if isinstance(attention, LatentAttention) else undivided:
        if module is None:
            continue
        if isinstance(module, HeadNorms):
            give_part(module, LayerPart, ranks, {"weight": 0})
        else:
            give_part(module, _OfParts, ranks, {})
            _split_changes(module, ranks, _Change)
    if attention.sinks is not None:
        give_part(attention, LayerPart, ranks, {"sinks": 0})
    attention.register_forward_pre_hook(_Entering(ranks))


def _split_mixture(mixture: MixtureOfExperts, ranks: SharingRanks) -> None:
    """Splits the shared expert as a feed-forward layer; in training the routed experts read this rank's tokens."""
    if mixture.shared is not None:
        _split_feed_forward(mixture.shared, ranks)
    if ranks.mesh is None:
        split_features(mixture.experts, ranks)
    else:
        give_part(mixture.router, _OfParts, ranks, {})
        keep_tokens_apart(mixture, ranks)


def _split_feed_forward(feed_forward: nn.Module, ranks: SharingRanks) -> None:
    assert isinstance(feed_forward, FeedForward)
    for layer in (feed_forward.gate_proj, feed_forward.up_proj):
        if layer is not None:
            _split_rows(layer, ranks)
    _split_columns(feed_forward.down_proj, ranks)
    feed_forward.register_forward_pre_hook(_Entering(ranks))


def _split_rows(layer: nn.Linear, ranks: SharingRanks) -> None:
    give_part(layer, _Rows, ranks, {"weight": 0, "bias": 0})
    _split_changes(layer, ranks, _RowChange)


def _split_columns(layer: nn.Linear, ranks: SharingRanks) -> None:
    give_part(layer, _Columns, ranks, {"weight": 1})
    _split_changes(layer, ranks, _ColumnChange)


def _split_changes(layer: nn.Module, ranks: SharingRanks, kind: type[_Change]) -> None:
    """Splits the LoRA matrices of a layer, if it has some."""
    if isinstance(layer, AdaptedLayer):
        for change in layer.changes.values():
            give_part(change, kind, ranks, kind.dimensions)


class _Rows(LayerPart):
    """A linear layer with some of its outputs."""

    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return _product(self, x, None if self.bias is None else here(self.bias))


class _Columns(LayerPart):
    """A linear layer with some of its inputs: the products are summed over ranks, then the bias is added."""

    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        found = _left(_product(self, x, None), self.ranks)
        if self.bias is None:
            return found
        bias = here(self.bias)
        return found + (bias if self.ranks.mesh is None else entered(bias, self.ranks.group))


class _Change(LayerPart):
    """LoRA matrices; a matrix without a dimension to split is on all ranks, and each computes with all of it."""

    dimensions: ClassVar[Mapping[str, int]] = {}
    down: Tensor
    up: Tensor
    magnitude: Tensor | None

    def factors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        lengths = None if self.magnitude is None else self._factor("magnitude")
        return self._factor("down"), self._factor("up"), lengths

    def _factor(self, name: str) -> Tensor:
        local = here(getattr(self, name))
        return local if name in self.dimensions else entered(local, self.ranks.group)


class _RowChange(_Change):
    """The LoRA matrices of a layer with some outputs: all ranks have A, and each has its rows of B."""

    dimensions: ClassVar[Mapping[str, int]] = {"up": 0, "magnitude": 0}


class _ColumnChange(_Change):
    """The LoRA matrices of a layer with some inputs: each rank has its columns of A, and all have B."""

    dimensions: ClassVar[Mapping[str, int]] = {"down": 1}

    def lengths(self, changed_NK: Tensor) -> Tensor:
        squares = changed_NK.square().sum(1)
        dist.all_reduce(squares, group=self.ranks.group)
        return squares.sqrt()


class _OfParts(LayerPart):
    """A layer that every rank applies to its own heads or tokens: its gradient is the sum over ranks."""

    def parts(self) -> dict[str, Tensor]:
        return {name: entered(each, self.ranks.group) for name, each in super().parts().items()}


class _SomeRows(LayerPart):
    """An embedding with some rows of the vocabulary: a token's row is the sum over ranks, of which one has it."""

    num_embeddings: int

    def forward(self, input_ids: Tensor) -> Tensor:
        own = self.ranks.own(self.num_embeddings)
        places = input_ids - own.start
        is_here = (places >= 0) & (places < len(own))
        found = torch.where(is_here[..., None], super().forward(places.clamp(0, len(own) - 1)), 0)
        return _left(found, self.ranks)


class _SomeLogits(LayerPart):
    """An output head with some rows of the vocabulary."""

    out_features: int

    @property
    def vocabulary(self) -> PartOfVocabulary:
        """How losses read these logits."""
        return SplitVocabulary(self.ranks, self.out_features)

    @property
    def own_weight(self) -> Tensor:
        """This rank's rows (V / n, D)."""
        return here(cast(Tensor, self.weight))

    @property
    def own_bias(self) -> Tensor | None:
        """This rank's numbers of the bias (V / n,)."""
        return None if self.bias is None else here(cast(Tensor, self.bias))

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns the gathered logits of the whole vocabulary, the same on every rank."""
        logits = super().forward(hidden).flatten(0, -2)
        return whole(logits, self.ranks.group, self.out_features).view(*hidden.shape[:-1], -1)


class _BesideLogits(LayerPart):
    """A head that all ranks compute alike on hidden states that they also compute their part of the logits from."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(alike(hidden, self.ranks.group))


class _ByTokens(Transformer):
    """A network, or a pipeline stage, whose ranks have parts of the tokens between sublayers."""

    ranks: SharingRanks

    def enter(
        self, input_ids: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Cache | None
    ) -> Tensor:
        if not has_embedding(self):
            return super().enter(input_ids, positions, documents, cache)
        num_tokens = input_ids.shape[1]
        columns, ngrams_BTD = self.ranks.columns(num_tokens), None
        if self.ngrams is not None:
            ngrams_BTD = part(self.ngrams(input_ids, documents, cache), self.ranks.group)
        if self.added_positions is not None:
            all_1T = torch.arange(num_tokens, device=input_ids.device)[None] if positions is None else positions
            positions = all_1T[:, columns]
        return self.embed(input_ids, positions, ngrams_BTD=ngrams_BTD)

    def finish(self, x_BTD: Tensor) -> Tensor:
        """Returns the hidden states of all tokens, normalised, for the output head."""
        x_BTD = super().finish(x_BTD)
        return gathered(x_BTD, self.ranks.group) if has_head(self) else x_BTD


@dataclass(frozen=True)
class _Entering:
    """A forward pre-hook: gives a sublayer all tokens, for its part of the heads or features."""

    ranks: SharingRanks

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        enters = entered if self.ranks.mesh is None else gathered
        return (enters(inputs[0], self.ranks.group), *inputs[1:])


def _left(partial: Tensor, ranks: SharingRanks) -> Tensor:
    """Returns the sum over ranks for what follows a layer: in training of this rank's tokens, else of all."""
    return summed(partial, ranks.group) if ranks.mesh is None else scattered(partial, ranks.group)


def _product(layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies with this rank's part of the weight, and of the LoRA matrices."""
    weight = here(cast(Tensor, layer.weight))
    return layer.changed(x, weight, bias) if isinstance(layer, LoraLinear) else nn.functional.linear(x, weight, bias)
