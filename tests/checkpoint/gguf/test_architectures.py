"""Every choice of our network is written, or refused with the reason, for every architecture of llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint.gguf.container import Container
from sheepop.checkpoint.gguf.description import CONFIG_KEY, choose_architecture, config_metadata
from sheepop.checkpoint.gguf.hybrid import ARCHITECTURES
from sheepop.checkpoint.gguf.layout import places
from sheepop.checkpoint.gguf.metadata import value_of
from sheepop.core.config import validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.model import ModelConfig
from sheepop.model.rotary_scaling import RotaryScaling
from sheepop.model.sections import ExpertsConfig

# Fields that change neither logits nor tokens, with another value each.
WITHOUT_INFLUENCE: dict[str, Any] = {
    "preset": "llama-1m",
    "bias": None,  # the defaults of the fields that are given one by one
    "dropout": 0.3,
    "initialization": "xavier_uniform",
    "initial_std": 0.5,
    "attention_backend": "eager",
    "experts.load_balancing_loss": 0.5,
    "experts.router_z_loss": 0.5,
    "experts.bias_update_rate": 0.5,
}
# Another value for every field that matters; what the configuration itself refuses is tried with the next.
OTHERS: dict[str, tuple[Any, ...]] = {
    "architecture": ("encoder_decoder",),
    "vocab_size": (140,),
    "d_model": (64,),
    "num_layers": (5,),
    "num_encoder_layers": (2,),
    "num_heads": (8,),
    "num_kv_heads": (4, 2, 1),
    "head_dim": (24, 8),
    "value_head_dim": (24,),
    "d_ff": (96,),
    "max_seq_len": (32,),
    "ngrams": ({"rows": 9},),
    "short_convolution": (3,),
    "latent_attention": ({"kv_rank": 4, "rope_head_dim": 2},),
    "gated_convolution": ({"layers": [0]},),
    "gated_delta_net": (
        {"layers": [0], "num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 4, "value_head_dim": 4},
    ),
    "attention_output_gate": (True, False),
    "layer_inputs": ({"width": 4},),
    "layer_factor": (True,),
    "layer_d_ff": ((64, 96, 96), (64, 96, 96, 96)),
    "sliding_head_dim": (4,),
    "sliding_num_kv_heads": (1,),
    "shared_kv_layers": (1, 2),
    "keys_as_values": ((0,), (1,), (2,)),
    "value_norm": (True,),
    "position_encoding": ("sinusoidal", "learned", "rope", "alibi", "none"),
    "position_base": (123.0,),
    "rotary_fraction": (0.25, 0.75),
    "rotary_scaling": (
        None,
        {"kind": "linear", "factor": 3.0},
        {"kind": "ntk", "factor": 3.0},
        {"kind": "llama3", "factor": 3.0, "original_max_seq_len": 20},
        {"kind": "yarn", "factor": 3.0, "original_max_seq_len": 20},
        {"kind": "yarn", "factor": 3.0, "original_max_seq_len": 20, "beta_fast": 20.0},
        {"kind": "yarn", "factor": 3.0, "original_max_seq_len": 20, "beta_slow": 2.0},
        {"kind": "yarn", "factor": 3.0, "original_max_seq_len": 20, "truncate": False},
        {"kind": "yarn", "factor": 3.0, "original_max_seq_len": 20, "attention_factor": 2.0},
        *(
            {"kind": "longrope", "factor": 3.0, "original_max_seq_len": 20, "pair_factors": [2.0] * n}
            for n in (2, 4, 8)
        ),
        {"kind": "proportional", "factor": 1.0, "fraction": 0.5},
    ),
    "sliding_position_base": (None, 77.0),
    "embedding_scale": (2.5,),
    "embedding_norm": (True, False),
    "norm": ("layernorm", "rmsnorm", "rmsnorm_zero_centered"),
    "norm_position": ("pre", "post", "sandwich", "output"),
    "norm_eps": (0.01,),
    "norm_bias": (True, False),
    "final_norm": (False,),
    "qk_norm": ("head", "own_head", "width", None),
    "activation": ("relu", "relu_squared", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"),
    "feed_forward_bias": (True, False),
    "experts": (None, {"count": 3}, {"count": 4, "per_token": 1}, {"count": 4, "per_token": 2, "d_ff": 48}),
    "parallel_residual": (True, False),
    "shared_norm": (True,),
    "residual_scale": (0.5,),
    "logit_scale": (0.5,),
    "head_bias": (True,),
    "rotary_layers": ((0,),),
    "attention_bias": (True, False),
    "attention_output_bias": (True, False),
    "attention_scale": (0.3,),
    "attention_soft_cap": (7.0, None),
    "attention_sinks": (True,),
    "sliding_window": (3, None),
    "sliding_layers": (None, (1,), (0,)),
    "tie_weights": (True, False),
    "logit_soft_cap": (7.0, None),
    "mup_base_d_model": (16,),
    "mup_base_head_dim": (4,),
    "experts.count": (6,),
    "experts.per_token": (1,),
    "experts.d_ff": (48,),
    "experts.shared": (1,),
    "experts.shared_gate": (True,),
    "experts.router_scale": (0.5,),
    "experts.own_norms": (True,),
    "experts.expert_scales": (True,),
    "experts.router_bias": (True,),
    "experts.groups": (2,),
    "experts.groups_per_token": (2,),
    "experts.group_top": (2,),
    "experts.scale": (2.0,),
    "experts.layers": ((0, 2),),
    "experts.scores": ("sigmoid",),
    "experts.normalize": (False,),
}
NEEDED_WITH = {
    "mup_base_d_model": {"initialization": "mup"},
    "experts.shared_gate": {"experts": {"count": 4, "shared": 1}},
    "mup_base_head_dim": {"initialization": "mup", "mup_base_d_model": 32},
}


def description(architecture_name: str, config: ModelConfig) -> tuple[Any, ...]:
    """What a file says of a configuration: its keys, its tensors and what is done to them."""
    architecture = ARCHITECTURES[architecture_name]
    keys = {key: value.encoded() for key, value in config_metadata(architecture, config).items() if key != CONFIG_KEY}
    tensors = [
        (replace(place, constant=None), None if place.constant is None else place.constant().tolist())
        for place in places(architecture, config)
    ]
    return keys, tensors


def changed(config: ModelConfig, field: str, value: Any) -> ModelConfig | None:
    """The configuration with one field changed; None when it contradicts itself so."""
    settings = config.model_dump() | NEEDED_WITH.get(field, {})
    section, _, name = field.rpartition(".")
    if section:
        settings[section] = {**settings[section], name: value}
    else:
        settings[field] = value
    try:
        return validate(ModelConfig, settings)
    except ConfigError:
        return None


def test_every_field_is_accounted_for_once_by_every_architecture() -> None:
    for architecture in ARCHITECTURES.values():
        fields = [field for entry in architecture.fields for field in entry.covers]
        assert sorted(fields) == sorted(ModelConfig.model_fields), architecture.name


def test_the_tables_of_this_test_know_every_field() -> None:
    named = {field for field in (*WITHOUT_INFLUENCE, *OTHERS) if "." not in field}
    assert named == set(ModelConfig.model_fields)
    nested = {field.removeprefix("experts.") for field in (*WITHOUT_INFLUENCE, *OTHERS) if field.startswith("experts.")}
    assert nested == set(ExpertsConfig.model_fields)
    used = {key for value in OTHERS["rotary_scaling"] if value for key in value}
    # The bounds of Llama 3 have no key and stand in a tensor, which is compared.
    assert used | {"low_freq_factor", "high_freq_factor"} == set(RotaryScaling.model_fields)


def test_what_changes_the_network_is_refused_or_changes_the_file(toy: Any) -> None:
    architecture = ARCHITECTURES[toy.architecture]
    assert not list(architecture.refusals(toy.config))
    before = description(toy.architecture, toy.config)
    tried = set()
    for field, values in OTHERS.items():
        if field.startswith("experts.") and toy.config.experts is None:
            continue
        for value in values:
            config = changed(toy.config, field, value)
            if config is None or config == toy.config or same_network(config, toy.config):
                continue
            tried.add(field)
            if not list(architecture.refusals(config)):
                assert description(toy.architecture, config) != before, (field, value)
    # Few fields contradict the others whatever they are.
    assert len(tried) >= 30


def same_network(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configurations differ only in what their network does not use."""
    differing = {name for name in ModelConfig.model_fields if getattr(one, name) != getattr(other, name)}
    unused = set()
    if one.position_encoding not in ("sinusoidal", "rope"):
        unused.add("position_base")
    if one.experts is not None and one.experts.layers is None and one.experts.d_ff is not None:
        unused.add("d_ff")  # no layer is without experts
    if one.layer_d_ff is not None and one.layer_d_ff == other.layer_d_ff:
        unused.add("d_ff")
    # One width of experts, said twice.
    if one.experts is not None and other.experts is not None:
        widths = [(config.experts.d_ff or config.d_ff, config.d_ff) for config in (one, other) if config.experts]
        if widths[0] == widths[1] and one.experts.model_copy(update={"d_ff": None}) == other.experts.model_copy(
            update={"d_ff": None}
        ):
            unused.add("experts")
    # GELU is computed in one form whatever is asked, and said so in a note.
    if {one.activation, other.activation} == {"gelu", "gelu_tanh"}:
        unused.add("activation")
    # The base of the sliding layers given as that of all others.
    if {one.sliding_position_base, other.sliding_position_base} == {None, one.position_base}:
        unused.add("sliding_position_base")
    return differing <= unused


