from __future__ import annotations

import re

import pytest
import yaml

from sheepop.core.config import leaves, parse_config, validate
from sheepop.core.errors import ConfigError
from sheepop.core.keys import keys
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.config_help import all_settings, in_words, render
from sheepop.model.sections import ExpertsConfig


def test_every_key_has_a_meaning():
    lacking = [key.path for key in keys(SheepOpConfig) if len(key.meaning.split()) < 2]
    assert lacking == []


def test_every_key_that_a_meaning_names_in_full_is_known():
    known = {key.path for key in keys(SheepOpConfig)}
    named = {
        name
        for key in keys(SheepOpConfig)
        for name in re.findall(r"`((?:model|tokenizer|data|training|generation)\.[a-z_.]+)`", key.meaning)
    }
    assert named and named <= known


def test_everything_is_written_as_a_config_file_of_all_defaults():
    text = render(all_settings())
    assert validate(SheepOpConfig, parse_config(text, where="everything")) == SheepOpConfig()
    written = dict(leaves(yaml.safe_load(text)))
    assert written.keys() == dict(leaves(SheepOpConfig().model_dump(mode="json"))).keys()


def test_what_is_below_a_key_that_may_be_null_is_valid_without_its_comments():
    text = render(all_settings("model.experts"))
    assert yaml.safe_load(text) == {"model": {"experts": None}}
    text = re.sub("^  #   ", "    ", text, flags=re.MULTILINE)
    text = text.replace("experts: null", "experts:").replace("count:", "count: 4")
    experts = validate(SheepOpConfig, yaml.safe_load(text)).model.experts
    assert experts == ExpertsConfig(count=4)


def test_a_section_holds_its_own_keys_only():
    assert [setting.name for setting in all_settings("training.trouble")] == [
        "trouble",
        "non_finite",
        "spike",
        "window",
        "threshold",
        "max_skips",
        "max_rewinds",
    ]
    assert yaml.safe_load(render(all_settings("data.infilling"))) == {
        "data": {"infilling": {"rate": 0.0, "spm_rate": 0.5}}
    }


def test_all_about_one_key():
    assert render(all_settings("training.log_interval")).splitlines() == [
        "training.log_interval",
        "  type       whole number from 1",
        "  default    10",
        "  meaning    Steps between two rows of training metrics.",
        "  on resume  may change",
    ]
    assert "on resume  cannot change" in render(all_settings("training.learning_rate"))
    assert "default    none, it is required" in render(all_settings("model.experts.count"))


def test_for_programs_a_setting_has_its_schema():
    (found,) = all_settings("training.curriculum_jitter")
    assert found.to_dict() == {
        "key": "training.curriculum_jitter",
        "type": "number from 0 to 1",
        "required": False,
        "default": 0.1,
        "meaning": "How far a row may move from its position by difficulty, as a share of an epoch.",
        "may_change_on_resume": False,
        "is_section": False,
        "schema": {"type": "number", "minimum": 0, "maximum": 1},
    }


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("seed", "whole number from 0"),
        ("model.dropout", "number from 0 to below 1"),
        ("model.norm_eps", "number above 0"),
        ("model.rotary_fraction", "number above 0 up to 1"),
        ("training.max_steps", "whole number from 1 to 1e+12, or `null`"),
        ("training.betas", "pair of number from 0 to below 1 and number from 0 to below 1, or `null`"),
        ("training.compile", "`true` or `false`, or `auto`, or `null`"),
        ("training.sinks", "list of any of `tensorboard`, `wandb`, `mlflow`"),
        ("training.batch_size_warmup", "list of pairs of whole number from 1 and whole number from 1"),
        ("output_dir", "path, or `null`"),
        ("data.paths", "list of paths"),
        ("data.split", "one of `document`, `tail`"),
        ("data.mix", "list of sections"),
        ("model.experts", "section, or `null`"),
        ("training", "section"),
    ],
)
def test_what_a_key_takes_is_said_in_words(key: str, words: str):
    assert all_settings(key)[0].type == words


def test_only_one_bound_above():
    assert in_words({"type": "integer", "maximum": 16}) == "whole number up to 16"


def test_an_unknown_key_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"Did you mean training\.learning_rate\?"):
        all_settings("training.learnig_rate")
