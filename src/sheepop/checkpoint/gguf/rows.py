"""Tensor names of llama.cpp's files, and our tensors in each; ``{}`` is the layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from torch import Tensor

from sheepop.checkpoint.lazy_tensor import Shape
from sheepop.model.config import ModelConfig

EMBEDDING_NAME = "token_embd.weight"
OUTPUT_NAME = "output.weight"
LAYER_EMBEDDING_NAME = "per_layer_token_embd.weight"
POSITIONS_NAME = "position_embd.weight"


class Role(Enum):
    """A matrix in the file's type, or other numbers or a norm's scale, both in single precision."""

    MATRIX = "matrix"
    PRECISE = "precise"
    SCALE = "scale"


class Conversion(Protocol):
    """The relation between some of our tensors and one of theirs, as in `sheepop.checkpoint.exchange.tensor_rules`."""

    def to_theirs(self, ours: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Converts our tensors to theirs."""

    def to_ours(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], config: ModelConfig) -> list[Tensor]:
        """Converts theirs to our tensors with these shapes."""


@dataclass(frozen=True)
class Row:
    """One of their tensors, which concatenates several of ours along the first dimension.

    `interleaved`: the rows of a query or key are in llama.cpp's order, with rotary pairs next to each other. `zeros`:
    every file has the tensor, with zeros if the model has no such bias. `always`: every file has the output projection,
    as a copy of the embedding if the two are tied. `scaled`: the embedding is multiplied by the model's factor.
    `layout` is another relation to our tensors. `optional`: zeros if a file lacks it. `beside` and `unless` are other
    tensors of ours that must and must not exist.
    """

    theirs: str
    ours: tuple[str, ...]
    role: Role = Role.MATRIX
    interleaved: bool = False
    zeros: bool = False
    always: bool = False
    scaled: bool = False
    layout: Conversion | None = None
    optional: bool = False
    beside: str = ""
    unless: str = ""


def linear(theirs: str, *ours: str, interleaved: bool = False, zeros: bool = False) -> tuple[Row, Row]:
    """Returns rows for the weight and the bias of a linear layer in every block, or of several stacked layers."""
    block = tuple(f"blocks.{{}}.{name}" for name in ours)
    weight = Row(f"blk.{{}}.{theirs}.weight", tuple(f"{name}.weight" for name in block), interleaved=interleaved)
    biases = tuple(f"{name}.bias" for name in block)
    return weight, Row(f"blk.{{}}.{theirs}.bias", biases, Role.PRECISE, interleaved, zeros)


def norm(theirs: str, ours: str, *, zeros: bool = False) -> tuple[Row, Row]:
    """Returns rows for the scale and the bias of a norm."""
    return Row(f"{theirs}.weight", (f"{ours}.weight",), Role.SCALE), Row(
        f"{theirs}.bias", (f"{ours}.bias",), Role.PRECISE, zeros=zeros
    )


EMBEDDING_AS_IT_IS = (Row(EMBEDDING_NAME, ("embedding.weight",)),)
EMBEDDING = (Row(EMBEDDING_NAME, ("embedding.weight",), scaled=True),)
POSITIONS = (Row(POSITIONS_NAME, ("added_positions.table",), Role.PRECISE),)
OUTPUT = (Row(OUTPUT_NAME, ("lm_head.weight",)),)
OUTPUT_ALWAYS = (Row(OUTPUT_NAME, ("lm_head.weight",), always=True),)
OUTPUT_BIAS = (Row("output.bias", ("lm_head.bias",), Role.PRECISE),)


def first_and_last_norms(*, zeros: bool = False) -> tuple[Row, ...]:
    """Returns rows for the norms after the embedding and before the output projection."""
    return norm("token_embd_norm", "embedding_norm", zeros=zeros) + norm("output_norm", "final_norm", zeros=zeros)


def norms_before(second: str = "ffn_norm", *, zeros: bool = False) -> tuple[Row, ...]:
    """Returns rows for the norms before the sublayers; `second` is their name of the one before the feed-forward."""
    return norm("blk.{}.attn_norm", "blocks.{}.attention_norm", zeros=zeros) + norm(
        f"blk.{{}}.{second}", "blocks.{}.feed_forward_norm", zeros=zeros
    )


NORMS_BEHIND = norm("blk.{}.post_attention_norm", "blocks.{}.attention_output_norm") + norm(
    "blk.{}.post_ffw_norm", "blocks.{}.feed_forward_output_norm"
)
SINKS = (Row("blk.{}.attn_sinks.weight", ("blocks.{}.attention.sinks",), Role.PRECISE),)
QUERY_KEY_NORMS = norm("blk.{}.attn_q_norm", "blocks.{}.attention.q_norm") + norm(
    "blk.{}.attn_k_norm", "blocks.{}.attention.k_norm"
)


def separate_attention(*, interleaved: bool = False, zeros: bool = False) -> tuple[Row, ...]:
    """Returns rows for attention with separate queries, keys and values; `zeros` is for the bias of the output."""
    return (
        *linear("attn_q", "attention.q_proj", interleaved=interleaved),
        *linear("attn_k", "attention.k_proj", interleaved=interleaved),
        *linear("attn_v", "attention.v_proj"),
        *linear("attn_output", "attention.o_proj", zeros=zeros),
    )


def stacked_attention(*, zeros: bool = False) -> tuple[Row, ...]:
    """Returns rows for attention with queries, keys and values in one matrix."""
    return (
        *linear("attn_qkv", "attention.q_proj", "attention.k_proj", "attention.v_proj", zeros=zeros),
        *linear("attn_output", "attention.o_proj", zeros=zeros),
    )


PLAIN_FEED_FORWARD = (
    *linear("ffn_up", "feed_forward.up_proj", zeros=True),
    *linear("ffn_down", "feed_forward.down_proj", zeros=True),
)
GATED_FEED_FORWARD = (
    *linear("ffn_gate", "feed_forward.gate_proj"),
    *linear("ffn_up", "feed_forward.up_proj"),
    *linear("ffn_down", "feed_forward.down_proj"),
)
STACKED_FEED_FORWARD = (
    *linear("ffn_up", "feed_forward.gate_proj", "feed_forward.up_proj"),
    *linear("ffn_down", "feed_forward.down_proj"),
)
_PROJECTIONS = ("gate", "up", "down")
EXPERTS = (
    Row("blk.{}.ffn_gate_inp.weight", ("blocks.{}.feed_forward.router.weight",), Role.PRECISE),
    Row("blk.{}.ffn_gate_inp.bias", ("blocks.{}.feed_forward.router.bias",), Role.PRECISE),
    *(
        Row(f"blk.{{}}.ffn_{name}_exps.weight", (f"blocks.{{}}.feed_forward.experts.{name}_proj",))
        for name in _PROJECTIONS
    ),
    *(
        Row(f"blk.{{}}.ffn_{name}_exps.bias", (f"blocks.{{}}.feed_forward.experts.{name}_bias",), Role.PRECISE)
        for name in _PROJECTIONS
    ),
)
