"""Tensor parallelism: matrices are split over ranks, which compute with parts of heads, of features and of tokens.

The first matrices of a sublayer are split by rows, so that each rank has heads or features of its own; its last one is
split by columns, and the sum over ranks is the result (Shoeybi et al. 2019, "Megatron-LM", section 3). Between
sublayers each rank has a part of the tokens, which are gathered before a sublayer and scattered behind it (Korthikanti
et al. 2022, section 4.2.2). That sends as much as one all-reduce a sublayer forwards, and one backwards. Where their
number divides the vocabulary, each rank has some of its rows in embedding and output head. To write, where there is a
token at a time, all ranks have it, and the vocabulary is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sheepop.adapt.lora import LoraEmbedding, LoraLinear
from sheepop.adapt.scalar_head import REWARD_HEAD, VALUE_HEAD, VALUE_MODEL
from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer
from sheepop.model.attention.layer import Attention
from sheepop.model.cache import Cache
from sheepop.model.experts import MixtureOfExperts
from sheepop.model.feedforward import FeedForward
from sheepop.model.logits import cap
from sheepop.model.loss import PartOfVocabulary
from sheepop.parallel.collectives import alike, entered, gathered, part, scattered, summed, whole
from sheepop.parallel.experts import keep_tokens_apart, split_features
from sheepop.parallel.parts import LayerPart, SharingRanks, give_part, here
from sheepop.parallel.vocabulary import SplitVocabulary


def check_split(config: ModelConfig, count: int, *, writes: bool = False) -> None:
    """Raises `ConfigError` for a network whose matrices cannot be split over `count` ranks, to train or to write."""
    if count == 1:
        return
    sizes = {"num_heads": config.num_heads, "num_kv_heads": config.kv_heads, "d_ff": config.ffn_size}
    if config.experts is not None and (config.experts.shared or writes):
        sizes["experts.d_ff"] = config.experts.d_ff or config.ffn_size
    for name, size in sizes.items():
        if size % count:
            raise ConfigError(
                f"Matrices cannot be split over {count} ranks, because {count} does not divide model.{name} = {size}. "
                "Use a divisor."
            )
    refused = {
        "model.qk_norm = width, which is over all heads": config.qk_norm == "width",
        "an encoder": config.architecture != "decoder",
    }
    for name in (name for name, is_so in refused.items() if is_so):
        raise ConfigError(f"Matrices are split over ranks for a decoder, and not for one with {name}.")


def split(model: Transformer, ranks: SharingRanks) -> None:
    """Gives the layers of `model`, or of a stage of one, this rank's parts, in place."""
    for block in model.layers:
        _split_attention(block.attention, ranks)
        if isinstance(block.feed_forward, MixtureOfExperts):
            _split_mixture(block.feed_forward, ranks)
        else:
            _split_feed_forward(block.feed_forward, ranks)
    if model.slopes is not None:
        model.slopes = model.slopes.chunk(ranks.size)[ranks.rank]
    if ranks.mesh is not None:
        _split_tokens(model, ranks)
    if (values := getattr(model, VALUE_MODEL, None)) is not None:
        split(values, ranks)


def divides_vocabulary(config: ModelConfig, count: int) -> bool:
    """Whether `count` ranks have as many rows of the vocabulary each; else all have all of it."""
    return config.vocabulary % count == 0


def _split_tokens(model: Transformer, ranks: SharingRanks) -> None:
    """Parts of tokens between sublayers, and of the vocabulary before and behind them."""
    norms = [module for block in model.layers for module in block.children() if module not in _sublayers(block)]
    for layer in (*norms, model.final_norm, model.embedding_norm, model.added_positions):
        if layer is not None and any(True for _ in layer.parameters()):
            give_part(layer, _OfParts, ranks, {})
    is_split = divides_vocabulary(model.config, ranks.size)
    tied = has_embedding(model) and has_head(model) and model.lm_head.weight is model.embedding.weight
    if has_embedding(model):
        give_part(model.embedding, _SomeRows if is_split else _AllRows, ranks, {"weight": 0} if is_split else {})
        if is_split:
            _split_changes(model.embedding, ranks, _ColumnChange)
    if has_head(model) and is_split:
        give_part(model.lm_head, _SomeLogits, ranks, {} if tied else {"weight": 0})
        if tied:
            model.lm_head.weight = model.embedding.weight
        for head in (getattr(model, name, None) for name in (REWARD_HEAD, VALUE_HEAD)):
            if head is not None:
                give_part(head, _BesideLogits, ranks, {})
    give_part(model, _ByTokens, ranks, {})


