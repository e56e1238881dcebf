"""Builds corpus directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.data import build_corpus
from sheepop.jobs.config import load_config


def build(inputs: Sequence[str], output: Path, config_file: Path | None, console: Console) -> dict[str, Any]:
    """Builds the corpus of `inputs`, which may hold ``key=value`` settings among the paths, and sums it up.

    An input is a setting when it contains ``=`` and no file of that name exists.
    """
    overrides = [text for text in inputs if "=" in text and not Path(text).exists()]
    paths = [text for text in inputs if text not in overrides]
    if not paths:
        raise UsageError("There is no input. Name at least one file or folder.")
    config = load_config(config_file, overrides, options={"data": {"paths": paths}})
    corpus = build_corpus(config.data, config.tokenizer, output, seed=config.seed, console=console)
    return {
        "path": str(output),
        "train_documents": corpus.train.num_documents,
        "train_tokens": corpus.train.num_tokens,
        "validation_documents": corpus.validation.num_documents,
        "validation_tokens": corpus.validation.num_tokens,
        "skipped_files": sum(corpus.manifest["files"]["skipped"].values()),
        "fingerprint": corpus.fingerprint,
    }
