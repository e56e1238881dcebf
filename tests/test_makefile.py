"""The make targets: what they would run, and whom they refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make"),
]
TARGETS = ["quickstart", "test", "test-system", "test-faults", "test-models", "lint", "docs", "bench"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Variables of a make that runs this test would reach the one that is tested.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=clone, env=environment, capture_output=True, text=True, check=False)


def commands(clone: Path, *arguments: str) -> list[str]:
    done = make(clone, "--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def pretend_installed(clone: Path) -> None:
    (clone / ".venv").mkdir()
    for age, name in enumerate([".created", ".installed", ".installed-dev"]):
        (clone / ".venv" / name).touch()
        os.utime(clone / ".venv" / name, (2_000_000_000 + age, 2_000_000_000 + age))


def test_help_is_the_default_and_names_every_target(clone: Path):
    done = make(clone)
    assert done.returncode == 0
    assert done.stdout == make(clone, "help").stdout
    named = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("make ")]
    assert named == TARGETS


def test_a_fresh_clone_gets_its_environment_first(clone: Path):
    lines = commands(clone, "quickstart")
    assert "python3 -m venv .venv" in lines
    install = '.venv/bin/python -m pip install --constraint constraints.txt --editable ".[serve]"'
    assert lines.index("python3 -m venv .venv") < lines.index(install)
    assert lines[-1].strip() == '.venv/bin/sheepop quickstart --output "runs/quickstart"'


def test_the_variables_of_quickstart_reach_the_command(clone: Path):
    pretend_installed(clone)
    assert commands(clone, "quickstart", "MINUTES=0.5", "DATA=my files", "OUTPUT=runs/mine") == [
        '.venv/bin/sheepop quickstart --output "runs/mine" --minutes "0.5" --data "my files"'
    ]


def test_development_targets_install_the_development_tools(clone: Path):
    for target in ("test", "test-system", "test-faults", "test-models", "lint", "bench"):
        assert any(line.endswith('--editable ".[dev]"') for line in commands(clone, target)), target


def test_an_install_is_repeated_when_what_it_depends_on_changes(clone: Path):
    pretend_installed(clone)
    assert not any("pip" in line for line in commands(clone, "lint"))
    os.utime(clone / "constraints.txt", (2_100_000_000, 2_100_000_000))
    assert any("pip" in line for line in commands(clone, "lint"))


def test_the_kinds_of_tests_do_not_overlap(clone: Path):
    pretend_installed(clone)
    chosen = {target: " ".join(commands(clone, target)) for target in ("test", "test-system", "test-faults")}
    assert '-m "not system and not campaign"' in chosen["test"]
    assert '-m "system and not campaign"' in chosen["test-system"]
    assert "-m campaign" in chosen["test-faults"]


def test_torch_comes_from_the_chosen_index_and_the_rest_from_pips_own(clone: Path):
    lines = commands(clone, "test", "TORCH_INDEX=https://example.org/cpu")
    chosen = next(number for number, line in enumerate(lines) if '--index-url "https://example.org/cpu" torch' in line)
    rest = next(number for number, line in enumerate(lines) if line.endswith('--editable ".[dev]"'))
    assert chosen < rest
    assert "--no-deps" in lines[chosen]
    assert "index" not in lines[rest]
    assert not any("index" in line for line in commands(clone, "test"))


@pytest.mark.parametrize("python", ["./old", "./absent"])
def test_an_old_or_missing_python_is_refused_before_anything_is_made(clone: Path, python: str):
    (clone / "old").write_text("#!/bin/sh\nexit 1\n")
    (clone / "old").chmod(0o755)
    done = make(clone, f"PYTHON={python}", "test")
    assert done.returncode == 2
    assert f"SheepOp needs Python 3.11 or newer; '{python}' is missing or older." in done.stderr
    assert not (clone / ".venv").exists()


def test_a_failed_environment_is_tried_again(clone: Path):
    (clone / "broken").write_text('#!/bin/sh\n[ "$1" = -c ] || { mkdir -p .venv/bin; exit 1; }\n')
    (clone / "broken").chmod(0o755)
    assert make(clone, "PYTHON=./broken", "lint").returncode == 2
    assert "python3 -m venv .venv" in commands(clone, "lint")
