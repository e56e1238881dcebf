"""The commands that are printed work in the shell of the person who reads them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sheepop.core.program import typed


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed program that prints its own call with the words that it is given."""
    place = tmp_path / "my env" / "bin"
    place.mkdir(parents=True)
    path = place / "sheepop"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom sheepop.core.program import typed\nprint(typed(*sys.argv[1:]))\n"
    )
    path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return path


def said(call: str, **environment: str) -> str:
    done = subprocess.run(
        ["sh", "-c", call], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout.rstrip("\n")


@pytest.mark.parametrize("call", ["'my env/bin/sheepop'", '"$PWD/my env/bin/sheepop"'])
def test_a_program_that_is_not_on_the_path_is_called_by_its_place(program: Path, call: str) -> None:
    words = "generate runs/a --prompt 'def f(x):'"
    printed = said(f"{call} {words}")
    assert printed == f"'my env/bin/sheepop' {words}"
    assert said(printed) == printed


def test_on_the_path_its_name_is_enough(program: Path) -> None:
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    assert said("sheepop train", PATH=path) == "sheepop train"


def test_from_elsewhere_it_is_called_by_its_whole_path(program: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert said(f"cd other && '{program}' runs") == f"'{program}' runs"


def test_a_module_is_called_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/sheepop/__main__.py", "train"])
    monkeypatch.setenv("PATH", "")
    assert typed("runs").endswith(" -m sheepop runs")


def test_another_program_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/notebook.py"])
    assert typed("train", Path("a b")) == "sheepop train 'a b'"
