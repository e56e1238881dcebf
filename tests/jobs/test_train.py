"""Training where something of the machine is missing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from sheepop.core.config import read_config_file
from sheepop.core.console import Console
from sheepop.jobs.config import load_config
from sheepop.jobs.train import train


def test_without_a_compiler_a_run_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"Sheep number {number} jumps over the fence.\n" * 4)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    settings = [
        "tokenizer.algorithm=char",
        "model.d_model=16",
        "model.num_layers=1",
        "model.num_heads=2",
        "model.max_seq_len=32",
        "training.global_batch_size=4",
        "training.max_steps=2",
        "training.precision=fp32",
        "training.compile=true",
        "device=cpu",
        f"data.paths={tmp_path}",
        f"output_dir={tmp_path / 'run'}",
    ]
    messages = io.StringIO()
    outcome = train(load_config(overrides=settings), console=Console(quiet=True, file=messages))
    assert outcome.steps == 2
    assert "needs a C++ compiler" in messages.getvalue()
    assert read_config_file(tmp_path / "run" / "config.yaml")["training"]["compile"] is False
