"""The documents say what is true: links lead somewhere, tables equal the models, commands are understood."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sheepop.cli.main import _program
from sheepop.core.config import parse_config, validate
from sheepop.core.keys import keys
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.original import translate_original
from sheepop.model.presets import PRESETS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGURATION = ROOT / "docs" / "configuration.md"


every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@every_page
def test_relative_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_fences(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists() and place.is_relative_to(ROOT), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(place), f"{page.name} links to {target}"


@every_page
def test_named_functions_and_tests_exist(page: Path):
    for label, target in re.findall(r"\[`([^`\]]+)`\]\(([^)\s]+\.py)\)", _without_fences(page)):
        shown, _, symbol = label.partition("::")
        place = (page.parent / target).resolve()
        assert place.as_posix().endswith(f"/{shown}"), f"{page.name}: {label} is not in {target}"
        assert not symbol or symbol in _symbols(place), f"{page.name}: {target} defines no {symbol}"


@every_page
def test_commands_are_understood(page: Path):
    for block in _fences(page, "bash"):
        for words in _commands(block):
            _parse(words)


def test_commands_in_the_table_of_the_readme_are_understood():
    inline = re.findall(r"`(sheepop [^`]+)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(inline) > 10
    for words in _commands("\n".join(inline)):
        _parse(words)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda recipe: recipe.stem)
def test_commands_of_recipes_are_understood(recipe: Path):
    lines = re.findall(r"^#   (sheepop .*)$", recipe.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert f"--config recipes/{recipe.name}" in lines[-1]
    for words in _commands("\n".join(lines)):
        _parse(words)


def test_the_examples_of_every_help_are_understood():
    examples = [line for text in _help_texts() for line in re.findall(r"^ *(?:Example: +)?(.*sheepop .*)$", text, re.M)]
    assert len(examples) > 30
    for words in _commands("\n".join(examples)):
        _parse(words)


def test_commands_are_found_in_shell():
    assert list(
        _commands('# no\necho "a # b" | sheepop generate runs/x - \\\n  --quiet  # yes\nls; sheepop doctor')
    ) == [
        ["generate", "runs/x", "-", "--quiet"],
        ["doctor"],
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "no verb"),
        (["train", "--outptu", "x"], "outptu"),
        (["train", "training.max_step=3"], "max_steps"),
        (["data", "build", "notes/", "--output", "x", "data.spilt=tail"], "data.split"),
    ],
)
def test_a_misspelt_command_would_be_found(words: list[str], message: str):
    with pytest.raises(Exception, match=message):
        _parse(words)


@every_page
def test_snippets_are_valid(page: Path):
    for text in _fences(page, "yaml"):
        validate(SheepOpConfig, parse_config(text, where=page.name))
    for text in _fences(page, "python"):
        ast.parse(text)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("from-*.md")), ids=lambda page: page.stem)
def test_the_words_of_other_programs_stand_beside_keys_that_exist(page: Path):
    """In the last column of the table and below it; the commands are checked with all others."""
    known = {key.path for key in keys(SheepOpConfig)}
    table, differs = page.read_text(encoding="utf-8").partition("\n## Words\n")[2].split("\n## What differs\n")
    ours = "".join(row[-1] for row in _table(page, "Words")) + differs
    named = re.findall(r"`((?:model|training|tuning|generation|data|evaluation|server)\.\w[\w.]*)", ours)
    assert set(named) <= known
    commands = [words for block in _fences(page, "bash") for words in _commands(block)]
    assert len(commands) >= len(_fences(page, "text")) >= 5 and table


def test_configuration_tables_are_made_from_the_fields():
    page = CONFIGURATION.read_text(encoding="utf-8")
    assert _with_tables(page) == page, "the fields have changed; write the tables anew: python docs/configuration.py"


def test_a_table_that_is_wrong_or_missing_is_found():
    page = CONFIGURATION.read_text(encoding="utf-8")
    assert _with_tables(page.replace("| `num_heads` |", "| `heads` |")) == page
    with pytest.raises(ValueError, match=r"one heading '## `training\.trouble`'"):
        _with_tables(page.replace("## `training.trouble`", "## Trouble"))


def test_every_section_has_its_heading_and_no_other_setting_has():
    headings = re.findall(r"^## `([\w.]+)`$", CONFIGURATION.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == [key.path for key in keys(SheepOpConfig) if key.section is not None]


def test_the_table_of_presets_is_that_of_the_code():
    names = ("d_model", "num_layers", "num_heads", "max_seq_len")
    expected = {
        name: [*(str(preset[key]) for key in names), str(preset.get("vocab_size", "tokenizer's"))]
        for name, preset in PRESETS.items()
    }
    assert {_code(name): values for name, *values in _table(CONFIGURATION, "Presets")} == expected


def test_the_table_of_the_original_system_is_what_is_translated():
    rows = _table(CONFIGURATION, "Files of the original system")
    assert len(rows) == 4
    for there, here in rows:
        section, key = _code(there).split(".")
        value: Any = translate_original({section: {key: 8}})
        for part in _code(here).split("."):
            value = value[part]
        assert value in (8, [8])


def test_the_slurm_script_starts_ray_on_every_node_and_builds(tmp_path: Path):
    """The script runs with programs of Slurm and Ray that only note how they are called."""
    (script,) = [block for block in _fences(ROOT / "docs" / "cluster.md", "bash") if block.startswith("#!")]
    programs = {
        "scontrol": 'printf "node1\\nnode2\\nnode3\\n"',
        "srun": 'until [ "${1#--}" = "$1" ]; do shift; done; "$@"',
        "ray": 'test "$1" != status || grep -q "^ray start --head" calls',
        "sheepop": "sleep 0.5",
    }
    for name, body in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\ntest "$1" = status || echo "{name} $*" >> calls\n{body}\n')
        program.chmod(0o755)
    (tmp_path / "build.sbatch").write_text(re.sub("^source .*$", "", script, flags=re.MULTILINE))
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_CPUS_PER_TASK": "32",
    }
    subprocess.run(["bash", "build.sbatch"], cwd=tmp_path, env=environment, check=True, timeout=60)
    calls = (tmp_path / "calls").read_text().splitlines()
    of_slurm = [line for line in calls if line.startswith("srun")]
    assert [re.findall("--(?:nodes|nodelist|exclude)=(\\S+)", line) for line in of_slurm] == [
        ["1", "node1"],
        ["2", "node1"],
    ]
    assert "ray start --head --port=6379 --num-cpus=32 --block" in calls
    assert "ray start --address=node1:6379 --num-cpus=32 --block" in calls
    assert "sheepop data build /shared/texts --output /shared/corpora/texts --engine ray" in calls


def _parse(words: list[str]) -> None:
    """Raises unless the program knows the verb and its options, and the configuration the settings."""
    command = _program()
    words = [word for word in words if word != "--debug"]
    plugged = "--plugin" in words
    while "--plugin" in words:
        place = words.index("--plugin")
        words = [*words[:place], *words[place + 2 :]]
    if plugged and words[0] not in command.commands:  # which the plugin has registered
        return
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if {"--help", "-h", "--version"} & set(words):
        return
    works_alone = getattr(command, "invoke_without_command", False) and not any(word[0] != "-" for word in words)
    assert works_alone or not hasattr(command, "commands"), f"{words[:1]} is no verb of {command.name}"
    context = command.make_context(command.name, list(words))
    if plugged:  # whose names only the program of the page knows
        return
    given = context.params.get("overrides" if command.name == "train" else "inputs") or []
    load_config(None, [text for text in map(str, given) if re.match(r"[\w.]+=", text)])


def _help_texts(command: Any = None) -> Iterator[str]:
    """What every verb says of itself, below the line that sums it up."""
    command = command or _program()
    for inner in getattr(command, "commands", {}).values():
        yield from _help_texts(inner)
    if not hasattr(command, "commands"):
        yield command.help.partition("\n")[2]


def _commands(block: str) -> Iterator[list[str]]:
    """The arguments of every ``sheepop`` in a block of shell."""
    quoted_or_comment = r"""("(?:\\.|[^"\\])*"|'[^']*')|(?:^|(?<=\s))#[^\n]*"""
    text = re.sub(quoted_or_comment, lambda match: match[1] or "", block.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&<>()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if word and set(word) <= set(";|&<>()\n"):
            if words[:1] == ["sheepop"]:
                yield words[1:]
            words = []
        else:
            words.append(word)


def _table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of the second level, without its head."""
    text = page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _code(cell: str) -> str:
    match = re.fullmatch(r"`([^`]+)`", cell)
    assert match, f"{cell} stands in code font"
    return match[1]


def _with_tables(page: str) -> str:
    return str(runpy.run_path(str(CONFIGURATION.with_suffix(".py")))["with_tables"](page))


def _fences(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _without_fences(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _without_fences(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def _symbols(file: Path) -> set[str]:
    """Functions, classes, methods and module-level names that a Python file defines."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(ast.parse(file.read_text(encoding="utf-8")).body, "")
    return found
