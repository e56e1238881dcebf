"""Every key of the configuration is read by code outside the module that declares it: a key nobody reads is a defect.

What is found is an attribute of that name, read from something that stands for its section (``config.model.dropout``,
``training.eval_tokens``, ``self._config.stop``) or from a name that a function takes as that section's class. A section
inside another (``data.clean.pii``) has too common a name to go by: it is what a function takes as its class, or what is
read under its name from what stands for the section around it (``clean.pii``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from sheepop.core.config import Config
from sheepop.core.keys import keys
from sheepop.jobs.config import SheepOpConfig

SOURCE = Path(__file__).parent.parent / "src" / "sheepop"
SECTIONS = {key.path: key.section for key in keys(SheepOpConfig) if key.section is not None}
LISTS = {key.path for key in keys(SheepOpConfig) if key.field.default == ()}
# Declared beside the code that they configure: there, everything but the class itself counts.
READ_BESIDE = {"data.mix", "training.trouble", "model.rotary_scaling"}
# What a section is called in something else that is handed on: the `Context` of an extractor has its config.
CALLED = {"data.extract": "context.config"}
# Keys that are read through a property of the class, or of what the class resolves to.
READ_AS = {
    ("model", "vocab_size"): ("vocabulary",),
    ("model", "num_kv_heads"): ("kv_heads",),
    ("model", "head_dim"): ("head_size",),
    ("model", "d_ff"): ("ffn_size",),
    ("model", "value_head_dim"): ("value_size",),
    ("model", "rotary_fraction"): ("rotary_dim",),
    ("model", "attention_scale"): ("score_scale",),
    ("model", "mup_base_head_dim"): ("score_scale",),
    ("model", "logit_scale"): ("output_scale",),
    ("model", "sliding_window"): ("window",),
    ("model", "sliding_layers"): ("window",),
    ("training", "batch_size_warmup"): ("batch_sizes",),
    ("tuning.dpo", "loss_type"): ("losses",),
    ("tuning.ppo", "reward"): ("rewards",),
    ("tuning.grpo", "reward"): ("rewards",),
    ("training", "sequence_length_warmup"): ("row_lengths",),
    ("generation", "temperature"): ("temperature", "greedy"),
    ("tuning.lora", "alpha"): ("scale",),
}
# Read where the class resolves itself, before any other code sees it.
READ_AT_HOME = {("model", "preset"), ("model", "bias"), ("model.experts", "layers"), ("data.clean", "preset")}


def module_of(config_class: type[BaseModel]) -> Path:
    return SOURCE.parent.joinpath(*config_class.__module__.split(".")).with_suffix(".py")


@dataclass(frozen=True, eq=False)
class Module:
    """What is looked at in a module: names with the class they are declared as, assignments, loops, attributes read."""

    declared: list[tuple[str, str]]
    assigned: list[tuple[ast.expr, ast.expr]]
    loops: list[tuple[ast.expr, ast.expr]]
    attributes: list[ast.Attribute]


@cache
def parsed(text: str, without: str = "") -> Module:
    """The module with this text, without the body of one class."""
    tree = ast.parse(text)
    body = [node for node in tree.body if not (isinstance(node, ast.ClassDef) and node.name == without)]
    nodes = [node for statement in body for node in ast.walk(statement)]
    return Module(
        declared=[
            (node.arg if isinstance(node, ast.arg) else ast.unparse(node.target), ast.unparse(node.annotation))
            for node in nodes
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None
        ],
        assigned=[pair for node in nodes if isinstance(node, ast.Assign) for pair in pairs(node)],
        loops=[(node.target, node.iter) for node in nodes if isinstance(node, ast.For | ast.comprehension)],
        attributes=[node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)],
    )


@cache
def section_names(module: Module, section: str, class_name: str) -> set[str]:
    """Names that hold the section in a module: parameters and fields of its class, and what is assigned from one."""
    names = set() if "." in section else {section, f"_{section}_config", f"{section}_config"}
    names |= {name for name, kind in module.declared if kind.removesuffix(" | None") == class_name}
    for target, value in module.assigned:
        if stands_for(value, section, names, module):
            names.add(last_name(target))
    return names | (names_of_entries(module, class_name) if section in LISTS else set())


def names_of_entries(module: Module, class_name: str) -> set[str]:
    """What loops over a list of such entries call one of them."""
    lists = {name for name, kind in module.declared if class_name in kind}
    lists |= {last_name(target) for target, value in module.assigned if lists & names_in(value)}
    return {name for target, value in module.loops if lists & names_in(value) for name in names_in(target)}


def names_in(node: ast.expr) -> set[str]:
    return {last_name(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)}


def stands_for(node: ast.expr, section: str, names: set[str], module: Module) -> bool:
    """Whether an expression is one of `names`, or is read under the section's name from the section around it."""
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    if section in CALLED and ast.unparse(node) == CALLED[section]:
        return True
    around, _, name = section.rpartition(".")
    if around and isinstance(node, ast.Attribute) and node.attr == name:
        return stands_for(node.value, around, section_names(module, around, SECTIONS[around].__name__), module)
    return last_name(node) in names


def pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        values = node.value.elts if isinstance(node.value, ast.Tuple) else []
        if isinstance(target, ast.Tuple) and len(target.elts) == len(values):  # a starred value stands for several
            yield from zip(target.elts, values, strict=True)
        else:
            yield target, node.value


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def attributes_read(module: Module, section: str, class_name: str) -> set[str]:
    names = section_names(module, section, class_name)
    return {node.attr for node in module.attributes if stands_for(node.value, section, names, module)}


def unread_keys(section: str, config_class: type[BaseModel], sources: dict[Path, str]) -> set[str]:
    read: set[str] = set()
    for path, text in sources.items():
        if path != module_of(config_class) or section in READ_BESIDE:
            module = parsed(text, without=config_class.__name__ if path == module_of(config_class) else "")
            for kind in config_class.__mro__:  # a key that several sections have is read through what they share
                if issubclass(kind, Config) and kind is not Config:
                    read |= attributes_read(module, section, kind.__name__)
            if section == "training":
                read |= attributes_read(module, "resolved", "ResolvedTraining")
    return {
        key
        for key in config_class.model_fields
        if (section, key) not in READ_AT_HOME and not read.intersection(READ_AS.get((section, key), (key,)))
    }


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    # The report shows settings, which is no use of them.
    return {path: path.read_text() for path in SOURCE.rglob("*.py") if path.name != "run_report.py"}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_read(section: str, sources: dict[Path, str]) -> None:
    assert unread_keys(section, SECTIONS[section], sources) == set()


def test_every_key_at_the_top_is_read(sources: dict[Path, str]) -> None:
    own = {path: text for path, text in sources.items() if "SheepOpConfig" in text}
    assert unread_keys("config", SheepOpConfig, own) == set()


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("training", "eval_tokens"),
        ("data", "stride"),
        ("generation", "use_memory"),
        ("model", "norm"),
        ("data.clean.quality.gopher", "min_stop_words"),
        ("training.layers", "weight_decay"),
    ],
)
def test_a_key_whose_readers_are_gone_is_found(sources: dict[Path, str], section: str, key: str) -> None:
    without = {path: text.replace(f".{key}", ".other") for path, text in sources.items()}
    assert unread_keys(section, SECTIONS[section], without) >= {key}
