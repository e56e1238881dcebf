"""Configuration of evaluations during training."""

from __future__ import annotations

from pydantic import Field

from sheepop.core.config import Config, PathText


class EvaluationConfig(Config):
    """Evaluations of a model during its training; ``sheepop eval`` evaluates finished models."""

    tasks: tuple[PathText, ...] = ()
    """Tasks to evaluate during training: `copying`, `brackets`, `arithmetic`, `cloze` (of the held-out text), files of
    questions, or tasks of lm-eval."""
    include: tuple[PathText, ...] = ()
    """Directories with task files of lm-eval."""
    texts: tuple[PathText, ...] = ()
    """Texts to predict in addition to the held-out text: text files, folders, JSON lines or corpora."""
    interval: int | None = Field(None, ge=1)
    """Steps between two evaluations; `null` evaluates with every validation."""
    questions: int = Field(100, ge=1)
    """Questions of each task, and texts of each entry of `texts`, always the same ones; more take longer and give
    smaller errors."""
