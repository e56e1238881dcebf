"""Every choice of our network is written, or refused with the reason, for every architecture of llama.cpp."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.checkpoint.gguf import open_gguf
from sheepop.checkpoint.gguf.architectures import ARCHITECTURES
from sheepop.checkpoint.gguf.checksum import CHECKSUM_KEY, checksum_placeholder
from sheepop.checkpoint.gguf.container import Container
from sheepop.checkpoint.gguf.description import CONFIG_KEY, choose_architecture, config_metadata
from sheepop.checkpoint.gguf.layout import places
from sheepop.checkpoint.gguf.tensor_types import F32
from sheepop.checkpoint.gguf.values import Value, ValueType, f32, flags, i32s, text, u32
from sheepop.checkpoint.gguf.writer import TensorPlan, write_container
from sheepop.core.config import validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.model import ModelConfig
from sheepop.model.config import ExpertsConfig
from sheepop.model.rotary_scaling import RotaryScaling

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
    ),
    "sliding_position_base": (None, 77.0),
    "embedding_scale": (2.5,),
    "embedding_norm": (True, False),
    "norm": ("layernorm", "rmsnorm", "rmsnorm_zero_centered"),
    "norm_position": ("pre", "post", "sandwich", "output"),
    "norm_eps": (0.01,),
    "norm_bias": (True, False),
    "final_norm": (False,),
    "qk_norm": ("head", "width", None),
    "activation": ("relu", "relu_squared", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"),
    "feed_forward_bias": (True, False),
    "experts": (None, {"count": 3}, {"count": 4, "per_token": 1}, {"count": 4, "per_token": 2, "d_ff": 48}),
    "parallel_residual": (True, False),
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
    "experts.layers": ((0, 2),),
    "experts.scores": ("sigmoid",),
    "experts.normalize": (False,),
}
NEEDED_WITH = {
    "mup_base_d_model": {"initialization": "mup"},
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
        fields = [field for aspect in architecture.aspects for field in aspect.fields]
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
        "mixtral": "llama", "phi3": "phi3",
    }.items():  # fmt: skip
        assert choose_architecture(make(name).config).name == wanted


def test_what_no_architecture_computes_is_refused_with_every_reason(make: Callable[..., Any]) -> None:
    config = make("llama", attention_sinks=True, attention_backend="eager").config
    with pytest.raises(CheckpointError) as caught:
        choose_architecture(config)
    lines = str(caught.value).splitlines()
    assert lines[0] == "llama.cpp has no architecture that computes what this model does:"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == sorted(ARCHITECTURES)
    assert lines[1] == "  llama: attention_sinks = True, and it computes False"
    assert "  gpt2: " in str(caught.value)
    with pytest.raises(CheckpointError, match="'gpt5' is no architecture that SheepOp writes: gpt2, bloom"):
        choose_architecture(config, "gpt5")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {"sliding_window": 10}, "sliding_window = 10, and it has no window"),
        ("llama", {"rotary_fraction": 0.5}, "rotary_fraction = 0.5, and it turns whole heads"),
        ("llama", {"value_head_dim": 16}, "value_head_dim = 16 differs from head_dim = 8"),
        ("llama", {"attention_scale": 0.1}, "the scores are multiplied by 0.1, and it multiplies them by 0.353553"),
        ("qwen3", {"rotary_scaling": {"kind": "llama3", "factor": 2.0, "original_max_seq_len": 8}}, "kind = llama3"),
        ("llama-yarn", {"rotary_scaling": {
            "kind": "yarn", "factor": 2.0, "original_max_seq_len": 8, "beta_fast": 16.0,
        }}, "rotary_scaling.beta_fast = 16.0, and it computes 32.0 whatever is asked"),
        ("qwen2", {"head_dim": 16}, "num_heads = 4 of head_dim = 16 are not d_model = 32"),
        ("mixtral", {"experts": {"count": 4, "shared": 1}}, "experts.shared = 1, and it has none"),
        ("mixtral", {"experts": {"count": 4, "layers": (1,)}}, "experts.layers leaves layers out"),
        ("mixtral", {"experts": {"count": 4, "scores": "sigmoid"}}, "experts.scores = sigmoid, and it computes"),
        ("mixtral", {"experts": {"count": 4, "normalize": False}}, "experts.normalize = False"),
        ("mixtral", {"feed_forward_bias": True}, "its experts have no biases"),
        ("gemma2", {"tie_weights": False}, "its output projection is the embedding"),
        ("gemma2", {"sliding_window": None, "sliding_layers": None}, "sliding_window is not set, and it always"),
        ("gemma2", {"attention_soft_cap": None}, "attention_soft_cap is not set, and it always caps"),
        ("gemma2", {"embedding_scale": 1.0}, "embedding_scale = 1, and it multiplies embeddings by 5.65685"),
        ("gemma3", {"sliding_position_base": None}, "scales the sliding layers too, and it leaves them"),
        ("olmo2-window", {"sliding_position_base": 5.0}, "sliding_position_base = 5 differs from position_base"),
        ("gpt2", {"parallel_residual": True}, "parallel_residual = True, and it computes False"),
        ("llama", {"initialization": "mup", "mup_base_d_model": 16}, "mup_base_d_model = 16 scales the logits"),
    ],
)  # fmt: skip
def test_reasons_are_in_words(make: Callable[..., Any], name: str, changes: dict[str, Any], reason: str) -> None:
    toy = make(name, **changes)
    assert any(reason in found for found in ARCHITECTURES[toy.architecture].refusals(toy.config))


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
        f"{gguf.TENSOR_NAMES[tensor].format(bid=layer)}.{suffix}"
        for tensor in gguf.MODEL_TENSORS[architecture]
        for layer in range(toy.config.num_layers)
        for suffix in ("weight", "bias")
    }
    with Container(toy.write(tmp_path / "toy.gguf")) as container:
        keys = {key for key in container.metadata if not key.startswith("sheepop.")}
        assert keys - known_keys <= {"general.type"}
        unknown = set(container.tensors) - known_tensors
    # The package lists what it writes itself: OLMo 2 with windows and models with biases are read all the same.
    assert all(name.endswith(".bias") for name in unknown)


KEYS = {
    "llama.block_count": u32(1), "llama.context_length": u32(8), "llama.embedding_length": u32(8),
    "llama.feed_forward_length": u32(8), "llama.attention.head_count": u32(2),
    "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
}  # fmt: skip
SHAPES = {
    "token_embd.weight": (6, 8), "output_norm.weight": (8,), "blk.0.attn_norm.weight": (8,),
    "blk.0.ffn_norm.weight": (8,), "blk.0.ffn_gate.weight": (8, 8), "blk.0.ffn_up.weight": (8, 8),
    "blk.0.ffn_down.weight": (8, 8),
    **{f"blk.0.attn_{name}.weight": (8, 8) for name in ("q", "k", "v", "output")},
}  # fmt: skip


def write_foreign(path: Path, keys: dict[str, Value | None], shapes: dict[str, tuple[int, ...] | None]) -> Path:
    """A small file of a llama with some keys and tensors changed, or left out."""
    found = {"general.architecture": text("llama"), **KEYS, **keys}
    metadata = {key: value for key, value in found.items() if value is not None}
    plans = [TensorPlan(name, F32, shape) for name, shape in {**SHAPES, **shapes}.items() if shape is not None]
    write_container(
        path,
        {**metadata, CHECKSUM_KEY: checksum_placeholder(0)},
        plans,
        lambda plan: [torch.ones(math.prod(plan.shape)).view(torch.uint8)],
    )
    return path


def test_a_file_with_the_least_keys_is_read(tmp_path: Path) -> None:
    with open_gguf(write_foreign(tmp_path / "toy.gguf", {}, {})) as file:
        assert file.config == ModelConfig(
            vocab_size=6, d_model=8, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4, d_ff=8, max_seq_len=8,
            position_encoding="rope", norm="rmsnorm", activation="swiglu", bias=False, dropout=0.0, tie_weights=True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        ({"llama.rope.freq_base": f32(1e6)}, {"position_base": 1e6}),
        ({"llama.attention.head_count_kv": i32s([1])}, {"num_kv_heads": 1}),
        ({"llama.rope.scaling.factor": f32(4.0)}, {"rotary_scaling": {"kind": "linear", "factor": 4.0}}),
        ({"llama.rope.scale_linear": f32(4.0)}, {"rotary_scaling": {"kind": "linear", "factor": 4.0}}),
        ({"llama.rope.scaling.type": text("none"), "llama.rope.scaling.factor": f32(4.0)}, {}),
        ({
            "llama.rope.scaling.type": text("yarn"), "llama.rope.scaling.factor": f32(4.0),
            "llama.rope.scaling.original_context_length": u32(2),
        }, {"rotary_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 2}}),
        ({"llama.rope.scaling.finetuned": Value(ValueType.BOOL, True)}, {}),
        ({"llama.attention.sliding_window": u32(0)}, {}),
        ({"llama.attention.sliding_window": u32(5)}, {"sliding_window": 5}),
        ({"llama.block_count": Value(ValueType.U64, 1)}, {}),
        ({"llama.vocab_size": u32(6), "llama.attention.causal": Value(ValueType.BOOL, True)}, {}),
    ],
)  # fmt: skip
def test_keys_are_read(tmp_path: Path, keys: dict[str, Value | None], settings: dict[str, Any]) -> None:
    shapes = {f"blk.0.attn_{name}.weight": (4, 8) for name in "kv"} if "num_kv_heads" in settings else {}
    with open_gguf(write_foreign(tmp_path / "plain.gguf", {}, {})) as file:
        plain = file.config
    with open_gguf(write_foreign(tmp_path / "toy.gguf", keys, shapes)) as file:
        assert file.config == plain.replace(**settings)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": None}, "general.architecture = None is no architecture that SheepOp reads"),
        ({"general.architecture": text("mamba")}, "'mamba' is no architecture that SheepOp reads. It reads gpt2,"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": u32(0)}, "num_layers"),
        ({"llama.block_count": text("1")}, "llama.block_count = '1' is not a whole number"),
        ({"llama.block_count": u32(2**31)}, "not a whole number of a reasonable size"),
        ({"llama.block_count": u32(2**30)}, "is more than the 512 that llama.cpp has at most"),
        ({"llama.attention.head_count": u32(0)}, "is no number of heads"),
        ({"llama.attention.head_count_kv": i32s([1, 2])}, "differs from layer to layer"),
        ({"llama.attention.head_count_kv": u32(3)}, "does not divide num_heads"),
        ({"llama.attention.layer_norm_rms_epsilon": f32(math.nan)}, "is not a finite number"),
        ({"llama.attention.layer_norm_rms_epsilon": f32(0.0)}, "norm_eps"),
        ({"llama.rope.dimension_count": u32(2)}, "does not fit heads of 4 columns"),
        ({"llama.rope.scaling.type": text("longrope")}, "is a scaling that SheepOp's network has not"),
        ({"llama.rope.scaling.type": text("yarn"), "llama.rope.scaling.factor": f32(2.0)}, "scaling yarn needs it"),
        ({"llama.rope.scaling.attn_factor": f32(2.0)}, "belongs to a scaling that SheepOp's network has not"),
        ({"llama.rope.scaling.type": text("yarn"), "llama.rope.scaling.yarn_beta_fast": f32(8.0)}, "is not 32"),
        ({"llama.vocab_size": u32(7)}, "contradicts the 6 rows of the embedding"),
        ({"llama.attention.causal": Value(ValueType.BOOL, False)}, "the model is no language model"),
        ({"llama.logit_scale": f32(0.5)}, "llama.logit_scale might change what the network computes"),
        ({"llama.expert_count": u32(4), "llama.expert_used_count": u32(2)}, "ffn_gate_exps.weight is missing"),
        ({"llama.expert_count": u32(4), "llama.expert_used_count": u32(9)}, "exceeds experts.count"),
        ({"split.count": u32(3)}, "is one of 3 parts of a model"),
    ],
)  # fmt: skip
def test_keys_that_are_not_honoured_are_named(tmp_path: Path, keys: dict[str, Value | None], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_gguf(write_foreign(tmp_path / "toy.gguf", keys, {}))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"token_embd.weight": None}, "has no embedding"),
        ({"token_embd.weight": (6,)}, "has no embedding"),
        ({"blk.0.attn_q.weight": None}, "blk.0.attn_q.weight is missing"),
        ({"blk.0.attn_q.weight": (8, 4)}, r"blk.0.attn_q.weight has shape \(8, 4\), expected \(8, 8\)"),
        ({"blk.1.attn_q.weight": (8, 8)}, "blk.1.attn_q.weight is unexpected"),
        ({"rope_factors_long.weight": (2,)}, r"is unexpected \(it belongs to LongRoPE"),
        ({"rope_freqs.weight": (3,)}, "has 3 numbers for 4 turned columns"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, shapes: dict[str, tuple[int, ...] | None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_gguf(write_foreign(tmp_path / "toy.gguf", {}, shapes))


def test_divisors_of_one_are_no_scaling(tmp_path: Path) -> None:
    path = write_foreign(tmp_path / "toy.gguf", {}, {"rope_freqs.weight": (2,)})
    with open_gguf(path) as file:
        assert file.config.rotary_scaling is None


def test_a_configuration_that_the_keys_contradict_is_not_believed(tmp_path: Path) -> None:
    own = ModelConfig(vocab_size=6, d_model=8, num_layers=1, num_heads=2, max_seq_len=99, position_encoding="rope")
    keys = {CONFIG_KEY: text(own.model_dump_json())}
    with open_gguf(write_foreign(tmp_path / "toy.gguf", keys, {})) as file:
        assert file.config.max_seq_len == 8
    for content in ("{", "[" * 100_000, "3", '{"d_model": -1}'):
        with open_gguf(write_foreign(tmp_path / "toy.gguf", {CONFIG_KEY: text(content)}, {})) as file:
            assert file.config.max_seq_len == 8


def test_a_table_is_not_computed_before_its_size_is_seen(tmp_path: Path) -> None:
    own = ModelConfig(
        vocab_size=6, d_model=8, num_layers=1, num_heads=2, max_seq_len=2**30, position_encoding="sinusoidal",
        activation="gelu_tanh", d_ff=8, dropout=0.0,
    )  # fmt: skip
    keys = {**config_metadata(ARCHITECTURES["gpt2"], own), **dict.fromkeys(KEYS)}
    with pytest.raises(CheckpointError, match=r"position_embd\.weight is missing"):
        open_gguf(write_foreign(tmp_path / "toy.gguf", keys, {}))


def test_layers_with_a_window_are_read_from_a_rule_or_a_list(make: Callable[..., Any], tmp_path: Path) -> None:
    for layers, listed in (((0, 1, 2), False), ((0, 2), True)):
        toy = make("gemma3", sliding_layers=layers, num_layers=3)
        path = tmp_path / f"{len(layers)}.gguf"
        with Container(toy.write(path)) as container:
            # All layers but every sixth have one; of three layers these are all.
            assert ("gemma3.attention.sliding_window_pattern" in container.metadata) == listed
            if listed:
                assert container.metadata["gemma3.attention.sliding_window_pattern"] == flags([True, False, True])
