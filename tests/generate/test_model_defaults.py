"""The settings that a model's generation_config.json asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig as Theirs

from sheepop.core.errors import CheckpointError, UsageError
from sheepop.generate import GenerationConfig
from sheepop.generate.config import model_defaults, requested

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 106]}
FILES: list[dict[str, Any]] = [
    QWEN,
    {"do_sample": True, "top_k": 64, "top_p": 0.9},
    {"do_sample": True},
    {"do_sample": True, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.05},
    {"do_sample": False, "repetition_penalty": 1.1},
    {"temperature": 0.7, "top_p": 0.8},
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: "-".join(file))
def test_they_are_those_of_transformers(file: dict[str, Any], tmp_path: Path):
    """What a file leaves out has transformers' default."""
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    stated = Theirs.from_pretrained(tmp_path)
    theirs = {**Theirs._get_default_generation_params(), **{k: v for k, v in vars(stated).items() if v is not None}}
    ours = requested().over(model_defaults(file, "a model"))
    assert ours.repetition_penalty == theirs["repetition_penalty"]
    assert ours.greedy is not theirs["do_sample"]
    if theirs["do_sample"]:
        assert (ours.temperature, ours.top_p, ours.min_p) == (
            theirs["temperature"], theirs["top_p"], theirs.get("min_p") or 0.0,
        )  # fmt: skip
        assert ours.top_k == (theirs["top_k"] or None)


@pytest.mark.parametrize("file", [{}, {"eos_token_id": [1, 106], "bos_token_id": 2, "top_k": None}])
def test_a_file_without_settings_of_sampling_changes_nothing(file: dict[str, Any]):
    assert model_defaults(file, "a model") == {}
    assert requested(top_k=3).over({}) == requested(top_k=3)


def test_given_settings_win():
    defaults = model_defaults(QWEN, "a model")
    found = requested(temperature=0.9, top_k=3, max_new_tokens=5).over(defaults)
    assert (found.temperature, found.top_k, found.top_p, found.max_new_tokens) == (0.9, 3, 0.95, 5)
    greedy = requested(greedy=True).over(defaults)
    assert greedy.greedy and greedy.top_k is None and greedy.on_overflow == "slide"
    searching = requested(beams=2).over(defaults)
    assert searching == requested(beams=2)


@pytest.mark.parametrize(("setting", "value"), [("top_k", 5), ("top_p", 0.5), ("num_completions", 2)])
def test_sampling_from_a_greedy_model_needs_a_temperature(setting: str, value: Any):
    defaults = model_defaults({"do_sample": False}, "a model")
    with pytest.raises(UsageError, match=rf"{setting} = .* Give a temperature above 0 too"):
        requested(**{setting: value}).over(defaults)
    assert getattr(requested(**{setting: value, "temperature": 0.5}).over(defaults), setting) == value


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({"do_sample": 1}, "do_sample = '1' is not true or false"),
        ({"do_sample": True, "temperature": "hot"}, "temperature = 'hot' is not a number"),
        ({"do_sample": True, "top_p": 1.5}, "top_p"),
        ({"do_sample": True, "top_k": -3}, "top_k"),
        ({"do_sample": True, "temperature": float("nan")}, "temperature"),
        ({"repetition_penalty": [1.0]}, "repetition_penalty"),
    ],
)
def test_a_wrong_value_is_refused(file: dict[str, Any], words: str):
    with pytest.raises(CheckpointError, match=f"^a model: .*{words}"):
        model_defaults(file, "a model")


def test_a_configuration_that_is_complete_has_no_defaults():
    complete = GenerationConfig(temperature=1.0, top_p=1.0).replace(seed=1)
    assert complete.over(model_defaults(QWEN, "a model")) == complete