def has_embedding(model: Transformer) -> bool:
    """Whether a network, or a stage of one, begins with tokens."""
    return "embedding" in model._modules and model._modules["embedding"] is not None


def has_head(model: Transformer) -> bool:
    """Whether it ends with logits."""
    return "lm_head" in model._modules and model._modules["lm_head"] is not None


def _sublayers(block: nn.Module) -> tuple[nn.Module, ...]:
    return block.attention, block.feed_forward  # type: ignore[return-value]


def split_to_write(model: Transformer, ranks: SharingRanks) -> None:
    """As `split`, for a model that is only read from then on: it is one with fewer heads, as caches see it."""
    config = model.config
    check_split(config, ranks.size, writes=True)
    if not all(type(layer) is nn.Linear for layer in model.blocks.modules() if isinstance(layer, nn.Linear)):
        raise ConfigError(
            "Weights that are quantised are not split over ranks. Use the model that they were rounded from."
        )
    split(model, ranks)
    model.config = config.replace(
        num_heads=config.num_heads // ranks.size,
        num_kv_heads=config.kv_heads // ranks.size,
        head_dim=config.head_size,
        value_head_dim=config.value_size,
        d_ff=config.ffn_size // ranks.size,
    )


def _split_attention(attention: Attention, ranks: SharingRanks) -> None:
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        _split_rows(layer, ranks)
    _split_columns(attention.o_proj, ranks)
    if attention.convolutions is not None:
        for convolution in attention.convolutions.values():
            give_part(convolution, LayerPart, ranks, {"taps": 1})
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            give_part(norm, _OfParts, ranks, {})
    if attention.sinks is not None:
        give_part(attention, LayerPart, ranks, {"sinks": 0})
    attention.register_forward_pre_hook(_Entering(ranks))


def _split_mixture(mixture: MixtureOfExperts, ranks: SharingRanks) -> None:
    """To train, experts read the tokens that are here; what all tokens pass through is split as elsewhere."""
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


def _split_changes(layer: nn.Module, ranks: SharingRanks, kind: type[_RowChange] | type[_ColumnChange]) -> None:
    """The same for what LoRA has beside the weight of a layer."""
    if isinstance(layer, LoraLinear | LoraEmbedding):
        for change in layer.changes.values():
            give_part(change, kind, ranks, kind.dimensions)


class _Rows(LayerPart):
    """A linear layer with some of its outputs."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        return _product(self, x, None if self.bias is None else here(self.bias))


class _Columns(LayerPart):
    """A linear layer with some of its inputs: the sum over ranks, and then the bias."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        group, scatters = self.ranks.group, self.ranks.mesh is not None
        partial = _product(self, x, None)
        found = scattered(partial, group) if scatters else summed(partial, group)
        if self.bias is None:
            return found
        bias = here(self.bias)
        return found + (entered(bias, group) if scatters else bias)


class _RowChange(LayerPart):
    """A low-rank change beside some outputs: all ranks have A, and each its rows of B."""

    dimensions: ClassVar[Mapping[str, int]] = {"up": 0, "magnitude": 0}
    down: Tensor
    up: Tensor
    magnitude: Tensor | None

    def factors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        lengths = None if self.magnitude is None else here(self.magnitude)
        return entered(here(self.down), self.ranks.group), here(self.up), lengths


