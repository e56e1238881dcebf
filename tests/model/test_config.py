"""The model configuration: presets, derived sizes, refusals that name the key."""

from __future__ import annotations

import pytest
import torch

from sheepop.core.config import dump_config, parse_config, validate
from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig, Transformer, blank_model
from sheepop.model.presets import PRESETS

# Counts of the published checkpoints.
GPT2_PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize(("preset", "count"), GPT2_PARAMETERS.items())
def test_gpt2_presets_have_the_published_number_of_parameters(preset, count):
    with torch.device("meta"):
        model = Transformer(ModelConfig(preset=preset))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds_and_its_file_reads_back_equal(preset):
    config = ModelConfig(preset=preset, vocab_size=97)
    assert validate(ModelConfig, parse_config(dump_config(config), where="test")) == config
    with torch.device("meta"):
        model = blank_model(config)
    assert model.embedding.weight.shape == (97, config.d_model)


def test_llama_small_sizes_have_the_widths_of_the_paper():
    # 8/3 d_model rounded up to a multiple of 32: 768, 1365.3 -> 1376, 2048.
    assert [ModelConfig(preset=f"llama-{size}m").d_ff for size in (15, 42, 110)] == [768, 1376, 2048]


def test_sizes_left_out_are_derived_and_those_given_win():
    config = ModelConfig(d_model=96, num_heads=6)
    assert (config.head_dim, config.num_kv_heads, config.d_ff) == (16, 6, 384)
    config = ModelConfig(d_model=96, num_heads=6, num_kv_heads=3, head_dim=10, d_ff=100)
    assert (config.head_dim, config.num_kv_heads, config.d_ff) == (10, 3, 100)
    config = ModelConfig(preset="gpt2", num_layers=2, activation="relu", vocab_size=None)
    assert (config.num_layers, config.activation, config.d_model, config.vocab_size) == (2, "relu", 768, None)


