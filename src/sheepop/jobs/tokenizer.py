"""Trains, applies and describes tokenizers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sheepop import data as corpora  # loads the builder only when it is called
from sheepop.checkpoint.model_kind import is_gguf
from sheepop.checkpoint.model_source import resolve_tokenizer_directory
from sheepop.core.config import validate
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, TokenizerError, UsageError
from sheepop.core.files import storage_errors
from sheepop.data import DataConfig, is_corpus
from sheepop.tokenizer import Tokenizer, TokenizerConfig, chat_templates, holds_tokenizer, load_tokenizer


def find_tokenizer(path: str | Path, pattern: str | None = None) -> Tokenizer:
    """Loads the tokenizer at `path`: a tokenizer directory or file, a corpus, or any model.

    `pattern` is for tiktoken's rank files (see `load_tokenizer`).
    """
    path = Path(path)
    if holds_tokenizer(path) and not is_gguf(path):
        return load_tokenizer(path, pattern=pattern)
    if path.exists() and is_corpus(path):
        return load_tokenizer(path / "tokenizer")
    try:
        return load_tokenizer(resolve_tokenizer_directory(path))
    except CheckpointError as error:
        raise TokenizerError(f"{path} holds no tokenizer. {error}") from None


def train_from_files(
    inputs: Sequence[Path],
    output: Path,
    console: Console,
    *,
    algorithm: str | None = None,
    vocab_size: int | None = None,
    pattern: str | None = None,
) -> dict[str, Any]:
    """Trains a tokenizer on every document of `inputs` and writes it to `output`.

    The settings are those of `TokenizerConfig`; None means its default.
    """
    given = {"algorithm": algorithm, "vocab_size": vocab_size, "pattern": pattern}
    config = validate(TokenizerConfig, {key: value for key, value in given.items() if value is not None})
    data = validate(DataConfig, {"paths": [str(path) for path in inputs], "validation_fraction": 0.0})
    _require_free(output)
    with storage_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        # A temporary corpus: only its documents and tokenizer are needed.
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".tokenizer-") as scratch:
            corpus = corpora.build_corpus(data, config, Path(scratch) / "corpus", seed=0, console=console)
            tokenizer = corpus.tokenizer()
            num_bytes, num_tokens = corpus.train.num_bytes, corpus.train.num_tokens
    tokenizer.save(output)
    return {
        "path": str(output),
        "algorithm": algorithm,
        "vocab_size": tokenizer.vocab_size,
        "bytes_per_token": num_bytes / num_tokens,
        "fingerprint": tokenizer.fingerprint(),
    }


def convert_tokenizer(source: Path, output: Path, pattern: str | None) -> dict[str, Any]:
    """Writes the tokenizer at `source` as ``tokenizer.json`` into the directory `output`, with the same ids."""
    _require_free(output)
    tokenizer = find_tokenizer(source, pattern)
    tokenizer.save(output)
    return {
        "path": str(output),
        "algorithm": tokenizer.algorithm,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint(),
        "notes": list(tokenizer.notes),
    }


def _require_free(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} already exists. Choose another directory, or remove it.")


def encode_text(path: Path, text: str, allow_special: bool, pattern: str | None = None) -> list[dict[str, Any]]:
    """The id and text of every token of `text`."""
    tokenizer = find_tokenizer(path, pattern)
    return _tokens(tokenizer, tokenizer.encode(text, allow_special=allow_special))


def describe_tokenizer(path: Path, limit: int, pattern: str | None = None) -> dict[str, Any]:
    """Size, special tokens, fingerprint, chat templates, notes and the `limit` longest tokens of a vocabulary."""
    tokenizer = find_tokenizer(path, pattern)
    lengths = tokenizer.byte_lengths()
    longest = sorted(range(tokenizer.vocab_size), key=lambda number: (-int(lengths[number]), number))[:limit]
    return {
        "algorithm": tokenizer.algorithm,
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": tokenizer.special_tokens,
        "fingerprint": tokenizer.fingerprint(),
        "chat_templates": sorted(chat_templates(tokenizer)),
        "notes": list(tokenizer.notes),
        "longest": _tokens(tokenizer, longest),
    }


def _tokens(tokenizer: Tokenizer, numbers: Iterable[int]) -> list[dict[str, Any]]:
    special = {token_id: text for text, token_id in tokenizer.special_tokens.items()}
    return [
        {
            "id": int(number),
            "text": special.get(number) or tokenizer.token_bytes(number).decode("utf-8", errors="replace"),
        }
        for number in numbers
    ]
