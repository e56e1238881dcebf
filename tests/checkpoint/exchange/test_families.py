"""The tables of the families: complete, reversible, and with the defaults of transformers."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.checkpoint.exchange.choice import FAMILIES, choose_family, differences, obstacles
from sheepop.checkpoint.exchange.families.multimodal import MULTIMODAL
from sheepop.checkpoint.exchange.family import KNOWN_VERSION, READ_OF_ALL, Family, read_keys, with_shared
from sheepop.checkpoint.exchange.rope_parameters import LayerRopeParameters, RopeParameters
from sheepop.checkpoint.expected_tensors import expected_tensors
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.mapping import Fixed, Refused, Value, WithoutInfluence, read_fields
from sheepop.core.errors import CheckpointError
from sheepop.model import ModelConfig, Transformer

CONFIG_CLASSES = {
    "llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config",
    "gemma2": "Gemma2Config", "gemma3_text": "Gemma3TextConfig", "phi3": "Phi3Config", "olmo2": "Olmo2Config",
    "mixtral": "MixtralConfig", "qwen3_moe": "Qwen3MoeConfig", "gpt2": "GPT2Config", "gpt_neox": "GPTNeoXConfig",
    "bloom": "BloomConfig", "smollm3": "SmolLM3Config", "cohere2": "Cohere2Config", "exaone4": "Exaone4Config",
    "granite": "GraniteConfig", "olmo3": "Olmo3Config", "glm4": "Glm4Config", "seed_oss": "SeedOssConfig",
    "arcee": "ArceeConfig", "stablelm": "StableLmConfig", "starcoder2": "Starcoder2Config", "gemma": "GemmaConfig",
    "cohere": "CohereConfig", "ernie4_5": "Ernie4_5Config",
    "deepseek_v2": "DeepseekV2Config", "deepseek_v3": "DeepseekV3Config", "glm4_moe_lite": "Glm4MoeLiteConfig",
    "glm4_moe": "Glm4MoeConfig", "minicpm3": "MiniCPM3Config",
    "opt": "OPTConfig", "phi": "PhiConfig", "gptj": "GPTJConfig", "gpt_oss": "GptOssConfig",
    "lfm2": "Lfm2Config", "qwen2_moe": "Qwen2MoeConfig", "qwen3_next": "Qwen3NextConfig",
    "qwen3_5_text": "Qwen3_5TextConfig", "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
    "gemma4_text": "Gemma4TextConfig", "lfm2_moe": "Lfm2MoeConfig", "granitemoe": "GraniteMoeConfig",
    "olmoe": "OlmoeConfig",
}  # fmt: skip


def config_class(family: Family) -> Any:
    return getattr(pytest.importorskip("transformers"), CONFIG_CLASSES[family.model_type])


def test_every_family_is_tested_here():
    assert CONFIG_CLASSES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_key_that_transformers_has_is_accounted_for(family):
    declared = {field.name for field in dataclasses.fields(config_class(family))}
    written = config_class(family)().to_dict().keys()
    handled = set().union(*keys_by_field(family))
    assert (declared | written) - handled - {"model_type", "architectures"} == set()


def keys_by_field(family: Family) -> list[set[str]]:
    """The keys that each field of a family reads."""
    settings: dict[str, Any] = {}
    found = []
    for field in with_shared(family.fields):
        keys = Given({}, "config.json")
        read_fields((field,), keys, settings)
        found.append(keys._read)
    return found


@pytest.mark.parametrize("family", MULTIMODAL.values(), ids=MULTIMODAL)
def test_every_key_around_and_inside_a_language_model_is_accounted_for(family):
    transformers = pytest.importorskip("transformers")
    outer = transformers.AutoConfig.for_model(family.model_type)
    inner = outer.text_config
    for config, fields, elsewhere in (
        (outer, family.fields, {"text_config", "tie_word_embeddings"}),
        (inner, family.text.fields, set()),
    ):
        given = Given({}, "config.json")
        read_keys(fields, given, family.model_type)
        declared = {field.name for field in dataclasses.fields(config)} | type(config).attribute_map.keys()
        assert declared - given._read - elsewhere - {"model_type", "architectures"} == set()
    ours = family.text.read_config({}, "config.json")
    theirs = type(inner)() if family.model_type != "mistral3" else transformers.MistralConfig()
    for field in family.text.fields:
        if isinstance(field, Value) and hasattr(theirs, field.theirs) and field.theirs != "tie_word_embeddings":
            assert field.default == getattr(theirs, field.theirs) or derived(field, theirs, ours), field


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_empty_config_means_what_it_means_to_transformers(family):
    theirs = config_class(family)()
    ours = family.read_config({}, "config.json")
    for field in with_shared(family.fields):
        if isinstance(field, Value) and hasattr(theirs, field.theirs):
            assert field.default == getattr(theirs, field.theirs) or derived(field, theirs, ours), field
        if isinstance(field, Fixed):
            assert getattr(theirs, field.theirs, field.values[0]) in field.values, field
    assert differences(ours, family.read_config(without_ids(theirs.to_dict()), "config.json")) == {}


def derived(field: Value, theirs: Any, ours: ModelConfig) -> bool:
    """Whether the default is null and both sides derive the same number."""
    return field.default is None and getattr(ours, field.ours[0]) == getattr(theirs, field.theirs)


def without_ids(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key != "architectures"}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_no_key_has_two_meanings(family):
    keys = [key for read in keys_by_field(family) for key in read]
    assert [key for key in set(keys) if keys.count(key) > 1] == []


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_value_that_we_do_not_compute_is_refused_by_name(family):
    for field in with_shared(family.fields):
        if isinstance(field, Fixed | Refused):
            with pytest.raises(CheckpointError, match=f"{field.theirs} = "):
                family.read_config({field.theirs: "another"}, "config.json")
        if isinstance(field, WithoutInfluence):
            family.read_config(dict.fromkeys(field.keys, "anything"), "config.json")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_key_that_transformers_does_not_read_is_ignored_and_named(family):
    keys = {"surprise": 0, "_name": "x", "limits": [0.0, float("inf")]}
    reading = family.read(keys, "config.json")
    assert reading.config == family.read_config({}, "config.json")
    assert reading.ignored == ("_name", "limits", "surprise")


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"auto_map": {"AutoConfig": "code.Config"}}, r"surprise of .* program code that comes with the model"),
        ({"transformers_version": "99.1.0.dev0"}, r"surprise of .*, which transformers 99\.1\.0\.dev0 may read"),
        ({"attention_chunk_size": 8}, "attention_chunk_size = 8 is no key of this family, but transformers reads it"),
        ({"is_causal": False}, "is_causal = False"),
    ],
)
def test_an_unknown_key_is_refused_by_name_if_something_may_read_it(family, keys, reason):
    with pytest.raises(CheckpointError, match=reason):
        family.read({"surprise": 0, **keys}, "config.json")
    family.read({"auto_map": {"AutoConfig": "code.Config"}, "transformers_version": "99.1.0"}, "config.json")


def test_the_tables_were_compared_with_the_transformers_that_is_installed():
    version = pytest.importorskip("transformers").__version__
    assert tuple(map(int, version.split(".")[:2])) <= KNOWN_VERSION


# Files of transformers whose code reads the configuration of every language model.
SHARED_CODE = ("cache_utils", "masking_utils", "modeling_rope_utils", "integrations.sdpa_attention")
# Derived from keys that are handled, or without an effect on a model that runs on one device.
NOT_FROM_A_FILE = {"_attn_implementation", "_is_quantized", "num_labels", "default_theta", "is_heterogeneous"}
# Keys of heads for other tasks, of images and of sound, in whose module the language model stands, and of rotation.
OF_OTHERS = {
    "audio_config",
    "audio_token_id",
    "classifier_dropout",
    "hidden_dropout",
    "image_token_id",
    "mm_tokens_per_image",
    "text_config",
    "video_token_id",
    "vision_config",
}
OF_ROTARY = {"rope_parameters", "max_position_embeddings"}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_key_that_the_code_of_transformers_reads_is_accounted_for(family):
    """The code also reads keys that the class of the configuration does not declare, by `getattr`."""
    theirs = config_class(family)
    modules = [importlib.import_module(f"transformers.{name}") for name in SHARED_CODE]
    modules.append(importlib.import_module(theirs.__module__.replace(".configuration_", ".modeling_")))
    read = set().union(*map(keys_read_in, modules)) | theirs.attribute_map.keys()
    given = Given({}, "config.json")
    read_keys(family.fields, given, family.model_type)
    handled = given._read | set(READ_OF_ALL.keys)
    own = {name: getattr(theirs, name, None) for name in dir(theirs)}
    methods = {name for name, value in own.items() if callable(value) or isinstance(value, property)}
    turns = any(isinstance(field, RopeParameters | LayerRopeParameters) for field in family.fields)
    of_images = keys_of_images(theirs)
    others = NOT_FROM_A_FILE | OF_OTHERS | of_images | (set() if turns else OF_ROTARY)
    assert sorted(read - handled - methods - others) == []


def keys_of_images(config: Any) -> set[str]:
    """The keys that only the networks for images and sound have, whose classes stand beside that of the text."""
    module = importlib.import_module(config.__module__)
    classes = [found for name, found in vars(module).items() if name.endswith(("VisionConfig", "AudioConfig"))]
    return {field.name for found in classes for field in dataclasses.fields(found)} - {
        field.name for field in dataclasses.fields(config)
    }


def keys_read_in(module: ModuleType) -> set[str]:
    """The attributes of anything called `config`, or ending in it, that a module's code reads."""

    def is_config(node: ast.AST) -> bool:
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        return name in ("config", "layer_config", "effective_config", "text_config", "decoder_config")

    found = set()
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and is_config(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            holder, name = node.args[:2]
            if is_config(holder) and isinstance(name, ast.Constant):
                found.add(str(name.value))
    return found


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_transformers_reads_what_is_written_as_the_same_configuration(family):
    config = family.read_config({}, "config.json")
    theirs = config_class(family)(
        **family.write_config(config), bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    again = family.read_config(without_ids(theirs.to_dict()), "config.json")
    assert differences(config, again) == {}


# Our configuration, drawn at random

sizes = st.integers(1, 3)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """A decoder with any choice that the configuration has; combinations that it refuses are not drawn."""
    num_kv_heads, head_dim, layers = draw(sizes), 2 * draw(sizes), draw(sizes)
    num_heads = num_kv_heads * draw(sizes)
    rope = draw(st.booleans())
    norm = draw(st.sampled_from(["layernorm", "rmsnorm", "rmsnorm_zero_centered"]))
    some_layers = st.lists(st.integers(0, layers - 1), min_size=1, unique=True).map(tuple)
    window = draw(st.none() | st.integers(1, 9))
    keys: dict[str, Any] = {
        "vocab_size": draw(st.integers(1, 9)),
        "d_model": num_heads * draw(sizes),
        "num_layers": layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "value_head_dim": draw(st.none() | sizes),
        "d_ff": draw(sizes),
        "position_encoding": "rope" if rope else draw(st.sampled_from(["sinusoidal", "learned", "alibi", "none"])),
        "norm": norm,
        "norm_position": draw(st.sampled_from(["pre", "sandwich", "output"])),
        "norm_bias": draw(st.booleans()) if norm == "layernorm" else False,
        "final_norm": draw(st.booleans()),
        "embedding_norm": draw(st.booleans()),
        "qk_norm": draw(st.sampled_from([None, "head", "own_head", "width"])),
        "activation": draw(st.sampled_from(["relu", "relu_squared", "gelu", "gelu_tanh", "swiglu", "geglu_tanh"])),
        "attention_sinks": draw(st.booleans()),
        "head_bias": draw(st.booleans()),
        "residual_scale": draw(st.sampled_from([1.0, 1.0, 0.5])),
        "logit_scale": draw(st.sampled_from([1.0, 1.0, 0.25])),
        "embedding_scale": draw(st.sampled_from([None, None, 2.5])),
        "tie_weights": draw(st.booleans()),
        "sliding_window": window,
        "sliding_layers": None if window is None else draw(st.none() | some_layers),
    }
    keys |= {name: draw(st.booleans()) for name in ("attention_bias", "attention_output_bias", "feed_forward_bias")}
    keys["parallel_residual"] = draw(st.booleans())
    keys["shared_norm"] = keys["parallel_residual"] and keys["norm_position"] != "output" and draw(st.booleans())
    if rope:
        keys["rotary_layers"] = draw(st.none() | some_layers)
        keys["rotary_fraction"] = draw(st.sampled_from([1.0] if head_dim == 2 else [1.0, 2 / head_dim]))
        keys["rotary_scaling"] = draw(st.sampled_from([None, {"kind": "linear", "factor": 2.0}]))
        keys["sliding_position_base"] = None if window is None else draw(st.sampled_from([None, 50.0]))
    if draw(st.booleans()):
        keys["experts"] = {
            "count": 3, "per_token": draw(sizes), "d_ff": draw(st.none() | sizes), "shared": draw(st.integers(0, 2)),
            "layers": draw(st.none() | some_layers), "normalize": draw(st.booleans()),
            "router_bias": draw(st.booleans()),
        }  # fmt: skip
    return ModelConfig(**keys)


@settings(max_examples=80)
@given(configs())
def test_the_expected_tensors_are_those_of_the_network(config):
    with torch.device("meta"):
        state = Transformer(config).state_dict()
    if config.tie_weights:
        del state["lm_head.weight"]
    assert expected_tensors(config) == {name: tuple(tensor.shape) for name, tensor in state.items()}


@settings(max_examples=80)
@given(configs())
def test_a_family_that_expresses_a_configuration_has_a_place_for_every_tensor(config):
    able = [family for family in FAMILIES.values() if not obstacles(family, config)]
    for family in able:
        assert differences(config, family.read_config(family.write_config(config), "config.json")) == {}
        ours = [name for group in family.tensor_groups(config) for name in group.ours]
        assert sorted(ours) == sorted(expected_tensors(config))
        theirs = [name for group in family.tensor_groups(config) for name in group.theirs]
        assert len(theirs) == len(set(theirs))
    if not able:
        with pytest.raises(CheckpointError, match="No model family of transformers can express this model"):
            choose_family(config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm": "layernorm"}, r"llama: .*norm \(layernorm here, rmsnorm there\)"),
        ({"rotary_scaling": {"kind": "ntk", "factor": 2.0}}, r"llama: rotary_scaling \(ntk here, none there, in"),
        ({"value_head_dim": 4}, r"llama: value_head_dim \(4 here, 8 there\)"),
        ({"attention_sinks": True}, r"llama: attention_sinks \(true here, false there\)"),
        ({"attention_scale": 0.3, "qk_norm": "width"}, r"llama: .*attention_scale \(0.3 here, 0.35"),
        ({"experts": {"count": 4, "scores": "sigmoid"}}, r"mixtral: experts.scores \(sigmoid here, softmax there\)"),
        ({"experts": {"count": 4, "shared": 1}}, r"mixtral: experts.shared \(1 here, 0 there\)"),
        ({"initialization": "mup", "mup_base_d_model": 16, "qk_norm": "head"}, r"llama: .*logit_scale \(0.5 here, 1.0"),
    ],
)
def test_what_no_family_expresses_is_refused_with_the_key_that_stands_in_the_way(changes, reason):
    with pytest.raises(CheckpointError, match=reason) as caught:
        choose_family(llama(**changes))
    assert all(f"\n  {name}: " in str(caught.value) for name in FAMILIES)


@pytest.mark.parametrize(
    ("changes", "parts", "settings"),
    [
        ({"ngrams": {"rows": 9}}, "no n-gram embeddings", "model.ngrams=null"),
        ({"short_convolution": 3}, "no short convolutions", "model.short_convolution=null"),
    ],
)
def test_what_only_we_compute_is_refused_in_a_line(changes: dict[str, Any], parts: str, settings: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        choose_family(llama(**changes))
    assert str(caught.value) == (
        f"transformers has {parts}. For a model that other programs can run, train with --exportable, which means "
        f"{settings}."
    )


def llama(**changes: Any) -> ModelConfig:
    return ModelConfig(
        **{"vocab_size": 9, "d_model": 32, "num_heads": 4, "num_layers": 2, "preset": "llama-1m", **changes}
    )


def test_a_width_that_transformers_refuses_for_llama_goes_to_another_family():
    config = llama(d_model=30, head_dim=8)
    assert obstacles(FAMILIES["llama"], config) == ["d_model (30 is not a multiple of num_heads = 4)"]
    assert choose_family(config).model_type == "mistral"
    with pytest.raises(Exception, match="hidden size"):
        config_class(FAMILIES["llama"])(**FAMILIES["llama"].write_config(config))


def test_the_family_that_a_model_came_from_is_preferred():
    assert choose_family(llama()).model_type == "llama"
    assert choose_family(llama(), "mistral").model_type == "mistral"
    assert choose_family(llama(), "bloom").model_type == "llama"