def test_what_does_not_change_the_network_does_not_change_the_file(toy: Any) -> None:
    before = description(toy.architecture, toy.config)
    for field, value in WITHOUT_INFLUENCE.items():
        if field.startswith("experts.") and toy.config.experts is None:
            continue
        other = value if value is not None else not toy.config.bias
        config = changed(toy.config, field, other)
        assert config is not None and config != toy.config, field
        assert not list(ARCHITECTURES[toy.architecture].refusals(config)), field
        assert description(toy.architecture, config) == before, field


def test_a_model_is_written_under_the_name_that_fits_it_best(make: Callable[..., Any]) -> None:
    for name, wanted in {
        "gpt2": "gpt2", "bloom": "bloom", "gptneox": "gptneox", "gemma2": "gemma2", "gemma3": "gemma3",
        "olmo2": "olmo2", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3moe", "llama3": "llama",
        "mixtral": "llama", "phi3": "phi3", "gemma": "gemma", "smollm3": "smollm3", "glm4": "glm4",
        "exaone4": "exaone4", "command-r": "command-r", "cohere2": "cohere2", "granite": "granite",
        "granitemoe": "granitemoe", "gpt-oss": "gpt-oss", "phi2": "phi2", "stablelm": "stablelm", "arcee": "arcee",
        "ernie4_5": "llama",
    }.items():  # fmt: skip
        assert choose_architecture(make(name).config).name == wanted


