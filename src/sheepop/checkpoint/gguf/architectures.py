"""The architectures of llama.cpp that SheepOp writes and reads, one table each, the most specific first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sheepop.checkpoint.gguf.fields import (
    Biases,
    Experts,
    Heads,
    Layers,
    NoExperts,
    NoWindow,
    ScoreScale,
    SoftCap,
    TiedWeights,
    Windows,
)
from sheepop.checkpoint.gguf.rotary import Rotary
from sheepop.checkpoint.gguf.rows import (
    EMBEDDING,
    EMBEDDING_AS_IT_IS,
    EXPERTS,
    GATED_FEED_FORWARD,
    NORMS_BEHIND,
    OUTPUT,
    OUTPUT_ALWAYS,
    PLAIN_FEED_FORWARD,
    POSITIONS,
    QUERY_KEY_NORMS,
    STACKED_FEED_FORWARD,
    Row,
    first_and_last_norms,
    norms_before,
    separate_attention,
    stacked_attention,
)
from sheepop.checkpoint.mapping import EmbeddingRoot, Field, Implied, WithoutInfluence, implied, number, size, switch
from sheepop.model.config import ModelConfig


@dataclass(frozen=True)
class Architecture:
    """An architecture name of llama.cpp, the properties of its network, and its tensors."""

    name: str
    fields: tuple[Field, ...]
    rows: tuple[Row, ...]

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Yields the reasons why llama.cpp would compute something other than `config` under this name."""
        for field in self.fields:
            yield from field.refusals(config)


_SIZES: tuple[Field, ...] = (
    # Initialisation, training and implementation; the embedding's rows give the vocabulary size.
    WithoutInfluence(
        covers=("preset", "vocab_size", "bias", "dropout", "initialization", "initial_std", "attention_backend")
    ),
    *implied(architecture="decoder", num_encoder_layers=None),
    Layers(),
    size("context_length", "max_seq_len"),
    size("embedding_length", "d_model"),
)
_NO_CAPS = implied(attention_soft_cap=None, logit_soft_cap=None)
_USUAL = implied(
    final_norm=True, attention_sinks=False, ngrams=None, short_convolution=None, shared_norm=False, residual_scale=1.0,
    logit_scale=1.0, rotary_layers=None, head_bias=False, gated_convolution=None, gated_delta_net=None,
    attention_output_gate=False,
)  # fmt: skip
_LAYER_NORM = (Implied("norm", ("layernorm",)), number("attention.layer_norm_epsilon", "norm_eps"))
_RMS_EPSILON = number("attention.layer_norm_rms_epsilon", "norm_eps")
# Reading gives the first kind; a scale of 1 + weight is written as that sum.
_RMS_NORM = (Implied("norm", ("rmsnorm", "rmsnorm_zero_centered")), _RMS_EPSILON)
_GEMMA_NORM = (Implied("norm", ("rmsnorm_zero_centered", "rmsnorm")), _RMS_EPSILON)
_WITH_BIASES: tuple[Field, ...] = tuple(
    Biases(name, "always") for name in ("attention_bias", "attention_output_bias", "feed_forward_bias", "norm_bias")
)
_QUERY_BIAS = Biases("attention_bias", "optional", "blk.0.attn_q.bias")
_WITHOUT_FURTHER_BIASES: tuple[Field, ...] = tuple(
    Biases(name, "never") for name in ("attention_output_bias", "feed_forward_bias", "norm_bias")
)


def _heads(*, square: bool = False, odd_layers: int | None = None) -> tuple[Field, ...]:
    """Returns the fields of the heads and of the score scale."""
    return Heads(square), ScoreScale(odd_layers)


def _shape(
    norm_position: str,
    activations: tuple[str, ...],
    *,
    qk_norm: str | None = None,
    embedding_norm: bool = False,
    parallel: Field = Implied("parallel_residual", (False,)),
) -> tuple[Field, ...]:
    """Returns the fields of the norm positions and of the feed-forward network."""
    return (
        *implied(norm_position=norm_position, qk_norm=qk_norm, embedding_norm=embedding_norm),
        Implied("activation", activations),
        parallel,
    )


