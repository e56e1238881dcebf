"""The tensors that one of our models has on disk, as a function of its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sheepop.checkpoint.lazy_tensor import Shape
from sheepop.core.errors import CheckpointError
from sheepop.model.config import ModelConfig
from sheepop.model.options import GATED
from sheepop.model.sections import ExpertsConfig, GatedConvolutionConfig, GatedDeltaNetConfig


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Returns the name and shape of each stored tensor of a decoder, in network order.

    Allocates nothing, so that an untrusted configuration can be compared with a file first.
    """
    return dict(_model(config))


def tensor_problems(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], reasons: Mapping[str, str] | None = None
) -> list[str]:
    """Returns a clause for each tensor that is missing, unexpected or of the wrong shape; `reasons` explain shapes."""
    reasons = reasons or {}
    return [
        *(f"{name} is missing" for name in expected if name not in found),
        *(f"{name} is unexpected" for name in found if name not in expected),
        *(
            f"{name} has shape {found[name]}, expected {shape}{reasons.get(name, '')}"
            for name, shape in expected.items()
            if name in found and found[name] != shape
        ),
    ]


def refuse_own_parts(config: ModelConfig, program: str) -> None:
    """Raises `CheckpointError` for parts of a model that `program`, as any other, does not have."""
    if found := config.own_parts:
        settings = " ".join(f"model.{key}=null" for key in found)
        raise CheckpointError(
            f"{program} has no {' and no '.join(found.values())}. For a model that other programs can run, train with "
            f"--exportable, which means {settings}."
        )


