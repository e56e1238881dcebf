"""Training where something of the machine is missing."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from sheepop.core.config import read_config_file
from sheepop.core.console import Console
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.train import train


def test_without_a_compiler_a_run_goes_on_and_says_so(
    configured: Callable[..., SheepOpConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    config = configured(tmp_path / "run", "training.max_steps=2", "training.compile=true")
    messages = io.StringIO()
    outcome = train(config, console=Console(quiet=True, file=messages))
    assert outcome.steps == 2
    assert "needs a C++ compiler" in messages.getvalue()
    assert read_config_file(tmp_path / "run" / "config.yaml")["training"]["compile"] is False
