"""The configuration of every published model below is read as it stands, and comes to the size its makers give."""

from __future__ import annotations

import math

import pytest

from sheepop.checkpoint.exchange.choice import FAMILIES, choose_family
from sheepop.checkpoint.exchange.families.multimodal import MULTIMODAL
from sheepop.checkpoint.expected_tensors import expected_tensors
from sheepop.model import ModelConfig

from .published import PUBLISHED, Published


def test_every_family_has_a_published_model_here():
    assert {published.keys["model_type"] for published in PUBLISHED.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_and_has_the_published_number_of_parameters(name):
    published = PUBLISHED[name]
    config = read(published)
    found = {key: getattr(config, key) for key in published.expected}
    assert {key: value(0) if callable(value) else value for key, value in found.items()} == published.expected
    assert parameters(config) == published.parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_5_writes_the_same_configuration_with_its_own_spelling(name):
    transformers = pytest.importorskip("transformers")
    published = PUBLISHED[name]
    theirs = transformers.AutoConfig.for_model(**published.keys).to_dict()
    assert "rope_theta" not in theirs
    assert FAMILIES[theirs["model_type"]].read_config(theirs, name) == read(published)


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_export_goes_back_to_the_family_that_it_came_from(name):
    published = PUBLISHED[name]
    family = choose_family(read(published), published.keys["model_type"])
    assert family.model_type == published.keys["model_type"]


def test_the_language_model_of_a_multimodal_model_has_the_published_number_of_parameters():
    """Gemma 3 4B: 4,300,079,472 parameters, of which 416,866,032 of sight and 2,950,272 between the two."""
    keys = {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
        },
    }  # fmt: skip
    gemma = MULTIMODAL["gemma3"]
    text, _, notes = gemma.language_model(keys, {}, "config.json")
    reading = gemma.text.read(text, "config.json")
    assert (notes, reading.ignored) == ([], ())
    assert parameters(reading.config) == 4_300_079_472 - 416_866_032 - 2_950_272


def read(published: Published) -> ModelConfig:
    return FAMILIES[published.keys["model_type"]].read_config(published.keys, "config.json")


def parameters(config: ModelConfig) -> int:
    """All numbers but the router's balance, which other programs do not have."""
    shapes = expected_tensors(config)
    return sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith(".router.balance"))
