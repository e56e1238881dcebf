"""What is measured while a run trains."""

from __future__ import annotations

from pydantic import Field

from sheepop.core.config import Config, PathText


class EvaluationConfig(Config):
    """Evaluations of a model that is still learning; ``sheepop eval`` makes those of a finished one."""

    tasks: tuple[PathText, ...] = ()
    """What the model is asked while it trains: `copying`, `brackets`, `arithmetic`, `cloze` of its held-out text, files
    of questions, or tasks of lm-eval."""
    include: tuple[PathText, ...] = ()
    """Directories with task files of lm-eval."""
    texts: tuple[PathText, ...] = ()
    """What the model is to predict beside its held-out text: text files, folders, JSON lines or corpora."""
    interval: int | None = Field(None, ge=1)
    """Steps between; `null` asks with every validation."""
    questions: int = Field(100, ge=1)
    """How many questions of each task are asked, and texts of `texts` read, the same ones every time; more take longer
    and tell more."""
