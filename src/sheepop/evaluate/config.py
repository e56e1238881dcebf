"""What is measured while a run trains."""

from __future__ import annotations

from pydantic import Field

from sheepop.core.config import Config, PathText


class EvaluationConfig(Config):
    """Evaluations of a model that is still learning; ``sheepop eval`` makes those of a finished one."""

    tasks: tuple[PathText, ...] = ()
    """What the model is asked while it trains: `copying`, `brackets`, `arithmetic`, `cloze` of its held-out text, or
    files of questions."""
    interval: int | None = Field(None, ge=1)
    """Steps between; `null` asks with every validation."""
    questions: int = Field(100, ge=1)
    """How many questions of each task are asked, the same ones every time; more take longer and tell more."""
