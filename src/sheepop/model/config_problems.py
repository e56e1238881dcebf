"""What a network's configuration must fulfil, beyond the types and ranges of its fields."""

from __future__ import annotations

from collections.abc import Iterator

from sheepop.model.attention.features import BACKEND_FEATURES, FEATURES
from sheepop.model.options import ModelOptions

_WITH_STD = frozenset({"gpt2", "normal", "mup"})


def problems(config: ModelOptions) -> Iterator[str]:
    """Yields a line for each rule that the configuration breaks."""
    yield from _size_problems(config)
    yield from _position_problems(config)
    yield from _choice_problems(config)


def _size_problems(config: ModelOptions) -> Iterator[str]:
    if config.num_heads % config.kv_heads:
        yield (
            f"num_kv_heads = {config.num_kv_heads} does not divide num_heads = {config.num_heads}: each key-value "
            "head must serve the same number of query heads"
        )
    if config.num_heads % (config.sliding_num_kv_heads or 1):
        yield f"sliding_num_kv_heads = {config.sliding_num_kv_heads} does not divide num_heads = {config.num_heads}"
    if config.layer_d_ff is not None and len(config.layer_d_ff) != config.num_layers:
        yield f"layer_d_ff has {len(config.layer_d_ff)} widths for num_layers = {config.num_layers}"
    experts = None if config.experts is None else config.experts.layers
    listed = {name: getattr(config, name) for name in ("sliding_layers", "rotary_layers", "keys_as_values")}
    mixers = {f"{name}.layers": section.layers for name, section in config.mixers.items()}
    for name, layers in {**listed, "experts.layers": experts, **mixers}.items():
        if layers is not None and max(layers) >= config.num_layers:
            yield f"{name} names layer {max(layers)}, but the layers are 0 to {config.num_layers - 1}"
        if layers is not None and len(set(layers)) < len(layers):
            yield f"{name} names a layer twice"
    mixing = [layer for layers in mixers.values() for layer in layers]
    if len(set(mixing)) < len(mixing):
        yield f"{' and '.join(mixers)} name the same layer, which can have only one of them"
    if len(set(mixing)) == config.num_layers:
        yield f"{' and '.join(mixers)} leave no layer with attention"
    yield from _key_problems(config)
    for name in (name for name in listed if listed[name] is not None):
        if without := set(listed[name]) & set(mixing):
            yield f"{name} names layer {min(without)}, which has no attention"


def _key_problems(config: ModelOptions) -> Iterator[str]:
    own = config.num_layers - config.shared_kv_layers
    if own < 1:
        yield f"shared_kv_layers = {config.shared_kv_layers} leaves no layer with keys and values"
        return
    for layer in range(own, config.num_layers):
        if config.mixer(layer) is None and config.kv_source(layer) is None:
            yield (
                f"shared_kv_layers = {config.shared_kv_layers}: no layer with its own keys and values has the window "
                f"and the rotation of layer {layer}"
            )
            return
    for layer in config.keys_as_values or ():
        heads = config.heads(layer)
        if layer >= own:
            yield f"keys_as_values names layer {layer}, which has no keys of its own"
        if heads.key_width != heads.value_width:
            yield f"keys_as_values names layer {layer}, whose keys and values have {heads[1]} and {heads[2]} columns"
    for name in ("shared_kv_layers", "keys_as_values"):
        if getattr(config, name) and config.short_convolution is not None:
            yield f"{name} does not go with short_convolution"


def _position_problems(config: ModelOptions) -> Iterator[str]:
    rotary, sinusoidal = (config.position_encoding == encoding for encoding in ("rope", "sinusoidal"))
    factors = None if config.rotary_scaling is None else config.rotary_scaling.pair_factors
    kinds = {"head_dim": False} | ({} if config.sliding_head_dim is None else {"sliding_head_dim": True})
    for name, sliding in kinds.items() if rotary else ():
        width, scaled = config.rotary_width(sliding=sliding), not sliding or config.sliding_position_base is None
        if width < 2 or width % 2:
            share = f"{name} = {getattr(config, name)} with rotary_fraction = {config.rotary_fraction} gives"
            yield (
                f"{share if config.latent_attention is None else 'latent_attention has'} {width} rotated "
                "columns; rotary positions rotate pairs of columns, so choose an even number"
            )
        elif factors is not None and 2 * len(factors) != width and scaled:
            yield (
                f"rotary_scaling.pair_factors has {len(factors)} numbers; it needs one for each of the "
                f"{width // 2} rotated pairs of columns"
            )
    for name in ("rotary_scaling", "sliding_position_base", "rotary_layers"):
        if getattr(config, name) is not None and not rotary:
            yield f"{name} applies to position_encoding: rope, not to {config.position_encoding}"
    for name, unread in (("rotary_fraction", not rotary), ("position_base", not (rotary or sinusoidal))):
        if unread and getattr(config, name) != type(config).model_fields[name].default:
            yield f"{name} has no effect with position_encoding: {config.position_encoding}"
    if config.sliding_window is None:
        for name in ("sliding_layers", "sliding_position_base", "sliding_head_dim", "sliding_num_kv_heads"):
            if getattr(config, name) is not None:
                yield f"{name} needs a sliding_window"


