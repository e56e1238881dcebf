"""SheepOp trains, tunes, evaluates and serves language models, from a folder of files to a finished model.

``import sheepop`` loads no heavy library; it resolves the names below on first use.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

import sheepop.plan
import sheepop.train
from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop import register
    from sheepop.jobs.best_of import best_of
    from sheepop.language_model import LanguageModel, load, load_tokenizer
    from sheepop.runs import analyze, tune
else:
    __getattr__, __dir__ = lazy_exports(__name__)

# OpenMP's threads read this when torch is loaded. After a parallel region they would wait for the next for milliseconds
# without leaving their processor, which another program, or a thread that they wait for, may need.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Without these, ONNX Runtime, Ray, MLflow and Hugging Face's libraries report their use to their makers.
for _name, _value in {
    "ORT_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}.items():
    os.environ.setdefault(_name, _value)

__version__ = "0.2.0"
__all__ = [
    "LanguageModel",
    "__version__",
    "analyze",
    "best_of",
    "load",
    "load_tokenizer",
    "plan",
    "register",
    "train",
    "tune",
]


class _Verb(ModuleType):
    """The package of a stage, which is also a function: ``sheepop.train("notes/", minutes=5)``."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        from sheepop import runs

        return getattr(runs, self.__name__.rpartition(".")[2])(*arguments, **named)


sheepop.train.__class__ = sheepop.plan.__class__ = _Verb
