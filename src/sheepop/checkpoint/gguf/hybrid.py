"""Architectures of llama.cpp with latent attention, with layers without attention, or with routed and shared experts.

DeepSeek 2 and 3, GLM-4.5, LFM 2, OLMoE, Qwen 2 MoE, Qwen3-Next and Qwen 3.5. `ARCHITECTURES` has these and all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sheepop.checkpoint.exchange.tensor_rules import BY_KEY_HEAD, INTERLEAVED, RotaryLast, Stacked, Taps
from sheepop.checkpoint.gguf.architectures import ARCHITECTURES as OTHERS
from sheepop.checkpoint.gguf.architectures import LLAMA, architecture, like
from sheepop.checkpoint.gguf.fields import Biases, Experts, Heads, TiedWeights
from sheepop.checkpoint.gguf.gemma4 import GEMMA4
from sheepop.checkpoint.gguf.hybrid_fields import (
    SIGMOID,
    SOFTMAX,
    DeltaNet,
    HeadsBesideConvolutions,
    LatentRotary,
    Latents,
    OptionalHeadNorms,
    PositionSections,
    RoutedExperts,
)
from sheepop.checkpoint.gguf.rotary import Rotary
from sheepop.checkpoint.gguf.rows import (
    EMBEDDING,
    EXPERTS,
    GATED_FEED_FORWARD,
    OUTPUT,
    OUTPUT_ALWAYS,
    QUERY_KEY_NORMS,
    Role,
    Row,
    linear,
    norm,
    norms_before,
    separate_attention,
)
from sheepop.checkpoint.lazy_tensor import Shape
from sheepop.checkpoint.mapping import implied
from sheepop.model.config import ModelConfig


def _groups(config: ModelConfig) -> tuple[int, int]:
    """Returns how many key heads, and how many value heads for each of them, the delta rule has."""
    section = config.gated_delta_net
    assert section is not None
    return section.num_key_heads, section.num_value_heads // section.num_key_heads


def _turned(rows: Tensor, first: int, second: int) -> Tensor:
    """Returns rows of `first` times `second` heads with the second index in front."""
    return rows.reshape(first, second, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


@dataclass(frozen=True)
class TiledHeads(Stacked):
    """Rows, the last of them of value heads; theirs has the first value heads of all key heads, then the second."""

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Reorders the last of our tensors."""
        return super().to_theirs([*ours[:-1], _turned(ours[-1], *_groups(config))], config)

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Restores the order of the last of our tensors."""
        *parts, last = super().to_ours(theirs, shapes, config)
        return [*parts, _turned(last, *_groups(config)[::-1])]


class TiledColumns:
    """The columns of a matrix that reads value heads in the order of `TiledHeads`."""

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Reorders the columns."""
        return [_turned(ours[0].t(), *_groups(config)).t()]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Restores the order of the columns."""
        return [_turned(theirs[0].t(), *_groups(config)[::-1]).t()]


@dataclass(frozen=True)
class FlatTaps(Taps):
    """Taps as kernels (channels, W); `tiled` if the last channels are those of value heads in tiled order."""

    tiled: bool = False

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Joins the channels, and reverses the taps."""
        last = _turned(ours[-1].t(), *_groups(config)).t() if self.tiled else ours[-1]
        return [super().to_theirs([*ours[:-1], last], config)[0][:, 0]]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Separates the channels."""
        *parts, last = super().to_ours([theirs[0][:, None]], shapes, config)
        return [*parts, _turned(last.t(), *_groups(config)[::-1]).t() if self.tiled else last]


@dataclass(frozen=True)
class Decay(TiledHeads):
    """The logarithm a of a decay, in theirs ``-exp(a)``; `tiled` as in `FlatTaps`."""

    tiled: bool = False

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Returns the negative exponential."""
        found = [-ours[0].float().exp()]
        return super().to_theirs(found, config) if self.tiled else found

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Returns the logarithm."""
        found = [(-theirs[0]).log()]
        return super().to_ours(found, shapes, config) if self.tiled else found


class ByHead(Stacked):
    """The rows of all heads as (H, rows, columns)."""

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Separates the heads."""
        return [ours[0].reshape(config.num_heads, -1, *ours[0].shape[1:])]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Joins the heads."""
        return [theirs[0].flatten(0, 1)]


class ByHeadTurned:
    """The rows of all heads as (H, columns, rows)."""

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Separates the heads."""
        return [ours[0].reshape(config.num_heads, -1, *ours[0].shape[1:]).transpose(1, 2)]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Joins the heads."""
        return [theirs[0].transpose(1, 2).flatten(0, 1)]


class OneRow:
    """A matrix (1, D) as a vector."""

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Returns the row."""
        return [ours[0][0]]

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Returns a matrix."""
        return [theirs[0].reshape(shapes[0])]


_MIXER = "blocks.{}.mixer"
_FINAL_NORM = norm("output_norm", "final_norm")
_SHARED = tuple(
    row for name in ("gate", "up", "down") for row in linear(f"ffn_{name}_shexp", f"feed_forward.shared.{name}_proj")
)
_BALANCE = (
    Row("blk.{}.exp_probs_b.bias", ("blocks.{}.feed_forward.router.balance",), Role.PRECISE, optional=True),
)  # fmt: skip
_ALWAYS_BALANCED = tuple(replace(row, optional=False) for row in _BALANCE)
_CONVOLUTIONS = (
    Row(
        "blk.{}.shortconv.conv.weight", (f"{_MIXER}.convolution.taps",), Role.PRECISE, layout=FlatTaps(),
    ),
    *linear("shortconv.in_proj", "mixer.in_proj"),
    *linear("shortconv.out_proj", "mixer.o_proj"),
)  # fmt: skip
_LFM2 = like(LLAMA, *implied(qk_norm="head"), HeadsBesideConvolutions(square=True))
_LFM2_ROWS = (
    *EMBEDDING, *norm("token_embd_norm", "final_norm"), *norms_before(), *separate_attention(), *QUERY_KEY_NORMS,
    *_CONVOLUTIONS, *GATED_FEED_FORWARD, *OUTPUT,
)  # fmt: skip


def _delta_net(*, tiled: bool) -> tuple[Row, ...]:
    names = {name: f"{_MIXER}.{name}_proj.weight" for name in ("q", "k", "v", "gate", "beta", "decay", "o")}
    rows = TiledHeads() if tiled else None
    both = (
        Row("blk.{}.ssm_beta.weight", (names["beta"],), layout=rows),
        Row("blk.{}.ssm_alpha.weight", (names["decay"],), layout=rows),
    )  # fmt: skip
    return (
        Row("blk.{}.attn_qkv.weight", tuple(names[name] for name in "qkv"), layout=rows),
        Row("blk.{}.attn_gate.weight", (names["gate"],), layout=rows),
        *(both if tiled else (Row("blk.{}.ssm_ba.weight", (names["beta"], names["decay"]), layout=BY_KEY_HEAD),)),
        Row(
            "blk.{}.ssm_conv1d.weight", tuple(f"{_MIXER}.convolutions.{name}.taps" for name in "qkv"), Role.PRECISE,
            layout=FlatTaps(tiled=tiled),
        ),
        Row("blk.{}.ssm_dt.bias", (f"{_MIXER}.decay_bias",), Role.PRECISE, layout=rows),
        Row("blk.{}.ssm_a", (f"{_MIXER}.decay",), Role.PRECISE, layout=Decay(tiled=tiled)),
        Row("blk.{}.ssm_norm.weight", (f"{_MIXER}.norm.weight",), Role.PRECISE),
        Row("blk.{}.ssm_out.weight", (names["o"],), layout=TiledColumns() if tiled else None),
    )  # fmt: skip


_QWEN = like(
    LLAMA, *implied(qk_norm="head", attention_output_gate=True), Biases("attention_bias", "never"),
    Rotary(partial=True), DeltaNet(),
)  # fmt: skip
_QUERIES = tuple(f"blocks.{{}}.attention.{name}_proj.weight" for name in ("q", "gate"))
_QWEN_ROWS = (
    *EMBEDDING, *_FINAL_NORM, *norms_before("post_attention_norm"),
    Row("blk.{}.attn_q.weight", _QUERIES, layout=INTERLEAVED), *separate_attention()[2:], *QUERY_KEY_NORMS, *OUTPUT,
)  # fmt: skip
_GATED_EXPERTS = RoutedExperts((SOFTMAX,), shared="gated")
_GATED_EXPERT_ROWS = (
    *EXPERTS, *_SHARED,
    Row(
        "blk.{}.ffn_gate_inp_shexp.weight", ("blocks.{}.feed_forward.shared_gate",), Role.PRECISE, layout=OneRow(),
    ),
)  # fmt: skip
_LATENT = "blocks.{}.attention"
_HAS_QUERY_LATENT = f"{_LATENT}.q_latent_proj.weight"
_LATENT_ROWS = (
    *linear("attn_q_a", "attention.q_latent_proj"),
    *norm("blk.{}.attn_q_a_norm", f"{_LATENT}.q_latent_norm"),
    Row("blk.{}.attn_q_b.weight", (f"{_LATENT}.q_proj.weight",), layout=RotaryLast(), beside=_HAS_QUERY_LATENT),
    Row("blk.{}.attn_q.weight", (f"{_LATENT}.q_proj.weight",), layout=RotaryLast(), unless=_HAS_QUERY_LATENT),
    Row("blk.{}.attn_kv_a_mqa.weight", (f"{_LATENT}.kv_latent_proj.weight",), layout=RotaryLast(one_head=True)),
    *norm("blk.{}.attn_kv_a_norm", f"{_LATENT}.kv_latent_norm"),
    Row("blk.{}.attn_k_b.weight", (f"{_LATENT}.k_proj.weight",), layout=ByHeadTurned()),
    Row("blk.{}.attn_v_b.weight", (f"{_LATENT}.v_proj.weight",), layout=ByHead()),
    *linear("attn_output", "attention.o_proj"),
)

_TABLES = (
    architecture("lfm2", _LFM2, _LFM2_ROWS),
    architecture(
        "lfm2moe", _LFM2, (*_LFM2_ROWS, *EXPERTS, *_ALWAYS_BALANCED),
        RoutedExperts((SIGMOID,), leading=True),
    ),
    # Muennighoff et al. 2024.
    architecture(
        "olmoe", LLAMA,
        (*EMBEDDING, *_FINAL_NORM, *norms_before(), *separate_attention(), *QUERY_KEY_NORMS, *EXPERTS, *OUTPUT_ALWAYS),
        *implied(qk_norm="width"), Heads(square=True, grouped=False), Biases("attention_bias", "never"),
        TiedWeights("always"), Experts(required=True, own_width=False, normalizes=False),
    ),
    # Qwen team 2024.
    architecture(
        "qwen2moe", LLAMA,
        (*EMBEDDING, *_FINAL_NORM, *norms_before(), *separate_attention(), *_GATED_EXPERT_ROWS, *OUTPUT_ALWAYS),
        Heads(square=True), TiedWeights("always"), replace(_GATED_EXPERTS, normalizes=False),
    ),
    # GLM-4.5 team 2025.
    architecture(
        "glm4moe", LLAMA,
        (*EMBEDDING, *_FINAL_NORM, *norms_before("post_attention_norm"), *separate_attention(), *QUERY_KEY_NORMS,
         *GATED_FEED_FORWARD, *EXPERTS, *_SHARED, *_ALWAYS_BALANCED, *OUTPUT),
        OptionalHeadNorms(), Rotary(partial=True),
        RoutedExperts((SIGMOID, SOFTMAX), shared="counted", leading=True, choices=True),
    ),
    architecture("qwen3next", _QWEN, (*_QWEN_ROWS, *_delta_net(tiled=False), *_GATED_EXPERT_ROWS), _GATED_EXPERTS),
    architecture(
        "qwen35", _QWEN, (*_QWEN_ROWS, *_delta_net(tiled=True), *GATED_FEED_FORWARD), PositionSections(),
    ),
    architecture(
        "qwen35moe", _QWEN, (*_QWEN_ROWS, *_delta_net(tiled=True), *_GATED_EXPERT_ROWS),
        _GATED_EXPERTS, PositionSections(),
    ),
    architecture(
        "deepseek2", LLAMA,
        (*EMBEDDING, *_FINAL_NORM, *norms_before(), *_LATENT_ROWS, *GATED_FEED_FORWARD, *EXPERTS, *_SHARED, *_BALANCE,
         *OUTPUT),
        Latents(), Biases("attention_bias", "never"), LatentRotary(),
        RoutedExperts((SOFTMAX, SIGMOID), shared="counted", leading=True, choices=True),
    ),
)  # fmt: skip
ARCHITECTURES = OTHERS | {table.name: table for table in (*_TABLES, GEMMA4)}
