from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, field_validator, model_validator

from sheepop.core.config import (
    Config,
    PathText,
    apply_overrides,
    dump_config,
    leaves,
    merge,
    parse_config,
    read_config_file,
    validate,
)
from sheepop.core.errors import ConfigError


class Network(Config):
    d_model: int = Field(128, ge=1)
    num_heads: int = 4
    dropout: float = Field(0.0, ge=0, lt=1)
    bias: bool = True
    activation: Literal["relu", "gelu"] = "gelu"

    @model_validator(mode="after")
    def _heads_divide(self) -> Network:
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model {self.d_model} is not divisible by num_heads {self.num_heads}")
        return self


class Optimizer(Config):
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int | None = None
    compile: bool | Literal["auto"] = "auto"

    @field_validator("learning_rate")
    @classmethod
    def _positive(cls, value: float) -> float:
        if value <= 0:
            raise ValueError("must be positive")
        return value


class Tree(Config):
    model: Network = Network()
    training: Optimizer | None = Optimizer()
    paths: tuple[str, ...] = ()
    name: str = ""
    seed: int = 0


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(Tree, tree)
    return str(caught.value)


# Reading YAML and JSON


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.5E+3", 1500.0),
        (".5e1", 5.0),
        ("-2e4", -20000.0),
        ("3", 3),
        ("1_000", 1000),
        ("0x1f", 31),
        ("0o17", 15),
        ("017", 17),
        ("12:30", "12:30"),
        ("2024-01-31", "2024-01-31"),
        ("2024-99-99", "2024-99-99"),
        ("yes", True),
        ("off", False),
        ("~", None),
        ("'1e-3'", "1e-3"),
        ("1e", "1e"),
        ("e3", "e3"),
        ("[1e-3, 2]", [0.001, 2]),
    ],
)
def test_a_yaml_value_means_what_a_reader_expects(text: str, value: Any):
    found = parse_config(f"key: {text}", where="test")["key"]
    assert found == value
    assert type(found) is type(value)


def test_json_and_yaml_of_one_tree_are_equal(tmp_path: Path):
    tree = {"model": {"d_model": 64, "dropout": 1e-7}, "paths": ["a", "é"], "seed": 3}
    (tmp_path / "c.json").write_text(json.dumps(tree), encoding="utf-8")
    (tmp_path / "c.yaml").write_text(
        "model: {d_model: 64, dropout: 1e-7}\npaths:\n- a\n- é\nseed: 3\n", encoding="utf-8"
    )
    assert read_config_file(tmp_path / "c.json") == read_config_file(tmp_path / "c.yaml") == tree


def test_a_byte_order_mark_is_no_part_of_the_config(tmp_path: Path):
    (tmp_path / "c.json").write_bytes(b'\xef\xbb\xbf{"seed": 3}')
    assert read_config_file(tmp_path / "c.json") == {"seed": 3}


class Lists(Config):
    texts: tuple[str, ...] = ()
    chosen: tuple[Literal["a", "b"], ...] = ()
    pair: tuple[str, str] | None = None
    numbers: tuple[int, ...] = ()
    paths: tuple[PathText, ...] = ()


def test_a_list_of_one_text_may_be_written_without_brackets():
    found = validate(Lists, apply_overrides({}, ["texts=one, and more", "chosen=b", "paths=a/b"]))
    assert (found.texts, found.chosen, found.paths) == (("one, and more",), ("b",), ("a/b",))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("texts=3", "texts = 3: must be a list, in brackets"),
        ("chosen=c", "chosen.0 = 'c': input should be 'a' or 'b'"),
        ("pair=one", "pair = 'one': must be a list, in brackets"),
        ("numbers=1", "numbers = 1: must be a list, in brackets"),
    ],
)
def test_what_is_no_list_of_texts_needs_its_brackets(override: str, message: str):
    with pytest.raises(ConfigError) as caught:
        validate(Lists, apply_overrides({}, [override]))
    assert str(caught.value) == message


def test_an_empty_file_changes_nothing():
    assert parse_config("", where="test") == {}
    assert parse_config("# only a comment\n", where="test") == {}


