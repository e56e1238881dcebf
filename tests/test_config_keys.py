"""Every key of the configuration is read by code outside the module that declares it: a key nobody reads is a defect.

What is found is an attribute of that name, read from something that stands for its section (``config.model.dropout``,
``training.eval_tokens``, ``self._config.stop``) or from a name that a function takes as that section's class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sheepop.core.config import Config
from sheepop.data import DataConfig
from sheepop.generate import GenerationConfig
from sheepop.jobs.config import SheepOpConfig
from sheepop.model import ModelConfig
from sheepop.tokenizer import TokenizerConfig
from sheepop.train import TrainingConfig

SOURCE = Path(__file__).parent.parent / "src" / "sheepop"
SECTIONS: dict[str, type[Config]] = {
    "model": ModelConfig,
    "tokenizer": TokenizerConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "generation": GenerationConfig,
}
# Keys that are read through a property of the class, or of what the class resolves to.
READ_AS = {
    ("model", "vocab_size"): ("vocabulary",),
    ("model", "num_kv_heads"): ("kv_heads",),
    ("model", "head_dim"): ("head_size",),
    ("model", "d_ff"): ("ffn_size",),
    ("generation", "temperature"): ("temperature", "greedy"),
}
# Read where the class resolves itself, before any other code sees it.
READ_AT_HOME = {("model", "preset")}


def module_of(config_class: type[Config]) -> Path:
    return SOURCE.parent.joinpath(*config_class.__module__.split(".")).with_suffix(".py")


def section_names(tree: ast.Module, section: str, class_name: str) -> set[str]:
    """Names that hold the section in a module: parameters and fields of its class, and what is assigned from one."""
    names = {section, f"_{section}_config", f"{section}_config"}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            annotation = ast.unparse(node.annotation).replace(" | None", "")
            if annotation == class_name:
                names.add(node.arg if isinstance(node, ast.arg) else ast.unparse(node.target))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target, value in pairs(node):
                if isinstance(value, ast.Name | ast.Attribute) and last_name(value) in names:
                    names.add(last_name(target))
    return names


def pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def attributes_read(tree: ast.Module, section: str, class_name: str) -> set[str]:
    names = section_names(tree, section, class_name)
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and last_name(node.value) in names
    }


def unread_keys(section: str, config_class: type[Config], sources: dict[Path, str]) -> set[str]:
    read: set[str] = set()
    for path, text in sources.items():
        if path != module_of(config_class):
            tree = ast.parse(text)
            read |= attributes_read(tree, section, config_class.__name__)
            if section == "training":
                read |= attributes_read(tree, "resolved", "ResolvedTraining")
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


def test_every_section_is_walked() -> None:
    declared = {name for name, field in SheepOpConfig.model_fields.items() if _is_section(field.annotation)}
    assert declared == SECTIONS.keys()


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Config)


@pytest.mark.parametrize(
    ("section", "key"),
    [("training", "eval_tokens"), ("data", "stride"), ("generation", "use_cache"), ("model", "norm")],
)
def test_a_key_whose_readers_are_gone_is_found(sources: dict[Path, str], section: str, key: str) -> None:
    without = {path: text.replace(f".{key}", ".other") for path, text in sources.items()}
    assert unread_keys(section, SECTIONS[section], without) >= {key}
