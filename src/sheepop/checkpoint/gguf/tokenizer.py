"""Converts our tokenizers to the metadata of a GGUF file and back; a table lists llama.cpp's tokenizer models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from sheepop.checkpoint.gguf.algorithms import (
    byte_level_adds_bos,
    byte_level_description,
    byte_level_entries,
    character_entries,
    gemma4_description,
    sentencepiece_description,
    sentencepiece_entries,
)
from sheepop.checkpoint.gguf.metadata import Metadata, Value, value_of
from sheepop.checkpoint.gguf.token_list import (
    MODEL,
    ROLE_KEYS,
    TokenKind,
    TokenList,
    end_entries,
    read_end_ids,
    read_settings,
    read_tokens,
    role_entries,
)
from sheepop.checkpoint.given import Given
from sheepop.core.errors import CheckpointError, TokenizerError
from sheepop.tokenizer import ByteLevelBPE, CharTokenizer, SpecialRole, Tokenizer, tokenizer_from_json
from sheepop.tokenizer.settings import post_processor

_PREFIX = "tokenizer"
# The format's key for the content of a ``tokenizer.json``.
_WHOLE = "huggingface.json"
_NONE = "no_vocab"
_ADDED = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)


def tokenizer_metadata(
    tokenizer: Tokenizer | None, rows: int, end_ids: Sequence[int] = ()
) -> tuple[dict[str, Value], list[str]]:
    """Returns the keys for a tokenizer, or for none, of a model with `rows` embedding rows; and notes for the user.

    `end_ids` are tokens that end a text, in addition to the tokenizer's own. Raises `CheckpointError` if llama.cpp
    cannot produce the same ids.
    """
    if tokenizer is None:
        left_out = ["The tokens that end a text are left out, because the tokenizer is."] if end_ids else []
        return {f"{_PREFIX}.{MODEL}": value_of(_NONE)}, left_out
    content = tokenizer.to_json()
    model, tokens, further, notes = _entries(tokenizer, content)
    tokens.pad(rows)
    ends, end_notes = end_entries(tokenizer, end_ids)
    entries = {MODEL: value_of(model), **further, **tokens.entries(), **role_entries(tokenizer), **ends}
    entries[_WHOLE] = value_of(content)
    return {f"{_PREFIX}.{key}": value for key, value in entries.items()}, notes + end_notes


def tokenizer_from_metadata(metadata: Mapping[str, Value], rows: int, path: Path) -> Tokenizer:
    """Returns the tokenizer of a file, exactly the original one if its keys agree with the stored ``tokenizer.json``.

    Raises `CheckpointError` if there is no tokenizer, or SheepOp cannot read it.
    """
    keys = Metadata(metadata, _PREFIX, path)
    name = keys.typed(MODEL, str, _NONE)
    if name == _NONE:
        raise CheckpointError(f"{path} has no tokenizer. Give the one that belongs to it with --tokenizer.")
    if name not in _MODELS:
        reason = f"is a tokenizer model that SheepOp does not read; it reads {' and '.join(_MODELS)}"
        raise keys.problem(MODEL, reason)
    model = _MODELS[name]
    tokens = read_tokens(keys, rows).without_padding()
    settings = read_settings(keys, tokens, add_bos=model.add_bos(keys), roles=model.roles)
    try:
        whole = _whole(keys, settings, metadata, rows)
        if whole is not None:
            return whole
        description = _description(tokens, settings, model.describe(keys, tokens))
        return tokenizer_from_json(orjson.dumps(description), settings, parsed=description)
    except TokenizerError as error:
        raise CheckpointError(f"The tokenizer in {path} cannot be used: {error}") from None


def end_ids_from_metadata(metadata: Mapping[str, Value], rows: int, path: Path) -> list[int]:
    """Returns the tokens that end a text according to a file."""
    return read_end_ids(Metadata(metadata, _PREFIX, path), rows)


@dataclass(frozen=True)
class _Model:
    """How to read a tokenizer model, and llama.cpp's defaults for missing keys."""

    describe: Callable[[Given, TokenList], dict[str, Any]]
    add_bos: Callable[[Given], bool]
    roles: Mapping[SpecialRole, int]


_MODELS = {
    "gpt2": _Model(byte_level_description, byte_level_adds_bos, {}),
    "gemma4": _Model(gemma4_description, lambda keys: True, {}),
    "llama": _Model(sentencepiece_description, lambda keys: True, {"unk": 0, "bos": 1, "eos": 2}),
}


def _entries(tokenizer: Tokenizer, content: str) -> tuple[str, TokenList, dict[str, Value], list[str]]:
    """Returns the model's name, the tokens, further keys, and notes."""
    if isinstance(tokenizer, CharTokenizer):
        return "gpt2", *character_entries(tokenizer)
    import tokenizers

    description = json.loads(tokenizers.Tokenizer.from_str(content).to_str())  # fills in all options of the library
    kind = description["model"]["type"]
    if kind != "BPE":
        raise CheckpointError(
            f"A GGUF file cannot store a {kind} tokenizer so that llama.cpp produces the same ids; it can store a BPE "
            "tokenizer."
        )
    if isinstance(tokenizer, ByteLevelBPE):
        return "gpt2", *byte_level_entries(description)
    return "llama", *sentencepiece_entries(description)


def _whole(keys: Given, settings: dict[str, Any], metadata: Mapping[str, Value], rows: int) -> Tokenizer | None:
    """Returns the tokenizer of the file's ``tokenizer.json``, if writing it would give the keys of this file."""
    if not keys.has(_WHOLE):
        return None
    try:
        tokenizer = tokenizer_from_json(keys.typed(_WHOLE, str), settings)
        entries, _ = tokenizer_metadata(tokenizer, rows)
    except (TokenizerError, CheckpointError):
        return None
    return tokenizer if all(metadata.get(key) == value for key, value in entries.items()) else None


def _description(tokens: TokenList, settings: Mapping[str, Any], description: dict[str, Any]) -> dict[str, Any]:
    """Returns a ``tokenizer.json`` from `description`, with added tokens and the tokens put around a text."""
    with_role = {settings[key] for role in ROLE_KEYS if (key := f"{role}_token") in settings}
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added: list[dict[str, Any]] = [
        {"id": token_id, "content": token, **usual, "special": kind is not TokenKind.USER_DEFINED or token in with_role}
        for token_id, (token, kind) in enumerate(zip(tokens.texts, tokens.kinds, strict=True))
        if kind in _ADDED or token in with_role
    ]
    around = post_processor(settings, {token["content"]: token["id"] for token in added})
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": around}
    return {**head, **description}
