"""The quickstart's defaults: which files, which model, which settings, so that the minutes are well spent."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sheepop.core.config import validate
from sheepop.core.errors import DataError
from sheepop.model import ModelConfig

# Of the standard library's folder: what is installed beside it, and tests, which are data more than text.
_NOT_THE_LIBRARY = (
    "site-packages/",
    "dist-packages/",
    "test/",
    "tests/",
    "idle_test/",
    "config-*/",
    "lib-dynload/",
    "ensurepip/",
    "LICENSE*",
)
LIBRARY_PROMPTS = (
    'def read_lines(path):\n    """',
    "class Stack:\n    def __init__(self",
    "import os\nimport sys\n\n",
)
_ARCHITECTURE: dict[str, Any] = {
    "max_seq_len": 256,
    "position_encoding": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "dropout": 0.0,
}
_VOCABULARIES = (4096, 2048, 1024, 512)
_BYTES_PER_VOCABULARY_ENTRY = 400


@dataclass(frozen=True)
class Size:
    """A model that is worth training when the machine spends at least `flops` on it in the given minutes."""

    flops: float
    d_model: int
    num_layers: int
    num_heads: int
    learning_rate: float
    batch_size: int


# Larger models win only once they see enough tokens; bench/results/quickstart_sizes.md has the measurements.
SIZES = (
    Size(0.0, 64, 2, 2, 1.2e-2, 8),
    Size(1.0e12, 96, 3, 3, 1.0e-2, 8),
    Size(5.0e12, 128, 4, 4, 8.0e-3, 8),
    Size(6.0e13, 192, 5, 6, 7.0e-3, 8),
    Size(1.2e14, 256, 6, 8, 6.0e-3, 16),
    Size(1.0e15, 384, 8, 6, 5.0e-3, 32),
    Size(1.0e16, 512, 10, 8, 4.0e-3, 32),
)
# More passes over the same text teach a small model little.
_MAX_EPOCHS = 16


def library_paths() -> tuple[list[str], tuple[str, ...]]:
    """The folder of this interpreter's standard library, and the patterns of what in it is not the library."""
    folder = Path(sysconfig.get_path("stdlib"))
    if not folder.is_dir():
        raise DataError(
            f"This Python keeps its standard library in {folder}, which is not a folder of files. "
            "Give your own files with --data PATH."
        )
    return [str(folder)], _NOT_THE_LIBRARY


def probe_config() -> ModelConfig:
    """The model whose training speed stands for this machine's."""
    return validate(ModelConfig, {**_ARCHITECTURE, "d_model": 128, "num_layers": 4, "num_heads": 4, "vocab_size": 4096})


def choose_size(flops_per_second: float, minutes: float) -> Size:
    """The size that fits what a machine that trains at `flops_per_second` computes in `minutes`."""
    flops = flops_per_second * minutes * 60
    return max((size for size in SIZES if size.flops <= flops), key=lambda size: size.flops)


def choose_vocabulary(num_bytes: int) -> int:
    """A vocabulary that `num_bytes` of text can fill with useful tokens."""
    fitting = [size for size in _VOCABULARIES if size * _BYTES_PER_VOCABULARY_ENTRY <= num_bytes]
    return fitting[0] if fitting else _VOCABULARIES[-1]


def recipe(
    size: Size, vocab_size: int, *, paths: Sequence[str], ignore: Sequence[str], minutes: float
) -> dict[str, Any]:
    """The configuration of a quickstart, as the tree that `load_config` takes."""
    return {
        "model": {
            "d_model": size.d_model,
            "num_layers": size.num_layers,
            "num_heads": size.num_heads,
            **_ARCHITECTURE,
        },
        "tokenizer": {"vocab_size": vocab_size},
        "data": {"paths": list(paths), "ignore": list(ignore)},
        "training": {
            "max_minutes": minutes,
            "max_epochs": _MAX_EPOCHS,
            "global_batch_size": size.batch_size,
            "optimizer": "muon",
            "learning_rate": size.learning_rate,
            "weight_decay": 0.1,
            "eval_tokens": 16384,
            "sample_prompts": [],
            "sample_tokens": 48,
        },
    }
