"""What docs/extending.md shows works as it stands: its file is a plugin, its commands run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from sheepop.checkpoint import RunDirectory, load_model
from sheepop.checkpoint.weight_files import read_all_weights
from sheepop.core.files import sha256_file

from ..command_line import Launcher

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the file of the page and some text."""
    place = tmp_path_factory.mktemp("extending")
    (place / "my.py").write_text(blocks("python")[0])
    (place / "notes").mkdir()
    (place / "notes" / "a.txt").write_text((Path(json.__file__).parent / "decoder.py").read_text())
    return place


@pytest.fixture(scope="module")
def changed(place: Path, launcher: Launcher, tiny: tuple[str, ...]) -> Path:
    """The run of the page, at toy size."""
    first, resumed, generate = (shlex.split(line)[1:] for line in blocks("bash")[0].splitlines())
    small = [key for key in tiny if not key.startswith(("model.activation", "training.optimizer", "training.max"))]
    for words in ([*first, *small, "training.max_steps=2", "--device", "cpu"], [*resumed, "training.max_steps=3"]):
        done = launcher.run(*words, directory=place)
        assert done.code == 0, done.err
    done = launcher.run(*generate, "--max-new-tokens", "3", directory=place)
    assert done.code == 0, done.err
    (place / "shout.py").write_text(blocks("python")[1])
    done = launcher.run(*shlex.split(blocks("bash")[1])[1:], directory=place)
    assert done.code == 0 and done.out.startswith("IMPORT OS"), done.err
    assert done.out == done.out.upper()
    return place / "runs" / "changed"


def test_the_record_names_the_file_and_the_numbers_are_those_of_the_file(changed: Path, place: Path) -> None:
    record = json.loads((changed / "environment.json").read_text())
    assert record["plugins"] == [{"path": "my.py", "sha256": sha256_file(place / "my.py")}]
    steps = RunDirectory(changed).steps()
    before, after = (read_all_weights(RunDirectory(changed).checkpoint(step)) for step in steps[-2:])
    moved = (after["blocks.0.feed_forward.up_proj.weight"] - before["blocks.0.feed_forward.up_proj.weight"]).abs()
    assert moved.max() - moved.min() < 1e-6 < moved.min()  # every weight makes a step of one size


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["train", "--resume", "runs/changed"], "was started with the plugin my.py"),
        (["train", "--resume", "runs/changed", "--plugin", "other.py"], "was started with the plugin my.py"),
        (["generate", "runs/changed", "x"], "give that file with --plugin"),
        (["train", "--plugin", "nowhere.py"], "The plugin nowhere.py cannot be read: No such file"),
        (["train", "--plugin", "broken.py"], "The plugin broken.py, line 3 failed: ZeroDivisionError"),
        (["train", "--plugin", "taken.py"], "The plugin taken.py was refused: The name 'gelu' is taken already"),
        (["train", "--plugin"], "--plugin needs a Python file"),
    ],
)
def test_a_plugin_that_is_missing_changed_or_broken_is_named(
    changed: Path, place: Path, launcher: Launcher, words: list[str], problem: str
) -> None:
    (place / "other.py").write_text(blocks("python")[0] + "# changed")
    (place / "broken.py").write_text("import sheepop\n\nx = 1 / 0\n")
    (place / "taken.py").write_text("import sheepop\nsheepop.register.activation('gelu')(abs)\n")
    done = launcher.run(*words, directory=place)
    assert (done.code in (2, 3), problem in done.err) == (True, True), done.err


def test_the_python_of_the_page_gives_a_model(place: Path, launcher: Launcher) -> None:
    program = blocks("python")[2].replace("minutes=1", "minutes=0.03, device='cpu', quiet=True")
    done = launcher.run(program=program, directory=place)
    assert done.code == 0, done.err
    assert load_model(place / "runs" / "short").config.d_model == 64
    assert done.out.endswith("\n")
