"""Scores the difficulty of each row of a corpus; an order from easy to hard sorts by it."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sheepop.core.console import Console
from sheepop.core.files import write_atomic
from sheepop.data.batches import TextBatches
from sheepop.data.shards import TokenSource
from sheepop.tokenizer import Tokenizer

DifficultyName = Literal["rarity", "compression", "length"]
Score = Callable[[int, int], float]  # of the tokens start:stop
_BLOCK_TOKENS = 2**20
_REPORT_EVERY = 256  # rows


def row_difficulty(
    name: DifficultyName, split: TokenSource, batches: TextBatches, tokenizer: Tokenizer, console: Console
) -> NDArray[np.float64]:
    """The score of every row of `batches`, cut from `split`, ``(num_samples,)``; higher is harder.

    ``rarity`` is the mean of ``-log(share of the split)`` over the row's tokens, in nats. ``compression`` is the size
    of its text after zlib over its size in UTF-8, so repetitive text is easy. ``length`` is the mean, over the row's
    tokens, of the length of their document in tokens. One row is in memory at a time.
    """
    scores = np.empty(batches.num_samples)
    with console.progress("Scoring the difficulty of rows", batches.num_samples, "rows") as progress:
        score: Score = _SCORES[name](split, tokenizer)
        for sample in range(batches.num_samples):
            scores[sample] = score(*batches.token_range(sample))
            if (sample + 1) % _REPORT_EVERY == 0:
                progress.advance(_REPORT_EVERY)
    return scores


def read_difficulty(path: Path, identity: Mapping[str, str], sizes: Sequence[int]) -> list[NDArray[np.float64]] | None:
    """The stored scores of each source; None if the file is missing, damaged, or of another identity or other sizes."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            arrays = [file.get_tensor(f"source-{number}") for number in range(len(sizes))]
    except (OSError, SafetensorError):
        return None
    same = metadata == {**identity, "sha256": _sha256(arrays)} and [len(array) for array in arrays] == list(sizes)
    return arrays if same else None


def write_difficulty(path: Path, identity: Mapping[str, str], scores: Sequence[NDArray[np.float64]]) -> None:
    """Stores the scores of every source together with their `identity`, atomically."""
    tensors = {f"source-{number}": array for number, array in enumerate(scores)}
    write_atomic(path, save(tensors, metadata={**identity, "sha256": _sha256(scores)}))


def _sha256(arrays: Sequence[NDArray[np.float64]]) -> str:
    return hashlib.sha256(b"".join(array.astype("<f8").tobytes() for array in arrays)).hexdigest()


def _rarity(split: TokenSource, tokenizer: Tokenizer) -> Score:
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for start in range(0, split.num_tokens, _BLOCK_TOKENS):
        block = split.tokens(start, min(start + _BLOCK_TOKENS, split.num_tokens))
        counts += np.bincount(block, minlength=len(counts))
    surprise = np.log(split.num_tokens) - np.log(np.maximum(counts, 1))
    return lambda start, stop: float(surprise[split.tokens(start, stop)].mean())


def _compression(split: TokenSource, tokenizer: Tokenizer) -> Score:
    def ratio(start: int, stop: int) -> float:
        text = tokenizer.decode(split.tokens(start, stop).tolist()).encode("utf-8")
        return len(zlib.compress(text)) / max(1, len(text))

    return ratio


def _length(split: TokenSource, tokenizer: Tokenizer) -> Score:
    def mean_length(start: int, stop: int) -> float:
        first = int(np.searchsorted(split.offsets, start, side="right")) - 1
        last = int(np.searchsorted(split.offsets, stop, side="left"))
        bounds = split.offsets[first : last + 1]
        inside = np.diff(np.clip(bounds, start, stop))
        return float(np.dot(inside, np.diff(bounds)) / (stop - start))

    return mean_length


_SCORES = {"rarity": _rarity, "compression": _compression, "length": _length}
assert _SCORES.keys() == set(get_args(DifficultyName))
