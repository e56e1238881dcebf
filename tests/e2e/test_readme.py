"""Every command of the README and of the first steps runs, in order, as typed; only budgets are made small."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sheepop.core.errors import DataError

from ..command_line import Launcher

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TYPED = README + (ROOT / "docs" / "first-steps.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# Appended to what takes minutes, so that it takes seconds.
SMALL = {
    "quickstart": ["--minutes", "0.05", "--device", "cpu"],
    "train": [
        *("--device", "cpu", "training.max_steps=3", "training.max_minutes=0.05", "training.sample_tokens=8"),
        "training.precision=fp32",  # the quickstart chooses it by measuring, which takes seconds
    ],
    "generate": ["--device", "cpu"],
    "eval tasks": ["--limit", "8"],
}
DOWNLOAD = ["data", "download"]
PAGES = ("argparse", "collections", "csv", "json", "logging", "pathlib", "re", "unittest")


def commands(program: str) -> list[str]:
    lines = [line for language, block in FENCE.findall(TYPED) if language == "bash" for line in block.splitlines()]
    return [line for line in (line.removeprefix(".venv/bin/") for line in lines) if line.startswith(f"{program} ")]


@pytest.fixture(scope="module")
def place(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with notes in it and the quickstart's run, as a reader has after the first command."""
    place = tmp_path_factory.mktemp("reader")
    (place / "notes").mkdir()
    for page in PAGES:
        text = subprocess.run([sys.executable, "-m", "pydoc", page], capture_output=True, text=True, check=True).stdout
        (place / "notes" / f"{page}.txt").write_text(text, encoding="utf-8")
    run(launcher, place, ["quickstart", "--data", "notes/", *SMALL["quickstart"]])
    return place


def run(launcher: Launcher, place: Path, arguments: list[str]) -> str:
    done = launcher.run(*arguments, directory=place)
    assert done.code == 0, f"sheepop {shlex.join(arguments)}\n{done.err}"
    return done.out


def test_every_sheepop_command_runs(launcher: Launcher, place: Path) -> None:
    lines = commands("sheepop")
    assert len(lines) >= 5
    for line in lines:
        arguments = shlex.split(line)[1:]
        if arguments[:2] != DOWNLOAD:
            smaller = SMALL.get(arguments[0], []) + SMALL.get(" ".join(arguments[:2]), [])
            output = run(launcher, place, arguments + smaller)
            assert output.strip(), line
    # All that they write is in folders that git ignores.
    written = {entry.name for entry in place.iterdir()} - {"notes"}
    assert written <= set((ROOT / ".gitignore").read_text().replace("/", "").split()), written


@pytest.mark.parametrize("line", [line for line in commands("sheepop") if shlex.split(line)[1:3] == DOWNLOAD])
def test_a_download_is_understood_and_asks_the_hub(launcher: Launcher, place: Path, line: str) -> None:
    """Where the hub must not be asked, that is the one thing that stops it."""
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = launcher.run(*shlex.split(line)[1:], directory=place, environment=offline)
    assert done.code == DataError.exit_code
    assert "HF_HUB_OFFLINE is set" in " ".join(done.err.split())


def test_the_python_example_runs(launcher: Launcher, place: Path) -> None:
    (block,) = [block for language, block in FENCE.findall(TYPED) if language == "python"]
    done = launcher.run(program=block, directory=place)
    assert done.code == 0, done.err
    assert done.out.strip()


@pytest.mark.parametrize("line", commands("make"))
def test_every_make_command_names_a_target(line: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "pytest" in done.stdout if line == "make test" else "sheepop" in done.stdout


def test_the_first_result_is_on_the_first_screen() -> None:
    """Which has 40 lines of 120 characters, and shows what the one command ends with."""
    lines = README.splitlines()
    first = lines.index("make quickstart")
    (picture,) = [number for number, line in enumerate(lines) if "terminal.svg" in line]
    assert first < picture < 40 and max(map(len, lines[:picture])) <= 120
    table = README.partition("## What do you want to do?\n")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| [^|]+ \| `sheepop [^`]+` \| \[", table, re.MULTILINE)) == 10
    for name in re.findall(r"\]\((docs/images/[^)]+)\)", README):
        assert (ROOT / name).stat().st_size < 300_000


def test_the_map_names_every_folder() -> None:
    folders = {
        path.name for path in (ROOT / "src" / "sheepop").iterdir() if path.is_dir() and path.name != "__pycache__"
    }
    described = set(re.findall(r"^  (\w+)/ ", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert described == folders
