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
    "position_encoding": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "dropout": 0.0,
}
# Limits that the amount of text sets: what a vocabulary entry needs, what a weight needs, and the passes after which
# the same text teaches a small model little more.
_BYTES_PER_VOCABULARY_ENTRY = 400
_SMALLEST_VOCABULARY = 512
_BYTES_FOR_WORDS = 20_000
_WEIGHTS_PER_BYTE = 0.75
_MAX_EPOCHS = 16


@dataclass(frozen=True)
class Size:
    """A model that is worth training when the machine spends at least `flops` on it in the given minutes."""

    flops: float
    d_model: int
    num_layers: int
    num_heads: int
    max_seq_len: int
    vocab_size: int
    learning_rate: float
    batch_size: int

    @property
    def weights(self) -> int:
        """Weights inside the blocks, about."""
        return 12 * self.num_layers * self.d_model**2


# Larger models, longer rows and larger vocabularies win only once they see enough text;
# bench/results/quickstart_sizes.md has the measurements.
SIZES = (
    Size(0.0, 64, 2, 2, 128, 1024, 1.2e-2, 16),
    Size(1.0e12, 96, 3, 3, 128, 2048, 1.0e-2, 16),
    Size(5.0e12, 128, 4, 4, 128, 2048, 8.0e-3, 16),
    Size(4.0e13, 192, 4, 6, 256, 4096, 7.0e-3, 16),
    Size(9.0e13, 256, 4, 4, 256, 4096, 6.0e-3, 16),
    Size(3.0e14, 256, 6, 4, 256, 4096, 6.0e-3, 16),
    Size(1.0e15, 384, 8, 6, 512, 8192, 5.0e-3, 32),
    Size(1.0e16, 512, 10, 8, 512, 8192, 4.0e-3, 64),
)


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
    sizes = {"d_model": 128, "num_layers": 4, "num_heads": 4, "max_seq_len": 256, "vocab_size": 4096}
    return validate(ModelConfig, {**_ARCHITECTURE, **sizes})


def choose_size(flops_per_second: float, minutes: float, num_bytes: int) -> Size:
    """The size for a machine that trains at `flops_per_second` for `minutes` on `num_bytes` of text.

    A model with many more weights than the text has bytes would learn it by heart.
    """
    flops = flops_per_second * minutes * 60
    fitting = [size for size in SIZES if size.flops <= flops and size.weights <= _WEIGHTS_PER_BYTE * num_bytes]
    return max(fitting, key=lambda size: size.flops, default=SIZES[0])


def choose_tokenizer(size: Size, num_bytes: int) -> dict[str, Any]:
    """The size's vocabulary, halved until `num_bytes` of text can fill it; characters for a few pages of text."""
    if num_bytes < _BYTES_FOR_WORDS:
        return {"algorithm": "char"}
    vocab_size = size.vocab_size
    while vocab_size > _SMALLEST_VOCABULARY and vocab_size * _BYTES_PER_VOCABULARY_ENTRY > num_bytes:
        vocab_size //= 2
    return {"vocab_size": vocab_size}


def recipe(
    size: Size, tokenizer: dict[str, Any], *, paths: Sequence[str], ignore: Sequence[str], minutes: float
) -> dict[str, Any]:
    """The configuration of a quickstart, as the tree that `load_config` takes."""
    return {
        "model": {
            **_ARCHITECTURE,
            "d_model": size.d_model,
            "num_layers": size.num_layers,
            "num_heads": size.num_heads,
            "max_seq_len": size.max_seq_len,
        },
        "tokenizer": tokenizer,
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