@pytest.mark.parametrize("no", [False, 0, "n", "false", "off"])
def test_biases_are_left_out_everywhere_however_no_is_written(no):
    config = validate(ModelConfig, {"bias": no})
    names = ("bias", "feed_forward_bias", "attention_bias", "attention_output_bias", "norm_bias")
    assert [getattr(config, name) for name in names] == [False] * 5
    with torch.device("meta"):
        model = blank_model(config.replace(vocab_size=9))
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"d_model": 100, "num_heads": 8}, "d_model = 100 is not divisible by num_heads = 8. Choose a multiple of 8"),
        ({"num_heads": 8, "num_kv_heads": 3}, "num_kv_heads = 3 does not divide num_heads = 8"),
        (
            {"position_encoding": "rope", "head_dim": 33},
            "head_dim = 33 with rotary_fraction = 1.0 gives 33 rotated columns",
        ),
        ({"preset": "gpt5"}, "preset 'gpt5' is not known. Known presets: sheepop-tiny"),
        ({"preset": ["gpt2"]}, r"preset \['gpt2'\] is not known"),
        ({"num_layer": 3}, "num_layer: unknown key. Did you mean num_layers?"),
        ({"d_model": 0}, "d_model = 0: input should be greater than or equal to 1"),
        ({"d_model": "256"}, "d_model = '256': input should be a valid integer"),
        ({"num_layers": True}, "num_layers = True: "),
        ({"num_heads": -4}, "num_heads = -4: input should be greater than or equal to 1"),
        ({"dropout": 1.0}, "dropout = 1.0: input should be less than 1"),
        ({"dropout": float("nan")}, "dropout = nan"),
        ({"norm_eps": 0.0}, "norm_eps = 0.0: input should be greater than 0"),
        ({"position_base": 1.0}, "position_base = 1.0: input should be greater than 1"),
        ({"activation": "gleu"}, "activation = 'gleu': input should be 'relu', 'relu_squared', 'gelu', "),
        ({"activation": ["gelu"]}, r"activation = \['gelu'\]: input should be 'relu'"),
        ({"d_model": 2**31}, "d_model = 2147483648: input should be less than or equal to 2147483647"),
        ({"num_layers": 10_001}, "num_layers = 10001: input should be less than or equal to 10000"),
        ({"position_encoding": "alibi", "position_base": 500.0}, "position_base has no effect with .* alibi"),
        ({"rotary_fraction": 0.5}, "rotary_fraction has no effect with position_encoding: sinusoidal"),
        ({"initialization": "he", "initial_std": 0.1}, "initial_std has no effect with initialization: he"),
        ({"rotary_scaling": {"kind": "linear", "factor": 2}}, "rotary_scaling applies to position_encoding: rope"),
        (
            {"position_encoding": "rope", "rotary_scaling": {"kind": "yarn", "factor": 2}},
            "kind: yarn needs original_max_seq_len",
        ),
        (
            {"position_encoding": "rope", "rotary_scaling": {"kind": "ntk", "factor": 2, "beta_fast": 3}},
            "beta_fast has no effect with kind: ntk",
        ),
        ({"sliding_layers": [0]}, "sliding_layers needs a sliding_window"),
        ({"sliding_window": 4, "sliding_layers": [6]}, "sliding_layers names layer 6, but the layers are 0 to 5"),
        ({"sliding_window": 4, "sliding_layers": [1, 1]}, "sliding_layers names a layer twice"),
        ({"experts": {"count": 2, "per_token": 3}}, "experts.per_token = 3 exceeds experts.count = 2"),
        ({"experts": {"count": 2, "layers": [9]}}, "experts.layers names layer 9"),
        ({"experts": {"count": 6, "groups": 4}}, "experts.groups = 4 does not divide experts.count = 6"),
        ({"experts": {"count": 6, "groups": 2, "groups_per_token": 3}}, "groups_per_token = 3 exceeds experts.groups"),
        (
            {"experts": {"count": 6, "groups": 3, "per_token": 3}},
            "per_token = 3 exceeds the 2 experts of .* = 1 groups",
        ),
        ({"experts": {"count": 6, "groups": 3, "group_top": 3}}, "group_top = 3 exceeds the 2 experts of a group"),
        ({"experts": {"count": 6, "group_top": 2}}, "group_top has no effect without experts.groups"),
        (
            {"position_encoding": "rope", "latent_attention": {"kv_rank": 8, "rope_head_dim": 3}},
            "latent_attention has 3 rotated columns",
        ),
        ({"latent_attention": {"kv_rank": 8, "rope_head_dim": 32}}, "rope_head_dim is not less than head_dim = 32"),
        *(
            ({"latent_attention": {"kv_rank": 8, "rope_head_dim": 4}, **other}, "does not apply to latent_attention")
            for other in ({"num_kv_heads": 2}, {"qk_norm": "head"}, {"short_convolution": 3})
        ),
        (
            {"architecture": "encoder_decoder", "latent_attention": {"kv_rank": 8, "rope_head_dim": 4}},
            "latent_attention applies to architecture: decoder",
        ),
        ({"norm": "rmsnorm", "norm_bias": True}, "norm_bias applies to norm: layernorm; rmsnorm has no bias"),
        ({"parallel_residual": True, "norm_position": "post"}, "parallel_residual adds both branches in one sum"),
        ({"shared_norm": True}, "shared_norm needs parallel_residual, and norm_position: pre or sandwich"),
        ({"shared_norm": True, "parallel_residual": True, "norm_position": "output"}, "shared_norm needs"),
        ({"rotary_layers": [0]}, "rotary_layers applies to position_encoding: rope, not to sinusoidal"),
        ({"position_encoding": "rope", "rotary_layers": [6]}, "rotary_layers names layer 6, but the layers are 0 to 5"),
        ({"residual_scale": 0.0}, "residual_scale = 0.0: input should be greater than 0"),
        (
            {"attention_backend": "sdpa", "attention_soft_cap": 30.0},
            "attention_backend: sdpa has no soft cap; use eager or flex",
        ),
        ({"attention_backend": "flex"}, "attention_backend: flex has no dropout; use eager or sdpa"),
        ({"norm": "batchnorm"}, "norm = 'batchnorm': input should be 'layernorm', 'rmsnorm' or "),
    ],
)
def test_bad_settings_are_refused_in_words(tree, message):
    with pytest.raises(ConfigError, match=message):
        validate(ModelConfig, tree)


def test_a_network_needs_a_vocabulary():
    with pytest.raises(ValueError, match="vocab_size is not resolved yet"):
        Transformer(ModelConfig())


def test_sequences_that_do_not_fit_are_refused():
    model = Transformer(ModelConfig(vocab_size=9, d_model=8, num_layers=1, num_heads=2, max_seq_len=4))
    with pytest.raises(ValueError, match="5 positions do not fit max_seq_len = 4"):
        model(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"input_ids must be \(B, T\), got shape \(3,\)"):
        model(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="logits_to_keep must be at least 1, got 0"):
        model(torch.zeros(1, 3, dtype=torch.long), logits_to_keep=0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("positions", (3,)),
        ("positions", (2, 4)),
        ("positions", (3, 3)),
        ("document_ids", (1, 3)),
        ("document_ids", (3,)),
    ],
)
def test_arguments_of_another_shape_are_refused(name, shape):
    """With three heads and three tokens, positions without a batch would turn every head by another angle."""
    sizes = {"vocab_size": 9, "d_model": 12, "num_layers": 1, "num_heads": 3, "max_seq_len": 4}
    model = blank_model(ModelConfig(**sizes, position_encoding="rope"))
    with pytest.raises(ValueError, match=rf"{name} have shape \({shape[0]},.*input_ids \(2, 3\)"):
        model(torch.zeros(2, 3, dtype=torch.long), **{name: torch.zeros(shape, dtype=torch.long)})


def test_logits_to_keep_are_the_last_ones():
    model = Transformer(ModelConfig(vocab_size=9, d_model=8, num_layers=1, num_heads=2, max_seq_len=8)).eval()
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    torch.testing.assert_close(model(ids, logits_to_keep=2), model(ids)[:, -2:], atol=1e-6, rtol=0)
