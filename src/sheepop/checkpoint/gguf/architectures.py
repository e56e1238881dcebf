"""The architectures of llama.cpp that SheepOp writes and reads, one table each, the most specific first."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sheepop.checkpoint.gguf.fields import (
    Biases,
    Experts,
    GivenScale,
    Heads,
    Layers,
    NoExperts,
    Pictures,
    Presence,
    ScoreScale,
    SharedNorm,
    SoftCap,
    TiedWeights,
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
    OUTPUT_BIAS,
    PLAIN_FEED_FORWARD,
    POSITIONS,
    QUERY_KEY_NORMS,
    SINKS,
    STACKED_FEED_FORWARD,
    Row,
    first_and_last_norms,
    norms_before,
    separate_attention,
    stacked_attention,
)
from sheepop.checkpoint.gguf.windows import NoWindow, RotatingLayers, RotatingWindows, Windows
from sheepop.checkpoint.mapping import (
    EmbeddingRoot,
    Field,
    Fixed,
    Implied,
    WithoutInfluence,
    implied,
    number,
    output_scale,
    size,
    switch,
)
from sheepop.model.config import ModelConfig

_APART = tuple(f"blk.{{}}.attn_{name}." for name in "qkv")
_STACKED = "blk.0.attn_qkv.weight"


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

    def of_file(self, tensors: Collection[str]) -> Architecture:
        """Returns the architecture of a file with these tensors, which may have queries, keys and values in one.

        llama.cpp reads that for any architecture; SheepOp does so if their rows keep our order (older files of Phi-2).
        """
        apart = [row for row in self.rows if row.theirs.startswith(_APART)]
        has_both = any(row.theirs == "blk.{}.attn_qkv.weight" for row in self.rows)
        if _STACKED not in tensors or not apart or has_both or any(row.interleaved for row in apart):
            return self
        rows = (*(row for row in self.rows if row not in apart), *stacked_attention()[:2])
        bias = Biases("attention_bias", "optional", "blk.0.attn_qkv.bias")
        return Architecture(self.name, like(self.fields, bias), rows)


def like(base: tuple[Field, ...], *changes: Field) -> tuple[Field, ...]:
    """Returns `base` with `changes`, each in the place of the last of the fields that cover the same settings."""
    fields = list(base)
    for change in changes:
        same = [place for place, field in enumerate(fields) if set(field.covers) & set(change.covers)]
        last = same[-1] if same else len(fields)
        fields[last : last + 1] = [change]
        fields = [field for place, field in enumerate(fields) if place == last or place not in same]
    return tuple(fields)


def _biases(presence: Presence, *names: str) -> tuple[Field, ...]:
    return tuple(Biases(name, presence) for name in names)


_RMS_EPSILON = number("attention.layer_norm_rms_epsilon", "norm_eps")
_OTHER_BIASES = ("attention_output_bias", "feed_forward_bias", "norm_bias")
# RMSNorm before the sublayers, SwiGLU, rotary positions; biases of queries, keys and values if the file has them.
LLAMA: tuple[Field, ...] = (
    # Initialisation, training and implementation; the embedding's rows give the vocabulary size.
    WithoutInfluence(
        covers=("preset", "vocab_size", "bias", "dropout", "initialization", "initial_std", "attention_backend")
    ),
    *implied(architecture="decoder", num_encoder_layers=None),
    Layers(),
    size("context_length", "max_seq_len"),
    size("embedding_length", "d_model"),
    # Embeddings are written with their scale applied, and the output projection separately.
    WithoutInfluence(covers=("embedding_scale",)),
    # Reading gives the first kind; a scale of 1 + weight is written as that sum.
    Implied("norm", ("rmsnorm", "rmsnorm_zero_centered")),
    _RMS_EPSILON,
    *implied(
        norm_position="pre", final_norm=True, qk_norm=None, embedding_norm=False, shared_norm=False,
        parallel_residual=False, activation="swiglu", attention_sinks=False, attention_soft_cap=None,
        logit_soft_cap=None, residual_scale=1.0, logit_scale=1.0, rotary_layers=None, head_bias=False, ngrams=None,
        short_convolution=None, latent_attention=None, gated_convolution=None, gated_delta_net=None,
        attention_output_gate=False, layer_inputs=None, layer_factor=False, layer_d_ff=None, sliding_head_dim=None,
        sliding_num_kv_heads=None, shared_kv_layers=0, keys_as_values=None, value_norm=False,
    ),
    NoExperts(),
    Heads(),
    ScoreScale(),
    Biases("attention_bias", "optional", "blk.0.attn_q.bias"),
    *_biases("never", *_OTHER_BIASES),
    Rotary(),
    NoWindow(),
    TiedWeights("optional"),
)  # fmt: skip
_LLAMA_ROWS = (*EMBEDDING, *first_and_last_norms(), *norms_before(), *OUTPUT)
# Llama with the biases and scalings that llama.cpp reads for some of its descendants too.
_LLAMA_WITH_BIASES = like(
    LLAMA,
    Biases("attention_output_bias", "optional", "blk.0.attn_output.bias"),
    Biases("feed_forward_bias", "optional", "blk.0.ffn_up.bias"),
    Rotary(divisors=True),
)
_LLAMA_OR_MIXTRAL = Experts(required=False, own_width=False)
_INTERLEAVED_ROWS = (*separate_attention(interleaved=True), *GATED_FEED_FORWARD)
_SEPARATE_LLAMA_ROWS = (*_LLAMA_ROWS, *separate_attention(), *GATED_FEED_FORWARD)
_QWEN3 = like(LLAMA, *implied(qk_norm="head"))
_QWEN3_ROWS = (*_LLAMA_ROWS, *separate_attention(), *QUERY_KEY_NORMS)
_WIDE_EXPERTS = Experts(required=True, own_width=True)

_NO_ANGLES = (*implied(rotary_fraction=1.0, rotary_scaling=None), WithoutInfluence(covers=("position_base",)))
# llama.cpp computes every GELU from a half-precision table of its tanh form, whichever form the model uses.
_GELU = ("gelu_tanh", "gelu")
_LAYER_NORM = (*implied(norm="layernorm"), number("attention.layer_norm_epsilon", "norm_eps"))
# LayerNorm and biases throughout.
_BIASED = like(
    LLAMA,
    *_LAYER_NORM,
    Heads(square=True),
    Implied("activation", _GELU),
    *_biases("always", "attention_bias", *_OTHER_BIASES),
)
_BIASED_NORMS = (*EMBEDDING, *first_and_last_norms(zeros=True), *norms_before(zeros=True))
# Queries, keys and values in one matrix.
_STACKED_ROWS = (*_BIASED_NORMS, *stacked_attention(zeros=True), *PLAIN_FEED_FORWARD)
# Or in three, whose biases are optional.
_SEPARATE = like(_BIASED, Biases("attention_bias", "optional", "blk.0.attn_q.bias"))
_SEPARATE_ROWS = (*_BIASED_NORMS, *separate_attention(zeros=True), *PLAIN_FEED_FORWARD)

# Scaled embeddings, GeGLU.
_GEMMA = like(
    LLAMA,
    Implied("norm", ("rmsnorm_zero_centered", "rmsnorm")),
    EmbeddingRoot(),
    *implied(activation="geglu_tanh"),
    Rotary(partial=True),
    TiedWeights("never"),
)
_GEMMA_ROWS = (
    *EMBEDDING_AS_IT_IS, *first_and_last_norms(), *norms_before(), *separate_attention(), *GATED_FEED_FORWARD,
)  # fmt: skip
# Norms on both sides.
_GEMMA2 = like(_GEMMA, *implied(norm_position="sandwich"))
_GEMMA2_ROWS = (*_GEMMA_ROWS, *NORMS_BEHIND, *QUERY_KEY_NORMS)

_OUTPUT_NORM_ROWS = (
    *EMBEDDING, *first_and_last_norms(), *NORMS_BEHIND, *separate_attention(), *QUERY_KEY_NORMS, *GATED_FEED_FORWARD,
)  # fmt: skip

# Both sublayers read one norm without a bias; logits have a factor.
_COHERE = like(
    LLAMA,
    *_LAYER_NORM,
    *implied(parallel_residual=True, shared_norm=True, embedding_scale=1.0),
    Heads(square=True),
    output_scale("logit_scale", 1.0),
    TiedWeights("never"),
)
_COHERE_ROWS = (*EMBEDDING_AS_IT_IS, *first_and_last_norms(), *norms_before(), *_INTERLEAVED_ROWS)

_GRANITE = like(
    _LLAMA_WITH_BIASES,
    number("embedding_scale", "embedding_scale", 1.0),
    number("residual_scale", "residual_scale", 1.0),
    output_scale("logit_scale", 1.0, divides=True),
    GivenScale(),
    Fixed("rope.scaling.finetuned", (True,), "so its layers do not encode positions, which SheepOp does not support"),
)
_GRANITE_ROWS = (*EMBEDDING_AS_IT_IS, *first_and_last_norms(), *norms_before(), *_INTERLEAVED_ROWS, *EXPERTS, *OUTPUT)


def architecture(name: str, base: tuple[Field, ...], rows: tuple[Row, ...], *changes: Field) -> Architecture:
    """Returns the architecture that changes `base` in some points."""
    return Architecture(name, like(base, *changes), rows)


_TABLES = (
    # Radford et al. 2019. Sinusoids are written as a table, and read as learned positions.
    architecture(
        "gpt2", _BIASED, (*_STACKED_ROWS, *POSITIONS, *OUTPUT),
        Implied("position_encoding", ("learned", "sinusoidal")), *_NO_ANGLES,
    ),
    # Le Scao et al. 2022.
    architecture(
        "bloom", _BIASED, (*_STACKED_ROWS, *OUTPUT),
        *implied(position_encoding="alibi", embedding_norm=True), *_NO_ANGLES,
    ),
    # Black et al. 2022; Pythia.
    architecture(
        "gptneox", _BIASED, (*_STACKED_ROWS, *OUTPUT_ALWAYS),
        Implied("activation", _GELU[::-1]),
        switch("use_parallel_residual", "parallel_residual"),
        Rotary(partial=True), TiedWeights("always"),
    ),
    # Gemma team 2024. The models with 46 and with 62 layers have another score scale.
    architecture(
        "gemma2", _GEMMA2, _GEMMA2_ROWS,
        ScoreScale(odd_layers=46),
        Windows(period=2, own_base="scaled", otherwise=4096),
        SoftCap("attn_logit_softcapping", "attention_soft_cap", 50.0),
        SoftCap("final_logit_softcapping", "logit_soft_cap", 30.0),
    ),
    architecture(
        "gemma3", _GEMMA2, (*_GEMMA2_ROWS, *OUTPUT),
        ScoreScale(odd_layers=62),
        *implied(qk_norm="head"),
        Windows(period=6, own_base="unscaled"),
        SoftCap("final_logit_softcapping", "logit_soft_cap"),
        TiedWeights("optional"),
    ),
    # OLMo team 2024: norms only after the sublayers.
    architecture(
        "olmo2", LLAMA, (*_OUTPUT_NORM_ROWS, *OUTPUT_ALWAYS),
        *implied(norm_position="output", qk_norm="width"),
        Heads(square=True), Windows(period=4, own_base="shared"), TiedWeights("always"),
    ),
    # Qwen team 2024 and 2025.
    architecture("qwen3moe", _QWEN3, (*_QWEN3_ROWS, *EXPERTS), _WIDE_EXPERTS),
    architecture("qwen3", _QWEN3, (*_QWEN3_ROWS, *GATED_FEED_FORWARD)),
    architecture("qwen2", LLAMA, _SEPARATE_LLAMA_ROWS, Implied("attention_bias", (True,)), Heads(square=True)),
    # Touvron et al. 2023 and its many descendants.
    architecture("llama", _LLAMA_WITH_BIASES, (*_LLAMA_ROWS, *_INTERLEAVED_ROWS, *EXPERTS), _LLAMA_OR_MIXTRAL),
    # Abdin et al. 2024.
    architecture(
        "phi3", LLAMA, (*_LLAMA_ROWS, *stacked_attention(), *STACKED_FEED_FORWARD),
        Biases("attention_bias", "optional", "blk.0.attn_qkv.bias"), Heads(square=True), Rotary(partial=True),
    ),
    architecture("gemma", _GEMMA, _GEMMA_ROWS),
    architecture("smollm3", LLAMA, (*_LLAMA_ROWS, *_INTERLEAVED_ROWS), RotatingLayers(period=4)),
    architecture(
        "glm4", LLAMA,
        (*_LLAMA_ROWS, *NORMS_BEHIND, *separate_attention(interleaved=True), *STACKED_FEED_FORWARD),
        *implied(norm_position="sandwich"), Rotary(partial=True),
    ),
    # Only its model with 64 layers has windows.
    architecture(
        "exaone4", LLAMA, (*_OUTPUT_NORM_ROWS, *OUTPUT),
        *implied(norm_position="output", qk_norm="head"),
        Heads(square=True), Rotary(divisors=True),
        RotatingWindows(period=4, own_base="same", otherwise=4096, only=64),
    ),
    # Models with 64 layers have norms of queries and keys with a scale for each head.
    architecture("command-r", _COHERE, _COHERE_ROWS, Layers(most=63)),
    architecture("cohere2", _COHERE, _COHERE_ROWS, RotatingWindows(period=4, own_base="same", otherwise=4096)),
    architecture("granite", _GRANITE, _GRANITE_ROWS),
    architecture("granitemoe", _GRANITE, _GRANITE_ROWS, Experts(required=True, own_width=False)),
    architecture(
        "gpt-oss", LLAMA,
        (
            *EMBEDDING, *first_and_last_norms(), *norms_before("post_attention_norm"),
            *separate_attention(zeros=True), *SINKS, *EXPERTS, *OUTPUT_ALWAYS,
        ),
        *implied(activation="swiglu_clamped", attention_sinks=True),
        Experts(required=True, own_width=True, biased=True),
        *_biases("always", "attention_output_bias", "feed_forward_bias"),
        Rotary(truncate=False), Windows(period=2, own_base="scaled", otherwise=128), TiedWeights("always"),
    ),
    architecture("starcoder2", _SEPARATE, (*_SEPARATE_ROWS, *OUTPUT)),
    architecture(
        "phi2", _SEPARATE, (*_SEPARATE_ROWS, *OUTPUT_ALWAYS, *OUTPUT_BIAS),
        *implied(parallel_residual=True, shared_norm=True, head_bias=True),
        Rotary(partial=True), TiedWeights("always"),
    ),
    architecture(
        "stablelm", LLAMA, (*_BIASED_NORMS, *separate_attention(), *GATED_FEED_FORWARD, *OUTPUT_ALWAYS),
        *_LAYER_NORM, *_biases("always", "norm_bias"), Heads(square=True),
        SharedNorm(), Rotary(partial=True), TiedWeights("always"),
    ),
    architecture(
        "arcee", LLAMA, (*_LLAMA_ROWS, *_INTERLEAVED_ROWS),
        *implied(activation="relu_squared"), Rotary(divisors=True),
    ),
    # Those below compute what one above does, under which a model is written.
    architecture("mistral3", _LLAMA_WITH_BIASES, (*_LLAMA_ROWS, *_INTERLEAVED_ROWS, *EXPERTS), _LLAMA_OR_MIXTRAL),
    architecture("ernie4_5", LLAMA, (*_LLAMA_ROWS, *_INTERLEAVED_ROWS)),
    architecture("exaone", LLAMA, _SEPARATE_LLAMA_ROWS, Rotary(divisors=True)),
    architecture(
        "seed_oss", LLAMA,
        (
            *EMBEDDING, *first_and_last_norms(), *norms_before("post_attention_norm"),
            *separate_attention(), *GATED_FEED_FORWARD, *OUTPUT,
        ),
    ),
    Architecture("qwen3vl", (*_QWEN3, Pictures()), (*_QWEN3_ROWS, *GATED_FEED_FORWARD)),
    Architecture("qwen3vlmoe", (*like(_QWEN3, _WIDE_EXPERTS), Pictures()), (*_QWEN3_ROWS, *EXPERTS)),
)  # fmt: skip
ARCHITECTURES = {table.name: table for table in _TABLES}