def _model(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    width = config.d_model
    yield "embedding.weight", (config.vocabulary, width)
    if config.ngrams is not None:
        yield "ngrams.table", (len(config.ngrams.orders) * config.ngrams.rows, width)
    if config.layer_inputs is not None:
        columns = config.num_layers * config.layer_inputs.width
        yield "layer_inputs.embedding.weight", (config.vocabulary, columns)
        yield "layer_inputs.projection.weight", (columns, width)
        yield from _norm(config, "layer_inputs.norm", config.layer_inputs.width)
    if config.position_encoding == "learned":
        yield "added_positions.table", (config.max_seq_len, width)
    if config.embedding_norm:
        yield from _norm(config, "embedding_norm", width)
    for layer in range(config.num_layers):
        for name, shape in _block(config, layer):
            yield f"blocks.{layer}.{name}", shape
    if config.final_norm:
        yield from _norm(config, "final_norm", width)
    if not config.tie_weights:
        yield "lm_head.weight", (config.vocabulary, width)
    if config.head_bias:
        yield "lm_head.bias", (config.vocabulary,)


def _block(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    before = config.norm_position != "output"
    behind = config.norm_position in ("sandwich", "output")
    own_norms = config.has_experts(layer) and getattr(config.experts, "own_norms", False)
    if config.layer_factor:
        yield "factor", (1,)
    mixer, tensors = "mixer", _attention(config, layer)
    if config.gated_convolution is not None and config.mixer(layer) == "gated_convolution":
        tensors = _gated_convolution(config, config.gated_convolution)
    elif config.gated_delta_net is not None and config.mixer(layer) == "gated_delta_net":
        tensors = _gated_delta_net(config, config.gated_delta_net)
    else:
        mixer = "attention"
    for branch, module, found in (
        ("attention", mixer, tensors),
        ("feed_forward", "feed_forward", _feed_forward(config, layer)),
    ):
        if before and not ((config.shared_norm or own_norms) and branch == "feed_forward"):
            yield from _norm(config, f"{branch}_norm", config.d_model)
        for name, shape in found:
            yield f"{module}.{name}", shape
        if behind:
            yield from _norm(config, f"{branch}_output_norm", config.d_model)
    if config.layer_inputs is not None:
        yield "layer_input.gate_proj.weight", (config.layer_inputs.width, config.d_model)
        yield "layer_input.o_proj.weight", (config.d_model, config.layer_inputs.width)
        yield from _norm(config, "layer_input.norm", config.d_model)


def _attention(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    kv_heads, key_width, value_width = config.heads(layer)
    queries, keys = config.num_heads * key_width, kv_heads * key_width
    values, result = kv_heads * value_width, config.num_heads * value_width
    bias, latent, has_keys = bool(config.attention_bias), config.latent_attention, config.kv_source(layer) == layer
    if latent is None:
        yield from _linear("q_proj", queries, config.d_model, bias)
        if has_keys:
            yield from _linear("k_proj", keys, config.d_model, bias)
        if has_keys and layer not in (config.keys_as_values or ()):
            yield from _linear("v_proj", values, config.d_model, bias)
    else:
        shared, rank = latent.rope_head_dim, latent.kv_rank
        if latent.q_rank is not None:
            yield from _linear("q_latent_proj", latent.q_rank, config.d_model, bias)
            yield from _norm(config, "q_latent_norm", latent.q_rank)
        yield from _linear("q_proj", queries, latent.q_rank or config.d_model, False)
        yield from _linear("kv_latent_proj", shared + rank, config.d_model, bias)
        yield from _norm(config, "kv_latent_norm", rank)
        yield from _linear("k_proj", keys - config.num_heads * shared, rank, False)
        yield from _linear("v_proj", values, rank, False)
    yield from _linear("o_proj", config.d_model, result, bool(config.attention_output_bias))
    if config.attention_output_gate:
        yield from _linear("gate_proj", result, config.d_model, bias)
    if config.short_convolution is not None:
        for name, channels in (("q", queries), ("k", keys), ("v", values)):
            yield f"convolutions.{name}.taps", (config.short_convolution - 1, channels)
    if config.qk_norm == "own_head":
        yield "q_norm.weight", (config.num_heads, key_width)
        if has_keys:
            yield "k_norm.weight", (kv_heads, key_width)
    elif config.qk_norm is not None:
        each_head = config.qk_norm == "head"
        yield from _norm(config, "q_norm", key_width if each_head else queries)
        if has_keys:
            yield from _norm(config, "k_norm", key_width if each_head else keys)
    if config.attention_sinks:
        yield "sinks", (config.num_heads,)


def _gated_convolution(config: ModelConfig, section: GatedConvolutionConfig) -> Iterator[tuple[str, Shape]]:
    width = config.d_model
    yield from _linear("in_proj", 3 * width, width, section.bias)
    yield "convolution.taps", (section.width, width)
    if section.bias:
        yield "convolution.bias", (width,)
    yield from _linear("o_proj", width, width, section.bias)


def _gated_delta_net(config: ModelConfig, section: GatedDeltaNetConfig) -> Iterator[tuple[str, Shape]]:
    width, heads = config.d_model, section.num_value_heads
    widths = {"q": section.key_width, "k": section.key_width, "v": section.value_width}
    for name, rows in (*widths.items(), ("gate", section.value_width), ("beta", heads), ("decay", heads)):
        yield f"{name}_proj.weight", (rows, width)
    for name, channels in widths.items():
        yield f"convolutions.{name}.taps", (section.width, channels)
    yield "decay", (heads,)
    yield "decay_bias", (heads,)
    yield "norm.weight", (section.value_head_dim,)
    yield "o_proj.weight", (width, section.value_width)


def _feed_forward(config: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    if config.experts is not None and config.has_experts(layer):
        yield from _experts(config, config.experts)
    else:
        yield from _dense(config, "", config.ffn_width(layer))


def _dense(config: ModelConfig, prefix: str, inner: int) -> Iterator[tuple[str, Shape]]:
    bias = bool(config.feed_forward_bias)
    if config.activation in GATED:
        yield from _linear(f"{prefix}gate_proj", inner, config.d_model, bias)
    yield from _linear(f"{prefix}up_proj", inner, config.d_model, bias)
    yield from _linear(f"{prefix}down_proj", config.d_model, inner, bias)


def _experts(config: ModelConfig, experts: ExpertsConfig) -> Iterator[tuple[str, Shape]]:
    count, width, inner = experts.count, config.d_model, experts.d_ff or config.ffn_size
    yield "router.weight", (count, width)
    if experts.router_bias:
        yield "router.bias", (count,)
    if experts.expert_scales:
        yield "router.expert_scale", (count,)
    yield "router.balance", (count,)
    if experts.own_norms:
        for name in ("router", "routed", "routed_output", *(("shared", "shared_output") if experts.shared else ())):
            yield from _norm(config, f"{name}_norm", width)
    inward = ("gate", "up") if config.activation in GATED else ("up",)
    for name in inward:
        yield f"experts.{name}_proj", (count, inner, width)
    yield "experts.down_proj", (count, width, inner)
    if config.feed_forward_bias:
        for name in inward:
            yield f"experts.{name}_bias", (count, inner)
        yield "experts.down_bias", (count, width)
    if experts.shared:
        yield from _dense(config, "shared.", experts.shared * inner)
    if experts.shared_gate:
        yield "shared_gate", (1, width)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(config: ModelConfig, name: str, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (width,)
    if config.norm_bias:
        yield f"{name}.bias", (width,)
