"""The configuration of a tiny run, for jobs that are called as functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sheepop.jobs.config import SheepOpConfig, load_config

from ..running import train


@pytest.fixture(scope="session")
def configured(text_folder: Path, tiny: tuple[str, ...]) -> Callable[..., SheepOpConfig]:
    """``configured(output, "key=value", data=PATH)``: a tiny run over the small files, or over `data`."""

    def configure(output: Path, *overrides: str, data: Path = text_folder) -> SheepOpConfig:
        places = ("device=cpu", f"data.paths={data}", f"output_dir={output}")
        return load_config(overrides=(*tiny, *places, *overrides))

    return configure


@pytest.fixture(scope="session")
def base(configured: Callable[..., SheepOpConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen a little text, to be tuned."""
    settings = ("model.max_seq_len=64", "model.dropout=0", "training.max_steps=2")
    return train(configured(tmp_path_factory.mktemp("base") / "run", *settings)).run
