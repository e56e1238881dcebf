"""One tiny trained run that many tests read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ..command_line import Ended, in_process

Run = Callable[..., Ended]


@pytest.fixture(scope="session")
def run() -> Run:
    """``run("train", "--data", path)`` gives the exit code and the two outputs."""
    return in_process


@pytest.fixture(scope="session")
def trained(text_folder: Path, tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished tiny run, made by the command line."""
    output = tmp_path_factory.mktemp("runs") / "tiny"
    result = in_process("train", "--data", text_folder, "--output", output, "--quiet", *tiny)
    assert result.code == 0, result.err
    return output