class _ColumnChange(LayerPart):
    """A low-rank change beside some inputs: each rank has its columns of A, and all have B."""

    dimensions: ClassVar[Mapping[str, int]] = {"down": 1}
    down: Tensor
    up: Tensor
    magnitude: Tensor | None

    def factors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        group = self.ranks.group
        lengths = None if self.magnitude is None else entered(here(self.magnitude), group)
        return here(self.down), entered(here(self.up), group), lengths

    def lengths(self, changed_NK: Tensor) -> Tensor:
        squares = changed_NK.square().sum(1)
        dist.all_reduce(squares, group=self.ranks.group)
        return squares.sqrt()


class _OfParts(LayerPart):
    """A layer that every rank applies to its heads or tokens: its gradient is the sum over all of them."""

    def parts(self) -> dict[str, Tensor]:
        return {name: entered(each, self.ranks.group) for name, each in super().parts().items()}


class _SomeRows(LayerPart):
    """An embedding with some rows of the vocabulary, which gives this rank's tokens of what all have found."""

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = len(here(cast(Tensor, self.weight)))
        places = input_ids - self.ranks.rank * rows
        is_here = (places >= 0) & (places < rows)
        found = torch.where(is_here[..., None], super().forward(places.clamp(0, rows - 1)), 0)
        return scattered(found, self.ranks.group)


class _AllRows(LayerPart):
    """An embedding, which gives this rank's tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return part(super().forward(input_ids), self.ranks.group)


class _SomeLogits(LayerPart):
    """An output head with some rows of the vocabulary."""

    soft_cap: float | None

    @property
    def vocabulary(self) -> PartOfVocabulary:
        """What losses are made with."""
        return SplitVocabulary(self.ranks.group, self.ranks.rank, self.ranks.size, len(self.own_weight))

    @property
    def own_weight(self) -> Tensor:
        """This rank's rows (V / n, D)."""
        return here(cast(Tensor, self.weight))

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits of all rows, which every rank computes the same with."""
        logits = cap(nn.functional.linear(hidden, self.own_weight), self.soft_cap)
        return whole(logits.flatten(0, -2), self.ranks.group).view(*hidden.shape[:-1], -1)


class _BesideLogits(LayerPart):
    """A head that every rank computes alike from what it also has its part of the logits of."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(alike(hidden, self.ranks.group))


class _ByTokens(Transformer):
    """A network, or a stage of one, whose ranks have parts of the tokens between sublayers."""

    ranks: SharingRanks

    def enter(
        self, input_ids: Tensor, positions: Tensor | None, documents: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """This rank's tokens of what enters the first block."""
        if not has_embedding(self):
            return super().enter(input_ids, positions, documents, cache)
        group, num_tokens = self.ranks.group, input_ids.shape[1]
        if num_tokens % self.ranks.size:
            raise ValueError(f"rows of {num_tokens} tokens cannot be shared evenly by {self.ranks.size} ranks")
        each = num_tokens // self.ranks.size
        ngrams_BTD = None
        if self.ngrams is not None:
            ngrams_BTD = part(self.ngrams(input_ids, documents, cache), group)
        if self.added_positions is not None:
            all_1T = torch.arange(num_tokens, device=input_ids.device)[None] if positions is None else positions
            positions = all_1T[:, self.ranks.rank * each : (self.ranks.rank + 1) * each]
        return self.embed(input_ids, positions, ngrams_BTD=ngrams_BTD)

    def finish(self, x_BTD: Tensor) -> Tensor:
        """All tokens, normalised, for the head."""
        x_BTD = super().finish(x_BTD)
        if not has_head(self):
            return x_BTD
        is_split = hasattr(self.lm_head, "ranks")
        return (gathered if is_split else whole)(x_BTD, self.ranks.group)


@dataclass(frozen=True)
class _Entering:
    """Lets the first argument of a layer into what ranks compute apart."""

    ranks: SharingRanks

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        enters = entered if self.ranks.mesh is None else gathered
        return (enters(inputs[0], self.ranks.group), *inputs[1:])


def _product(layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    """Of what is here of the weight, and of the changes beside it."""
    weight = here(cast(Tensor, layer.weight))
    return layer.changed(x, weight, bias) if isinstance(layer, LoraLinear) else nn.functional.linear(x, weight, bias)
