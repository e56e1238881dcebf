"""Reading a tokenizer from disk, whatever its algorithm."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.core.files import read_json
from sheepop.tokenizer.byte_level import ByteLevelBPE
from sheepop.tokenizer.character import CharTokenizer
from sheepop.tokenizer.interface import SETTINGS_FILE, TOKENIZER_FILE, WHAT_IS_READ, Tokenizer

_READERS: dict[str, Callable[[str, Mapping[str, Any]], Tokenizer]] = {
    "BPE": ByteLevelBPE,
    "WordLevel": CharTokenizer.from_json,
}


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a directory that holds ``tokenizer.json``, or that file itself.

    ``tokenizer_config.json`` beside it says which special token plays which role. Raises `TokenizerError` when the
    file is missing, damaged or of a kind that SheepOp does not read, or when the two files contradict each other.
    """
    path = Path(path)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    content = _read_text(file)
    settings_file = file.with_name(SETTINGS_FILE)
    settings = read_json(settings_file, TokenizerError) if settings_file.is_file() else {}
    if not isinstance(settings, dict):
        raise TokenizerError(f"{settings_file} is damaged: it is not a table of keys and values.")
    try:
        return tokenizer_from_json(content, settings)
    except TokenizerError as error:
        raise TokenizerError(f"Cannot use the tokenizer {file}: {error}") from None


def tokenizer_from_json(content: str, settings: Mapping[str, Any] | None = None) -> Tokenizer:
    """The tokenizer that the text of a ``tokenizer.json`` and the keys of its ``tokenizer_config.json`` describe."""
    kind = _model_type(content)
    if kind not in _READERS:
        raise TokenizerError(f"{TOKENIZER_FILE} holds a {kind} tokenizer. {WHAT_IS_READ}")
    return _READERS[kind](content, settings or {})


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TokenizerError(
            f"There is no tokenizer at {file}. Give a directory that holds {TOKENIZER_FILE}, or the file."
        ) from None
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file} is damaged: it is not UTF-8 text ({error.reason}).") from None
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read: {error.strerror}.") from None


def _model_type(content: str) -> str:
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{TOKENIZER_FILE} is damaged: it is not valid JSON ({error}).") from None
    model = description.get("model") if isinstance(description, dict) else None
    if not isinstance(model, dict):
        raise TokenizerError(f"{TOKENIZER_FILE} is not a file of the tokenizers library: it has no model.")
    # Files of the library's first versions name no type; only BPE has merges.
    return str(model.get("type", "BPE" if "merges" in model else "nameless"))