def test_what_no_architecture_computes_is_refused_with_every_reason(make: Callable[..., Any]) -> None:
    config = make("llama", attention_sinks=True, attention_backend="eager").config
    with pytest.raises(CheckpointError) as caught:
        choose_architecture(config)
    lines = str(caught.value).splitlines()
    assert lines[0] == "llama.cpp has no architecture that computes the same as this model:"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == sorted(ARCHITECTURES)
    assert lines[1] == "  llama: attention_sinks = True, but it computes False"
    assert "  gpt2: " in str(caught.value)


def test_what_only_we_compute_is_refused_in_a_line_with_the_settings_of_a_model_without_it(
    make: Callable[..., Any],
) -> None:
    with pytest.raises(CheckpointError) as caught:
        choose_architecture(make("llama", ngrams={"rows": 9}, short_convolution=3).config)
    assert str(caught.value) == (
        "llama.cpp has no n-gram embeddings and no short convolutions. For a model that other programs can run, train "
        "with --exportable, which means model.ngrams=null model.short_convolution=null."
    )


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"sliding_window": 10}, "sliding_window = 10, but it has no window"),
        ("llama", {"rotary_fraction": 0.5}, "rotary_fraction = 0.5, but it rotates whole heads"),
        ("llama", {"value_head_dim": 16}, "value_head_dim = 16 differs from head_dim = 8"),
        ("llama", {"attention_scale": 0.1}, "the scale of the scores is 0.1, but it uses 0.353553"),
        ("qwen3", {"rotary_scaling": {"kind": "llama3", "factor": 2.0, "original_max_seq_len": 8}}, "kind = llama3"),
        ("llama", {"rotary_scaling": {
            "kind": "longrope", "factor": 2.0, "original_max_seq_len": 8, "pair_factors": [2.0] * 4,
        }}, "kind = longrope"),
        ("llama-yarn", {"rotary_scaling": {
            "kind": "yarn", "factor": 2.0, "original_max_seq_len": 8, "beta_fast": 16.0,
        }}, "rotary_scaling.beta_fast = 16.0, but it always computes 32.0"),
        ("qwen2", {"head_dim": 16}, "num_heads = 4 x head_dim = 16 is not d_model = 32"),
        ("mixtral", {"experts": {"count": 4, "shared": 1}}, "experts.shared = 1, but it has no shared experts"),
        ("mixtral", {"experts": {"count": 4, "layers": (1,)}}, "experts.layers leaves layers out"),
        ("mixtral", {"experts": {"count": 4, "scores": "sigmoid"}}, "experts.scores = sigmoid, but it computes"),
        ("mixtral", {"experts": {"count": 4, "normalize": False}}, "experts.normalize = False"),
        ("mixtral", {"feed_forward_bias": True}, "its experts have no biases"),
        ("gemma2", {"tie_weights": False}, "its output projection is always the embedding"),
        ("gemma2", {"sliding_window": None, "sliding_layers": None}, "sliding_window is not set, but it always"),
        ("gemma2", {"attention_soft_cap": None}, "attention_soft_cap is not set, but it always caps"),
        ("gemma2", {"embedding_scale": 1.0}, "embedding_scale = 1, but it multiplies embeddings by 5.65685"),
        ("gemma3", {"sliding_position_base": None}, "scales the sliding layers too, but it does not"),
        ("olmo2-window", {"sliding_position_base": 5.0}, "sliding_position_base = 5 differs from position_base"),
        ("gpt2", {"parallel_residual": True}, "parallel_residual = True, but it computes False"),
        ("smollm3", {"rotary_layers": (0, 1)}, "layer 2 does not rotate, but it rotates it"),
        ("exaone4", {"sliding_window": 5}, "sliding_window = 5, but it has no window"),
        ("exaone4-windows", {"sliding_window": None, "sliding_layers": None}, "not set, but it always has one"),
        ("exaone4-windows", {"rotary_layers": None}, "layer 3 rotates, but it does not there"),
        ("cohere2", {"sliding_position_base": 9.0}, "base = 9, but all its layers have the same angles"),
        ("command-r", {"num_layers": 64}, "num_layers = 64, but it has at most 63"),
        ("granite", {"initialization": "mup", "mup_base_d_model": 16}, "mup_base_d_model = 16 scales the logits"),
        ("gpt-oss", {"feed_forward_bias": False}, "feed_forward_bias = False, but its experts have biases"),
        ("gpt-oss", {"experts": {"count": 4}}, "experts.router_bias = False, but its router has a bias"),
        ("gpt-oss-yarn", {"rotary_scaling": {
            "kind": "yarn", "factor": 2.0, "original_max_seq_len": 8,
        }}, "rotary_scaling.truncate = True, but it always computes False"),
        ("stablelm", {"parallel_residual": True}, "parallel_residual = True, but then both sublayers share a norm"),
        ("llama", {"initialization": "mup", "mup_base_d_model": 16}, "mup_base_d_model = 16 scales the logits"),
        ("gemma4", {"shared_kv_layers": 3, "layer_d_ff": None}, "keys of layer 1, but it uses those of 2"),
        ("gemma4", {"rotary_scaling": None}, "rotary_scaling is None, but it has proportional"),
        ("gemma4", {"sliding_position_base": None}, "scales the sliding layers too, but it does not"),
        ("gemma4", {"attention_scale": None}, "the scale of the scores is 0.25, but it uses 1"),
        ("gemma4-experts", {"experts": {"count": 4}}, "experts.shared = 0, but it has a dense network beside"),
    ],
)  # fmt: skip
def test_reasons_are_in_words(make: Callable[..., Any], name: str, changes: dict[str, Any], reason: str) -> None:
    toy = make(name, **changes)
    assert any(reason in found for found in ARCHITECTURES[toy.architecture].refusals(toy.config))


