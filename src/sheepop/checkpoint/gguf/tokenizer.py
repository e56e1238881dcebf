"""Our tokenizers as the metadata of a GGUF file, and back: one row per model of llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sheepop.checkpoint.gguf.byte_level import byte_level_description, byte_level_entries, character_entries
from sheepop.checkpoint.gguf.keys import Keys
from sheepop.checkpoint.gguf.token_list import (
    MODEL,
    ROLE_KEYS,
    TokenKind,
    TokenList,
    read_settings,
    read_tokens,
    role_entries,
)
from sheepop.checkpoint.gguf.values import Value, text
from sheepop.core.errors import CheckpointError, TokenizerError
from sheepop.tokenizer import CharTokenizer, Tokenizer, tokenizer_from_json

_PREFIX = "tokenizer"
# A key of the format for the file from which a tokenizer of the tokenizers library is read.
_WHOLE = "huggingface.json"
_NONE = "no_vocab"


def tokenizer_metadata(tokenizer: Tokenizer | None, rows: int) -> tuple[dict[str, Value], list[str]]:
    """The keys for a tokenizer, or for none, of a model whose embedding has `rows`; and remarks for the user.

    Raises `CheckpointError` when llama.cpp cannot give the same ids.
    """
    if tokenizer is None:
        return {f"{_PREFIX}.{MODEL}": text(_NONE)}, []
    content = tokenizer.to_json()
    if isinstance(tokenizer, CharTokenizer):
        tokens, further, notes = character_entries(tokenizer)
    else:
        tokens, further, notes = _entries(_canonical(content))
    tokens.pad(rows)
    entries = {MODEL: text("gpt2"), **further, **tokens.entries(), **role_entries(tokenizer), _WHOLE: text(content)}
    return {f"{_PREFIX}.{key}": value for key, value in entries.items()}, notes


def tokenizer_from_metadata(metadata: Mapping[str, Value], rows: int, path: Path) -> Tokenizer:
    """The tokenizer of a file; exactly the one it was written from where the file still says the same.

    Raises `CheckpointError` when there is none, or none that SheepOp reads.
    """
    keys = Keys(metadata, _PREFIX, path)
    kind = keys.text(MODEL, _NONE)
    if kind == _NONE:
        raise CheckpointError(f"{path} has no tokenizer. Export the model with one.")
    if kind not in _READERS:
        known = " and ".join(_READERS)
        raise keys.problem(MODEL, f"is a model of tokens that SheepOp does not read; it reads {known}")
    tokens = read_tokens(keys, rows).without_padding()
    settings = read_settings(keys, tokens)
    try:
        whole = _whole(keys, settings, metadata, rows)
        return whole or tokenizer_from_json(_content(keys, tokens, _READERS[kind](keys, tokens)), settings)
    except TokenizerError as error:
        raise CheckpointError(f"The tokenizer in {path} cannot be used: {error}") from None


def _entries(description: dict[str, Any]) -> tuple[TokenList, dict[str, Value], list[str]]:
    kind = description["model"]["type"]
    if kind != "BPE":
        raise CheckpointError(
            f"A {kind} tokenizer cannot stand in a GGUF file so that llama.cpp gives the same ids; byte-level BPE can."
        )
    return byte_level_entries(description)


def _whole(keys: Keys, settings: dict[str, Any], metadata: Mapping[str, Value], rows: int) -> Tokenizer | None:
    """The tokenizer of the ``tokenizer.json`` in the file, if it is one that would be written as this file is."""
    if not keys.has(_WHOLE):
        return None
    try:
        tokenizer = tokenizer_from_json(keys.text(_WHOLE), settings)
        entries, _ = tokenizer_metadata(tokenizer, rows)
    except (TokenizerError, CheckpointError):
        return None
    return tokenizer if all(metadata.get(key) == value for key, value in entries.items()) else None


def _canonical(content: str) -> dict[str, Any]:
    """A ``tokenizer.json`` with every option that the library has."""
    import tokenizers

    description: dict[str, Any] = json.loads(tokenizers.Tokenizer.from_str(content).to_str())
    return description


def _content(keys: Keys, tokens: TokenList, description: dict[str, Any]) -> str:
    """A ``tokenizer.json`` with the tokens that are special, or found in any text."""
    with_role = {keys.size(key) for key in ROLE_KEYS.values() if keys.has(key)}
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind is not TokenKind.USER_DEFINED or token_id in with_role,
        }
        for token_id, (token, kind) in enumerate(zip(tokens.texts, tokens.kinds, strict=True))
        if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED) or token_id in with_role
    ]
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None}
    return json.dumps({**head, **description}, ensure_ascii=False)


_READERS = {"gpt2": byte_level_description}