def _choice_problems(config: ModelOptions) -> Iterator[str]:
    if config.norm_bias and config.norm != "layernorm":
        yield f"norm_bias applies to norm: layernorm; {config.norm} has no bias"
    if config.parallel_residual and config.norm_position == "post":
        yield (
            "parallel_residual adds both branches in one sum, but norm_position: post puts a norm after each "
            "branch; choose another norm_position"
        )
    if config.shared_norm and not (config.parallel_residual and config.norm_position in ("pre", "sandwich")):
        yield "shared_norm needs parallel_residual, and norm_position: pre or sandwich"
    drawn_with_std = config.initialization in _WITH_STD or config.position_encoding != "sinusoidal"
    if not drawn_with_std and config.initial_std != type(config).model_fields["initial_std"].default:
        yield (
            f"initial_std has no effect with initialization: {config.initialization} and sinusoidal positions, "
            "which set the scale of the embedding themselves"
        )
    if (config.initialization == "mup") != (config.mup_base_d_model is not None):
        yield "initialization: mup and mup_base_d_model must be set together"
    if config.mup_base_head_dim is not None and config.initialization != "mup":
        yield "mup_base_head_dim applies to initialization: mup"
    for name in ("sliding_head_dim", "layer_inputs"):
        if config.initialization == "mup" and getattr(config, name) is not None:
            yield f"initialization: mup has no rule for {name}; choose another initialization"
    has_norm = config.norm_position in ("pre", "sandwich") and not config.shared_norm
    if config.experts is not None and config.experts.own_norms and not has_norm:
        yield "experts.own_norms replaces the norm before the feed-forward layer, which this network does not have"
    if config.mup_base_head_dim is not None and config.attention_scale is not None:
        yield "attention_scale and mup_base_head_dim both set the factor of the scores; leave one out"
    if config.latent_attention is not None:
        usual = {
            "num_kv_heads": config.num_heads,
            "rotary_fraction": 1.0,
            "qk_norm": None,
            "short_convolution": None,
            "sliding_head_dim": None,
            "sliding_num_kv_heads": None,
            "shared_kv_layers": 0,
            "keys_as_values": None,
            "value_norm": False,
        }
        for name in (name for name, value in usual.items() if getattr(config, name) != value):
            yield f"{name} does not apply to latent_attention; leave it out"
        if config.latent_attention.rope_head_dim >= config.head_size:
            yield f"latent_attention.rope_head_dim is not less than head_dim = {config.head_dim}"
    features = {
        "bidirectional attention": config.architecture == "encoder_decoder",
        "dropout": config.dropout > 0,
        "sinks": config.attention_sinks,
        "soft cap": config.attention_soft_cap is not None,
    }
    available = BACKEND_FEATURES.get(config.attention_backend, FEATURES)
    for feature in (name for name, needed in features.items() if needed and name not in available):
        able = [name for name, features in BACKEND_FEATURES.items() if feature in features]
        yield f"attention_backend: {config.attention_backend} has no {feature}; use {' or '.join(able)}"
    if config.architecture == "decoder" and config.num_encoder_layers is not None:
        yield "num_encoder_layers applies to architecture: encoder_decoder"
    if config.architecture == "encoder_decoder":
        sections = ("experts", "ngrams", "latent_attention", "layer_inputs", *config.mixers)
        further = ("shared_kv_layers", "keys_as_values", "value_norm", "layer_factor", "layer_d_ff")
        for name in ("sliding_window", "rotary_layers", "short_convolution", *sections, *further):
            if getattr(config, name) not in (None, 0, False):
                yield f"{name} applies to architecture: decoder; an encoder-decoder does not support it"
        if config.parallel_residual:
            yield "parallel_residual applies to architecture: decoder; it has no branch for cross-attention"