_NO_ANGLES = (*implied(rotary_fraction=1.0, rotary_scaling=None), WithoutInfluence(covers=("position_base",)))
# Embeddings are written with their scale applied, and the output projection separately.
_EMBEDDING_IN_SCALE = (WithoutInfluence(covers=("embedding_scale",)),)
# A position table, which is added to the embeddings. Sinusoids are written as a table, and read as learned positions.
_ADDED_POSITIONS = Implied("position_encoding", ("learned", "sinusoidal"))
# llama.cpp computes every GELU from a half-precision table of its tanh form, whichever form the model uses.
_GELU = ("gelu_tanh", "gelu")

# LayerNorm and biases throughout, queries, keys and values in one matrix.
_BIASED: tuple[Field, ...] = (
    *_SIZES, NoExperts(), *_heads(square=True), *_EMBEDDING_IN_SCALE, *_LAYER_NORM, *_WITH_BIASES, *_USUAL,
    *_NO_CAPS, NoWindow(),
)  # fmt: skip
_BIASED_ROWS = (
    *EMBEDDING, *first_and_last_norms(zeros=True), *norms_before(zeros=True), *stacked_attention(zeros=True),
    *PLAIN_FEED_FORWARD,
)  # fmt: skip
# RMSNorm before the sublayers, SwiGLU.
_GATED: tuple[Field, ...] = (*_SIZES, *_EMBEDDING_IN_SCALE, *_RMS_NORM, *_USUAL, *_NO_CAPS)


def _llama_like(
    attention_bias: Field,
    *,
    experts: Field = NoExperts(),
    square: bool = False,
    qk_norm: str | None = None,
    other_biases: tuple[Field, ...] = _WITHOUT_FURTHER_BIASES,
    rotary: Rotary = Rotary(),
) -> tuple[Field, ...]:
    """Returns the fields of Llama with the changes of a descendant."""
    return (
        *_GATED, experts, *_heads(square=square), *_shape("pre", ("swiglu",), qk_norm=qk_norm), attention_bias,
        *other_biases, rotary, NoWindow(), TiedWeights("optional"),
    )  # fmt: skip


_GATED_ROWS = (*EMBEDDING, *first_and_last_norms(), *norms_before(), *OUTPUT)
# Norms on both sides, scaled embeddings, GeGLU.
_GEMMA: tuple[Field, ...] = (
    *_SIZES, NoExperts(), EmbeddingRoot(), *_GEMMA_NORM, *_USUAL, _QUERY_BIAS,
    *_WITHOUT_FURTHER_BIASES,
)  # fmt: skip
_GEMMA_ROWS = (
    *EMBEDDING_AS_IT_IS, *first_and_last_norms(), *norms_before(), *NORMS_BEHIND, *separate_attention(),
    *QUERY_KEY_NORMS, *GATED_FEED_FORWARD,
)  # fmt: skip

