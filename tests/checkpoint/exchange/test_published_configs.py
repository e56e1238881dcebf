"""The configuration of every published model below is read as it stands, and comes to the size its makers give."""

from __future__ import annotations

import math

import pytest

from sheepop.checkpoint.exchange.choice import FAMILIES, choose_family
from sheepop.checkpoint.expected_tensors import expected_tensors
from sheepop.model import ModelConfig

from .published import PUBLISHED, Published


def test_every_family_has_a_published_model_here():
    assert {published.keys["model_type"] for published in PUBLISHED.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_and_has_the_published_number_of_parameters(name):
    published = PUBLISHED[name]
    config = read(published)
    assert {key: getattr(config, key) for key in published.expected} == published.expected
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


def read(published: Published) -> ModelConfig:
    return FAMILIES[published.keys["model_type"]].read_config(published.keys, "config.json")


def parameters(config: ModelConfig) -> int:
    """All numbers but the router's balance, which other programs do not have."""
    shapes = expected_tensors(config)
    return sum(math.prod(shape) for name, shape in shapes.items() if not name.endswith(".router.balance"))
