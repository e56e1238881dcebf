"""Names of tensors in llama.cpp's files, and the tensors of ours that stand in each; ``{}`` is the layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

EMBEDDING_NAME = "token_embd.weight"
OUTPUT_NAME = "output.weight"
POSITIONS_NAME = "position_embd.weight"


class Role(Enum):
    """What a tensor is: a matrix in the type that the file is of; numbers in single precision; a norm's scale, too."""

    MATRIX = "matrix"
    PRECISE = "precise"
    SCALE = "scale"


@dataclass(frozen=True)
class Row:
    """One tensor of theirs. Several of ours stand in it one behind the other, along the first dimension.

    `interleaved` rows of a query or key are in the order of llama.cpp's pairs of neighbouring columns. A row with
    `zeros` is there in every file: zeros stand for a bias that the model lacks. An output projection that is there
    `always` is the embedding once more where the two are tied. A `scaled` embedding has the model's factor in it.
    """

    theirs: str
    ours: tuple[str, ...]
    role: Role = Role.MATRIX
    interleaved: bool = False
    zeros: bool = False
    always: bool = False
    scaled: bool = False


def linear(theirs: str, *ours: str, interleaved: bool = False, zeros: bool = False) -> tuple[Row, Row]:
    """The weight and the bias of a linear layer of every block, or of several that are stacked."""
    block = tuple(f"blocks.{{}}.{name}" for name in ours)
    weight = Row(f"blk.{{}}.{theirs}.weight", tuple(f"{name}.weight" for name in block), interleaved=interleaved)
    bias = replace(
        weight,
        theirs=f"blk.{{}}.{theirs}.bias",
        ours=tuple(f"{name}.bias" for name in block),
        role=Role.PRECISE,
        zeros=zeros,
    )
    return weight, bias


def norm(theirs: str, ours: str, *, zeros: bool = False) -> tuple[Row, Row]:
    """The scale and the bias of a norm."""
    return Row(f"{theirs}.weight", (f"{ours}.weight",), Role.SCALE), Row(
        f"{theirs}.bias", (f"{ours}.bias",), Role.PRECISE, zeros=zeros
    )


EMBEDDING_AS_IT_IS = (Row(EMBEDDING_NAME, ("embedding.weight",)),)
EMBEDDING = (Row(EMBEDDING_NAME, ("embedding.weight",), scaled=True),)
POSITIONS = (Row(POSITIONS_NAME, ("added_positions.table",), Role.PRECISE),)
OUTPUT = (Row(OUTPUT_NAME, ("lm_head.weight",)),)
OUTPUT_ALWAYS = (Row(OUTPUT_NAME, ("lm_head.weight",), always=True),)


def first_and_last_norms(*, zeros: bool = False) -> tuple[Row, ...]:
    """The norms behind the embedding and before the output projection."""
    return norm("token_embd_norm", "embedding_norm", zeros=zeros) + norm("output_norm", "final_norm", zeros=zeros)


def norms_before(*, zeros: bool = False) -> tuple[Row, ...]:
    """The norms before the sublayers."""
    return norm("blk.{}.attn_norm", "blocks.{}.attention_norm", zeros=zeros) + norm(
        "blk.{}.ffn_norm", "blocks.{}.feed_forward_norm", zeros=zeros
    )


NORMS_BEHIND = norm("blk.{}.post_attention_norm", "blocks.{}.attention_output_norm") + norm(
    "blk.{}.post_ffw_norm", "blocks.{}.feed_forward_output_norm"
)
QUERY_KEY_NORMS = norm("blk.{}.attn_q_norm", "blocks.{}.attention.q_norm") + norm(
    "blk.{}.attn_k_norm", "blocks.{}.attention.k_norm"
)


def separate_attention(*, interleaved: bool = False) -> tuple[Row, ...]:
    """Queries, keys and values apart."""
    return (
        *linear("attn_q", "attention.q_proj", interleaved=interleaved),
        *linear("attn_k", "attention.k_proj", interleaved=interleaved),
        *linear("attn_v", "attention.v_proj"),
        *linear("attn_output", "attention.o_proj"),
    )


def stacked_attention(*, zeros: bool = False) -> tuple[Row, ...]:
    """Queries, keys and values in one matrix."""
    return (
        *linear("attn_qkv", "attention.q_proj", "attention.k_proj", "attention.v_proj", zeros=zeros),
        *linear("attn_output", "attention.o_proj", zeros=zeros),
    )


def plain_feed_forward(*, zeros: bool = False) -> tuple[Row, ...]:
    """The up and down projections of a network without a gate."""
    return linear("ffn_up", "feed_forward.up_proj", zeros=zeros) + linear(
        "ffn_down", "feed_forward.down_proj", zeros=zeros
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
EXPERTS = (
    Row("blk.{}.ffn_gate_inp.weight", ("blocks.{}.feed_forward.router.weight",), Role.PRECISE),
    *(
        Row(f"blk.{{}}.ffn_{name}_exps.weight", (f"blocks.{{}}.feed_forward.experts.{name}_proj",))
        for name in ("gate", "up", "down")
    ),
)