_TABLES = (
    # Radford et al. 2019.
    Architecture(
        "gpt2",
        (*_BIASED, *_NO_ANGLES, _ADDED_POSITIONS, *_shape("pre", _GELU), TiedWeights("optional")),
        (*_BIASED_ROWS, *POSITIONS, *OUTPUT),
    ),
    # Le Scao et al. 2022.
    Architecture(
        "bloom",
        (
            *_BIASED,
            *_NO_ANGLES,
            *implied(position_encoding="alibi"),
            *_shape("pre", _GELU, embedding_norm=True),
            TiedWeights("optional"),
        ),
        (*_BIASED_ROWS, *OUTPUT),
    ),
    # Black et al. 2022; Pythia.
    Architecture(
        "gptneox",
        (
            *_BIASED,
            Rotary(partial=True),
            TiedWeights("always"),
            *_shape("pre", _GELU[::-1], parallel=switch("use_parallel_residual", "parallel_residual")),
        ),
        (*_BIASED_ROWS, *OUTPUT_ALWAYS),
    ),
    # Gemma team 2024. The models with 46 and with 62 layers have another score scale.
    Architecture(
        "gemma2",
        (
            *_GEMMA,
            *_heads(odd_layers=46),
            Rotary(partial=True),
            *_shape("sandwich", ("geglu_tanh",)),
            TiedWeights("never"),
            Windows(period=2, own_base="scaled", otherwise=4096),
            SoftCap("attn_logit_softcapping", "attention_soft_cap", 50.0),
            SoftCap("final_logit_softcapping", "logit_soft_cap", 30.0),
        ),
        _GEMMA_ROWS,
    ),
    Architecture(
        "gemma3",
        (
            *_GEMMA,
            *_heads(odd_layers=62),
            Rotary(partial=True),
            *_shape("sandwich", ("geglu_tanh",), qk_norm="head"),
            TiedWeights("optional"),
            Windows(period=6, own_base="unscaled"),
            *implied(attention_soft_cap=None),
            SoftCap("final_logit_softcapping", "logit_soft_cap"),
        ),
        (*_GEMMA_ROWS, *OUTPUT),
    ),
    # OLMo team 2024: norms only after the sublayers.
    Architecture(
        "olmo2",
        (
            *_GATED,
            NoExperts(),
            *_heads(square=True),
            *_shape("output", ("swiglu",), qk_norm="width"),
            _QUERY_BIAS,
            *_WITHOUT_FURTHER_BIASES,
            Rotary(),
            Windows(period=4, own_base="shared"),
            TiedWeights("always"),
        ),
        (
            *EMBEDDING,
            *first_and_last_norms(),
            *NORMS_BEHIND,
            *separate_attention(),
            *QUERY_KEY_NORMS,
            *GATED_FEED_FORWARD,
            *OUTPUT_ALWAYS,
        ),
    ),
    # Qwen team 2024 and 2025.
    Architecture(
        "qwen3moe",
        _llama_like(_QUERY_BIAS, experts=Experts(required=True, own_width=True), qk_norm="head"),
        (*_GATED_ROWS, *separate_attention(), *QUERY_KEY_NORMS, *EXPERTS),
    ),
    Architecture(
        "qwen3",
        _llama_like(_QUERY_BIAS, qk_norm="head"),
        (*_GATED_ROWS, *separate_attention(), *QUERY_KEY_NORMS, *GATED_FEED_FORWARD),
    ),
    Architecture(
        "qwen2",
        _llama_like(Implied("attention_bias", (True,)), square=True),
        (*_GATED_ROWS, *separate_attention(), *GATED_FEED_FORWARD),
    ),
    # Touvron et al. 2023 and its many descendants.
    Architecture(
        "llama",
        _llama_like(
            _QUERY_BIAS,
            experts=Experts(required=False, own_width=False),
            other_biases=(
                Biases("attention_output_bias", "optional", "blk.0.attn_output.bias"),
                Biases("feed_forward_bias", "optional", "blk.0.ffn_up.bias"),
                Biases("norm_bias", "never"),
            ),
            rotary=Rotary(divisors=True),
        ),
        (*_GATED_ROWS, *separate_attention(interleaved=True), *GATED_FEED_FORWARD, *EXPERTS),
    ),
    # Abdin et al. 2024.
    Architecture(
        "phi3",
        _llama_like(
            Biases("attention_bias", "optional", "blk.0.attn_qkv.bias"), square=True, rotary=Rotary(partial=True)
        ),
        (*_GATED_ROWS, *stacked_attention(), *STACKED_FEED_FORWARD),
    ),
)
ARCHITECTURES = {architecture.name: architecture for architecture in _TABLES}