@pytest.mark.parametrize(
    ("text", "is_json", "message"),
    [
        ("seed: 1\nseed: 2\n", False, "test, line 2: not valid YAML (the key 'seed' appears twice)."),
        ("model:\n  bias: 1\n  bias: 1\n", False, "test, line 3: not valid YAML (the key 'bias' appears twice)."),
        ('{"seed": 1, "seed": 2}', True, "test: the key 'seed' appears twice."),
        ("seed: [1\n", False, "test, line 2: not valid YAML"),
        ('{"seed": 1,\n nope}', True, "test, line 2: not valid JSON"),
        ("- 1\n- 2\n", False, "test must be a mapping of keys to values, not list."),
        ("just words", False, "test must be a mapping of keys to values, not str"),
        ("a: !!python/object/apply:os.system [ls]", False, "could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", False, "test, line 2: not valid YAML (but found another document)."),
        ("[" * 100_000, True, "test: nested too deeply for a config."),
        ("a: " + "[" * 5_000, False, "test: nested too deeply for a config."),
        ("&a {self: *a}", False, "test: more than 100,000 values"),
    ],
)
def test_text_that_is_no_config_is_refused_with_its_place(text: str, is_json: bool, message: str):
    with pytest.raises(ConfigError) as caught:
        parse_config(text, where="test", is_json=is_json)
    assert message in str(caught.value)


def test_aliases_that_multiply_are_refused():
    lines = ["a0: &a0 {x: 1, y: 2}"]
    lines += [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40)]
    with pytest.raises(ConfigError, match="more than 100,000 values"):
        parse_config("\n".join(lines), where="test")


def test_a_missing_and_an_unreadable_file_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.yaml does not exist"):
        read_config_file(tmp_path / "absent.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    with pytest.raises(ConfigError, match=r"latin\.yaml cannot be read"):
        read_config_file(tmp_path / "latin.yaml")


# Overrides


def test_overrides_apply_in_order_and_leave_the_original_alone():
    tree = {"model": {"d_model": 64}}
    changed = apply_overrides(tree, ["model.d_model=32", "training.learning_rate=1e-3", "model.d_model=16", "seed=7"])
    assert changed == {"model": {"d_model": 16}, "training": {"learning_rate": 0.001}, "seed": 7}
    assert tree == {"model": {"d_model": 64}}


@pytest.mark.parametrize(
    ("override", "value"),
    [("a=", ""), ("a= ", ""), ("a=[1, x]", [1, "x"]), ("a=*.pyc", "*.pyc"), ("a=b=c", "b=c"), ("a=null", None)],
)
def test_the_value_of_an_override_is_yaml_or_else_text(override: str, value: Any):
    assert apply_overrides({}, [override]) == {"a": value}


@pytest.mark.parametrize("override", ["seed", "=3", "model..bias=1", ".seed=1"])
def test_an_override_without_key_and_value_is_refused(override: str):
    with pytest.raises(ConfigError, match="is not a setting of the form key=value"):
        apply_overrides({}, [override])


def test_a_path_in_the_place_of_an_override_is_told_its_option(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"Did you mean --data {re.escape(str(tmp_path))}"):
        apply_overrides({}, [str(tmp_path)])


def test_an_override_below_a_plain_value_is_refused():
    with pytest.raises(ConfigError, match="seed is a value, not a section"):
        apply_overrides({"seed": 3}, ["seed.x=1"])


def test_a_section_that_is_null_is_begun_by_an_override_of_a_key_in_it():
    assert apply_overrides({"a": {"b": None}}, ["a.b.c=1", "a.b.d=2"]) == {"a": {"b": {"c": 1, "d": 2}}}
    assert apply_overrides({}, ["a.b.c=1", "a.b=null"]) == {"a": {"b": None}}


def test_an_override_with_a_key_twice_is_refused():
    with pytest.raises(ConfigError, match="the key 'a' appears twice"):
        apply_overrides({}, ["model={a: 1, a: 2}"])


def test_leaves_are_the_values_of_all_sections_under_their_paths():
    tree = {"seed": 1, "model": {"d_model": 8, "rope": {"base": [1, {"no": "section"}]}, "empty": {}}}
    assert dict(leaves(tree)) == {"seed": 1, "model.d_model": 8, "model.rope.base": [1, {"no": "section"}]}


def test_merge_goes_section_by_section():
    base = {"model": {"d_model": 64, "bias": True}, "paths": ["a", "b"]}
    assert merge(base, {"model": {"bias": False}, "paths": ["c"], "seed": 1}) == {
        "model": {"d_model": 64, "bias": False},
        "paths": ["c"],
        "seed": 1,
    }
    assert base == {"model": {"d_model": 64, "bias": True}, "paths": ["a", "b"]}


# Validation


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"model": {"d_modle": 4}}, "model.d_modle: unknown key. Did you mean model.d_model?"),
        ({"learning_rate": 1}, "learning_rate: unknown key. Did you mean training.learning_rate?"),
        (
            {"model": {"zzz": 4}},
            "model.zzz: unknown key. Known keys here: d_model, num_heads, dropout, bias, activation.",
        ),
        ({"model": {"dropout": 1.5}}, "model.dropout = 1.5: input should be less than 1"),
        ({"model": {"activation": "gulu"}}, "model.activation = 'gulu': input should be 'relu' or 'gelu'"),
        ({"model": {"d_model": 10}}, "model: d_model 10 is not divisible by num_heads 4"),
        ({"training": {"learning_rate": -1}}, "training.learning_rate = -1: must be positive"),
        ({"training": {"betas": [0.9]}}, "training.betas.1: this key is required."),
        ({"seed": 1.5}, "seed = 1.5: input should be a valid integer"),
        ({"seed": "many"}, "seed = 'many': input should be a valid integer"),
        ({"model": {"dropout": float("nan")}}, "model.dropout = nan: input should be a finite number"),
        ({"model": {"dropout": "inf"}}, "model.dropout = 'inf': input should be a finite number"),
        ({"name": 2024}, "name = 2024: input should be a valid string; to give it as text, put it in quotes"),
        ({1: 2}, "1 = 1: keys should be strings"),
        ({"model": 3}, "model = 3: input should be a valid dictionary"),
    ],
)
def test_a_refusal_names_key_value_and_what_is_allowed(tree: dict[str, Any], message: str):
    assert message in refusal(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"seed": True},
        {"model": {"d_model": False}},
        {"model": {"dropout": True}},
        {"training": {"betas": [True, 0.9]}},
        {"training": {"warmup_steps": True}},
    ],
)
def test_a_truth_value_is_no_number(tree: dict[str, Any]):
    assert "must be a number, not true or false" in refusal(tree)


