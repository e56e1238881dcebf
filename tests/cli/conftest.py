"""Runs the command line inside the test process, and one tiny trained run that many tests read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest

from sheepop.cli.main import main


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


def run_in_process(monkeypatch: pytest.MonkeyPatch, *arguments: object, stdin: str | None = None) -> Result:
    out, err = StringIO(), StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["sheepop", *map(str, arguments)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        if stdin is not None:
            patch.setattr(sys, "stdin", TextIOWrapper(BytesIO(stdin.encode("utf-8")), encoding="utf-8"))
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("train", "--data", path)`` gives the exit code and the two outputs."""
    return lambda *arguments, **options: run_in_process(monkeypatch, *arguments, **options)


@pytest.fixture(scope="session")
def trained(text_folder: Path, tiny: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished tiny run, made by the command line."""
    output = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        result = run_in_process(patch, "train", "--data", text_folder, "--output", output, "--quiet", *tiny)
    assert result.code == 0, result.err
    return output