def test_opt_has_no_name_there(make: Callable[..., Any]) -> None:
    """LayerNorm, biases and learned positions like GPT-2, but ReLU."""
    with pytest.raises(CheckpointError, match=r"(?s)no architecture that .*  gpt2: activation = relu, but it computes"):
        choose_architecture(make("gpt2", activation="relu").config)


def test_a_window_as_wide_as_the_context_is_none(make: Callable[..., Any]) -> None:
    toy = make("llama", sliding_window=64)
    assert not list(ARCHITECTURES["llama"].refusals(toy.config))


def test_the_largest_gemmas_scale_scores_by_the_width_of_the_model(make: Callable[..., Any]) -> None:
    # 46 layers: d_model / num_heads = 8 columns' worth, where heads have 16.
    scale = 1 / math.sqrt(8)
    assert not list(ARCHITECTURES["gemma2"].refusals(make("gemma2", num_layers=46, attention_scale=scale).config))
    assert list(ARCHITECTURES["gemma2"].refusals(make("gemma2", num_layers=46).config))


def test_names_are_those_of_llama_cpp(tmp_path: Path, toy: Any) -> None:
    """Keys and tensors against the tables of llama.cpp's own package."""
    gguf = pytest.importorskip("gguf")
    known_keys = {
        value.replace("{arch}", toy.architecture)
        for section in vars(gguf.Keys).values()
        if isinstance(section, type)
        for value in vars(section).values()
        if isinstance(value, str)
    }
    architecture = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == toy.architecture)
    known_tensors = {
        f"{gguf.TENSOR_NAMES[tensor].format(bid=layer)}{suffix}"
        for tensor in gguf.MODEL_TENSORS[architecture]
        for layer in range(toy.config.num_layers)
        for suffix in (".weight", ".bias", ".scale", *([""] if tensor == gguf.MODEL_TENSOR.SSM_A else []))
    }
    with Container(toy.write(tmp_path / "toy.gguf")) as container:
        keys = {key for key in container.metadata if not key.startswith("sheepop.")}
        assert keys - known_keys <= {"general.type"}
        unknown = set(container.tensors) - known_tensors
    # The package lists what it writes itself: OLMo 2 with windows and models with biases are read all the same.
    assert all(name.endswith(".bias") for name in unknown)