def test_literals_of_the_right_kind_are_read():
    tree = validate(
        Tree,
        {
            "seed": "12",
            "model": {"dropout": "1e-3", "d_model": 64.0, "bias": "no"},
            "training": {"compile": True, "warmup_steps": None},
        },
    )
    assert (tree.seed, tree.model.dropout, tree.model.d_model, tree.model.bias) == (12, 0.001, 64, False)
    assert tree.training == Optimizer(compile=True)


def test_every_offending_key_is_listed_once():
    text = refusal({"sede": 1, "model": {"dropout": 2, "d_model": 0}})
    assert [line.partition(":")[0].partition(" ")[0] for line in text.splitlines()] == [
        "model.d_model",
        "model.dropout",
        "sede",
    ]


def test_a_huge_value_is_shown_shortened():
    assert len(refusal({"seed": "9" * 3_000 + "x"})) < 300


def test_a_config_never_changes():
    tree = Tree()
    with pytest.raises(ValueError, match="frozen"):
        tree.seed = 4  # type: ignore[misc]
    assert tree.replace(seed=4).seed == 4
    assert tree.seed == 0
    with pytest.raises(ConfigError, match="unknown key"):
        tree.replace(sede=4)


awkward_text = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])),
    st.sampled_from(
        [
            "1e5",
            "1e-3",
            "2024-01-01",
            "12:30",
            "007",
            "0o7",
            "null",
            "no",
            ".5e3",
            "1_0",
            "<<",
            "=",
            "- a",
            "",
            "\x85",
            "a\u2028b",
        ]
    ),
)


@given(
    seed=st.integers(-(2**63), 2**63),
    name=awkward_text,
    paths=st.lists(awkward_text, max_size=3),
    rate=st.floats(min_value=1e-300, max_value=1e300),
)
def test_a_dumped_config_reads_back_equal(seed: int, name: str, paths: list[str], rate: float):
    tree = Tree(seed=seed, name=name, paths=tuple(paths), training=Optimizer(learning_rate=rate))
    assert validate(Tree, parse_config(dump_config(tree), where="dump")) == tree
