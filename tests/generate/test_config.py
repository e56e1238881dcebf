from __future__ import annotations

import math

import pytest

from sheepop.core.config import dump_config, parse_config, validate
from sheepop.core.errors import ConfigError
from sheepop.generate import GenerationConfig
from sheepop.generate.config import requested


def test_the_defaults_are_those_that_read_well() -> None:
    config = GenerationConfig()
    assert (config.temperature, config.top_p, config.top_k, config.repetition_penalty) == (0.8, 0.95, None, 1.0)
    assert config.max_new_tokens == 256
    assert not config.greedy


def test_temperature_zero_is_greedy() -> None:
    assert GenerationConfig(temperature=0).greedy


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("temperature", -0.1, "greater than or equal to 0"),
        ("temperature", math.nan, "finite number"),
        ("temperature", math.inf, "finite number"),
        ("temperature", "warm", "valid number"),
        ("temperature", True, "not true or false"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.01, "less than or equal to 1"),
        ("top_p", math.nan, "finite number"),
        ("top_k", 0, "greater than or equal to 1"),
        ("top_k", -1, "greater than or equal to 1"),
        ("top_k", 2.5, "valid integer"),
        ("repetition_penalty", 0, "greater than or equal to 0.01"),
        ("repetition_penalty", 1e300, "less than or equal to 100"),
        ("max_new_tokens", 0, "greater than or equal to 1"),
        ("seed", "lucky", "valid integer"),
        ("stop", ["END", ""], "empty stop string"),
        ("stop", "", "empty stop string"),
        ("stop", [3], "valid string"),
        ("cache_dtype", "int4", "'auto', 'int8' or 'fp8'"),
        ("activations", "int8", "'exact' or 'rounded'"),
        ("on_overflow", "ignore", "'refuse', 'slide' or 'window'"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(key: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(GenerationConfig, {key: value})
    assert str(caught.value).startswith(key)
    assert words in str(caught.value)


def test_the_memory_is_used_unless_a_request_says_otherwise() -> None:
    for found, expected in ((requested(), True), (requested(memory=False), False), (requested(memory=True), True)):
        assert found.use_memory == expected


def test_a_misspelt_key_is_refused_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"temprature: unknown key\. Did you mean temperature\?"):
        validate(GenerationConfig, {"temprature": 1.0})


def test_one_stop_string_may_stand_alone() -> None:
    assert validate(GenerationConfig, {"stop": "END"}).stop == ("END",)


def test_a_config_survives_its_file() -> None:
    config = GenerationConfig(temperature=1e-3, top_k=5, stop=("\n\n", "ä"), seed=7, on_overflow="window")
    assert validate(GenerationConfig, parse_config(dump_config(config), where="test")) == config