def test_layers_with_a_window_are_read_from_a_rule_or_a_list(make: Callable[..., Any], tmp_path: Path) -> None:
    for layers, listed in (((0, 1, 2), False), ((0, 2), True)):
        toy = make("gemma3", sliding_layers=layers, num_layers=3)
        path = tmp_path / f"{len(layers)}.gguf"
        with Container(toy.write(path)) as container:
            # All layers but every sixth have one; of three layers these are all.
            assert ("gemma3.attention.sliding_window_pattern" in container.metadata) == listed
            if listed:
                assert container.metadata["gemma3.attention.sliding_window_pattern"] == value_of([True, False, True])


def stored(path: Path, toy: Any) -> dict[str, torch.Tensor]:
    with Container(toy.write(path / "toy.gguf", dtype="f32")) as container:
        return {name: container.read(name) for name in container.tensors}


@pytest.mark.parametrize(("name", "layer"), [("llama", 1), ("llama3", 2), ("llama-biases", 0), ("glm4", 1)])
def test_the_rows_that_llama_cpp_turns_together_are_neighbours(
    make: Callable[..., Any], tmp_path: Path, name: str, layer: int
) -> None:
    """In its ``llama`` pairs are the rows (2i, 2i + 1) of a head, in ours (i, i + R/2); values are not turned."""
    toy = make(name)
    theirs, ours = stored(tmp_path, toy), toy.model.state_dict()
    half = toy.config.rotary_dim // 2
    for short, heads in (("q", toy.config.num_heads), ("k", toy.config.kv_heads)):
        for kind in ("weight", "bias") if toy.config.attention_bias else ("weight",):
            found = theirs[f"blk.{layer}.attn_{short}.{kind}"]
            own = ours[f"blocks.{layer}.attention.{short}_proj.{kind}"]
            for head in range(heads):
                start, end = toy.config.head_size * head, toy.config.head_size * (head + 1)
                for pair in range(half):
                    assert torch.equal(found[start + 2 * pair], own[start + pair])
                    assert torch.equal(found[start + 2 * pair + 1], own[start + half + pair])
                assert torch.equal(found[start + 2 * half : end], own[start + 2 * half : end])
    assert torch.equal(theirs[f"blk.{layer}.attn_v.weight"], ours[f"blocks.{layer}.attention.v_proj.weight"])


@pytest.mark.parametrize("name", ["gptneox", "phi3"])
def test_projections_that_llama_cpp_has_as_one_stand_in_its_order(
    make: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    """All queries, then all keys, then all values; in Phi-3 the gate, then what it multiplies. No rows move."""
    toy = make(name)
    theirs, ours = stored(tmp_path, toy), toy.model.state_dict()
    parts = [ours[f"blocks.1.attention.{short}_proj.weight"] for short in "qkv"]
    assert torch.equal(theirs["blk.1.attn_qkv.weight"], torch.cat(parts))
    if name == "phi3":
        parts = [ours[f"blocks.1.feed_forward.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(theirs["blk.1.ffn_up.weight"], torch.cat(parts))


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_rows_stay_in_our_order_where_llama_cpp_turns_halves(
    make: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    toy = make(name)
    theirs, ours = stored(tmp_path, toy), toy.model.state_dict()
    for short in "qkv":
        found = theirs[f"blk.2.attn_{short}.weight"]
        assert torch.equal(found, ours[f"blocks.2.attention.{short}_proj.weight"])
    # Gemma's scales are stored as what the network multiplies by, which is 1 more than the weight.
    added = 1.0 if name == "gemma3" else 0.0
    assert torch.equal(theirs["blk.2.attn_q_norm.weight"], added + ours["blocks.2.attention.q_norm.weight"])
