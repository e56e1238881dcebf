"""The architectures of llama.cpp that SheepOp writes and reads, one table each, the most particular first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sheepop.checkpoint.gguf.architectures.aspects import Aspect, Biases, Fixed, Keyed, Norm, SoftCap, WithoutInfluence
from sheepop.checkpoint.gguf.architectures.embeddings import (
    AddedPositions,
    EmbeddingInScale,
    EmbeddingScale,
    TiedWeights,
)
from sheepop.checkpoint.gguf.architectures.heads import Heads, ScoreScale
from sheepop.checkpoint.gguf.architectures.mixtures import Experts, NoExperts
from sheepop.checkpoint.gguf.architectures.rotary import Rotary
from sheepop.checkpoint.gguf.architectures.rows import (
    EMBEDDING,
    EMBEDDING_AS_IT_IS,
    EXPERTS,
    GATED_FEED_FORWARD,
    NORMS_BEHIND,
    OUTPUT,
    OUTPUT_ALWAYS,
    POSITIONS,
    QUERY_KEY_NORMS,
    STACKED_FEED_FORWARD,
    Row,
    first_and_last_norms,
    norms_before,
    plain_feed_forward,
    separate_attention,
    stacked_attention,
)
from sheepop.checkpoint.gguf.architectures.windows import NoWindow, Windows
from sheepop.model.config import ModelConfig


@dataclass(frozen=True)
class Architecture:
    """A name that llama.cpp knows, what it computes under that name, and its tensors."""

    name: str
    aspects: tuple[Aspect, ...]
    rows: tuple[Row, ...]

    def refusals(self, config: ModelConfig) -> Iterator[str]:
        """Why llama.cpp would compute something else under this name than `config` says."""
        for aspect in self.aspects:
            yield from aspect.refusals(config)


_SIZES: tuple[Aspect, ...] = (
    # How the network was initialised and trained and by what it is computed; the rows of the embedding show its size.
    WithoutInfluence(("preset", "vocab_size", "bias", "dropout", "initialization", "initial_std", "attention_backend")),
    Fixed("architecture", ("decoder",)),
    Fixed("num_encoder_layers", (None,)),
    Keyed("num_layers", "block_count", most=512),
    Keyed("max_seq_len", "context_length"),
    Keyed("d_model", "embedding_length"),
)
_NO_CAPS: tuple[Aspect, ...] = (Fixed("attention_soft_cap", (None,)), Fixed("logit_soft_cap", (None,)))
_USUAL: tuple[Aspect, ...] = (Fixed("final_norm", (True,)), Fixed("attention_sinks", (False,)))
_LAYER_NORM = Norm(("layernorm",), "attention.layer_norm_epsilon")
_RMS_KEY = "attention.layer_norm_rms_epsilon"
_RMS_NORM = Norm(("rmsnorm", "rmsnorm_zero_centered"), _RMS_KEY)
_GEMMA_NORM = Norm(("rmsnorm_zero_centered", "rmsnorm"), _RMS_KEY)
_WITH_BIASES: tuple[Aspect, ...] = tuple(
    Biases(name, "always") for name in ("attention_bias", "attention_output_bias", "feed_forward_bias", "norm_bias")
)
_QUERY_BIAS = Biases("attention_bias", "optional", "blk.0.attn_q.bias")
_WITHOUT_FURTHER_BIASES: tuple[Aspect, ...] = tuple(
    Biases(name, "never") for name in ("attention_output_bias", "feed_forward_bias", "norm_bias")
)


def _heads(*, square: bool = False, odd_layers: int | None = None) -> tuple[Aspect, ...]:
    """The heads, and what their scores are multiplied by."""
    return Heads(square), ScoreScale(odd_layers)


def _shape(
    norm_position: str,
    activations: tuple[str, ...],
    *,
    qk_norm: str | None = None,
    embedding_norm: bool = False,
    parallel: Aspect = Fixed("parallel_residual", (False,)),
) -> tuple[Aspect, ...]:
    """Where norms stand, and what the feed-forward network computes."""
    return (
        Fixed("norm_position", (norm_position,)),
        Fixed("activation", activations),
        Fixed("qk_norm", (qk_norm,)),
        Fixed("embedding_norm", (embedding_norm,)),
        parallel,
    )


_NO_ANGLES: tuple[Aspect, ...] = (Fixed("rotary_fraction", (1.0,)), Fixed("rotary_scaling", (None,)))
# llama.cpp computes every GELU from a table of its tanh form in half precision, whatever the model was made with.
_GELU = ("gelu_tanh", "gelu")

# LayerNorm and biases throughout, queries, keys and values in one matrix.
_BIASED: tuple[Aspect, ...] = (
    *_SIZES, NoExperts(), *_heads(square=True), EmbeddingInScale(), _LAYER_NORM, *_WITH_BIASES, *_USUAL,
    *_NO_CAPS, NoWindow(),
)  # fmt: skip
_BIASED_ROWS = (
    *EMBEDDING, *first_and_last_norms(zeros=True), *norms_before(zeros=True), *stacked_attention(zeros=True),
    *plain_feed_forward(zeros=True),
)  # fmt: skip
# RMSNorm before the sublayers, SwiGLU.
_GATED: tuple[Aspect, ...] = (*_SIZES, EmbeddingInScale(), _RMS_NORM, *_USUAL, *_NO_CAPS)
_GATED_ROWS = (*EMBEDDING, *first_and_last_norms(), *norms_before(), *OUTPUT)
# Norms on both sides, scaled embeddings, GeGLU.
_GEMMA: tuple[Aspect, ...] = (
    *_SIZES, NoExperts(), EmbeddingScale(math.sqrt), _GEMMA_NORM, *_USUAL, _QUERY_BIAS,
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
        (*_BIASED, *_NO_ANGLES, AddedPositions(), *_shape("pre", _GELU), TiedWeights("optional")),
        (*_BIASED_ROWS, *POSITIONS, *OUTPUT),
    ),
    # Le Scao et al. 2022.
    Architecture(
        "bloom",
        (
            *_BIASED,
            *_NO_ANGLES,
            Fixed("position_encoding", ("alibi",)),
            WithoutInfluence(("position_base",)),
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
            *_shape("pre", _GELU[::-1], parallel=Keyed("parallel_residual", "use_parallel_residual", "truth")),
        ),
        (*_BIASED_ROWS, *OUTPUT_ALWAYS),
    ),
    # Gemma team 2024. The models of 46 and of 62 layers have a scale of their own.
    Architecture(
        "gemma2",
        (
            *_GEMMA,
            *_heads(odd_layers=46),
            Rotary(partial=True),
            *_shape("sandwich", ("geglu_tanh",)),
            TiedWeights("never"),
            Windows(period=2, own_base="scaled", otherwise=4096),
            SoftCap("attention_soft_cap", "attn_logit_softcapping", 50.0),
            SoftCap("logit_soft_cap", "final_logit_softcapping", 30.0),
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
            Fixed("attention_soft_cap", (None,)),
            SoftCap("logit_soft_cap", "final_logit_softcapping"),
        ),
        (*_GEMMA_ROWS, *OUTPUT),
    ),
    # OLMo team 2024: norms behind the sublayers only.
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
        (
            *_GATED,
            Experts(required=True, own_width=True),
            *_heads(),
            *_shape("pre", ("swiglu",), qk_norm="head"),
            _QUERY_BIAS,
            *_WITHOUT_FURTHER_BIASES,
            Rotary(),
            NoWindow(),
            TiedWeights("optional"),
        ),
        (*_GATED_ROWS, *separate_attention(), *QUERY_KEY_NORMS, *EXPERTS),
    ),
    Architecture(
        "qwen3",
        (
            *_GATED,
            NoExperts(),
            *_heads(),
            *_shape("pre", ("swiglu",), qk_norm="head"),
            _QUERY_BIAS,
            *_WITHOUT_FURTHER_BIASES,
            Rotary(),
            NoWindow(),
            TiedWeights("optional"),
        ),
        (*_GATED_ROWS, *separate_attention(), *QUERY_KEY_NORMS, *GATED_FEED_FORWARD),
    ),
    Architecture(
        "qwen2",
        (
            *_GATED,
            NoExperts(),
            *_heads(square=True),
            *_shape("pre", ("swiglu",)),
            Fixed("attention_bias", (True,)),
            *_WITHOUT_FURTHER_BIASES,
            Rotary(),
            NoWindow(),
            TiedWeights("optional"),
        ),
        (*_GATED_ROWS, *separate_attention(), *GATED_FEED_FORWARD),
    ),
    # Touvron et al. 2023 and its many descendants.
    Architecture(
        "llama",
        (
            *_GATED,
            Experts(required=False, own_width=False),
            *_heads(),
            *_shape("pre", ("swiglu",)),
            _QUERY_BIAS,
            Biases("attention_output_bias", "optional", "blk.0.attn_output.bias"),
            Biases("feed_forward_bias", "optional", "blk.0.ffn_up.bias"),
            Biases("norm_bias", "never"),
            Rotary(divisors=True),
            NoWindow(),
            TiedWeights("optional"),
        ),
        (*_GATED_ROWS, *separate_attention(interleaved=True), *GATED_FEED_FORWARD, *EXPERTS),
    ),
    # Abdin et al. 2024.
    Architecture(
        "phi3",
        (
            *_GATED,
            NoExperts(),
            *_heads(square=True),
            *_shape("pre", ("swiglu",)),
            Biases("attention_bias", "optional", "blk.0.attn_qkv.bias"),
            *_WITHOUT_FURTHER_BIASES,
            Rotary(partial=True),
            NoWindow(),
            TiedWeights("optional"),
        ),
        (*_GATED_ROWS, *stacked_attention(), *STACKED_FEED_FORWARD),
    ),
)
ARCHITECTURES = {architecture.name: architecture for architecture in _TABLES}
