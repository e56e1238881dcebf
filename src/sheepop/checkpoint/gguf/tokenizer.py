"""Converts our tokenizers to the metadata of a GGUF file and back; a table lists llama.cpp's tokenizer models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sheepop.checkpoint.gguf.algorithms import (
    Described,
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
    Vocabulary,
    end_entries,
    read_end_ids,
    read_settings,
    read_tokens,
    role_entries,
)
from sheepop.core.errors import CheckpointError, TokenizerError
from sheepop.tokenizer import (
    ByteLevelBPE,
    CharTokenizer,
    SpecialRole,
    Tokenizer,
    tokenizer_from_json,
    tokenizer_from_tables,
)
from sheepop.tokenizer.bpe_tables import BpeTables
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
        description, merges = model.describe(keys, tokens)
        tables = BpeTables.made(_with_around(tokens, settings, description), tokens.texts, *merges)
        return tokenizer_from_tables(tables.with_added(_added(tokens, settings)), settings)
    except TokenizerError as error:
        raise CheckpointError(f"The tokenizer in {path} cannot be used: {error}") from None


def end_ids_from_metadata(metadata: Mapping[str, Value], rows: int, path: Path) -> list[int]:
    """Returns the tokens that end a text according to a file."""
    return read_end_ids(Metadata(metadata, _PREFIX, path), rows)


@dataclass(frozen=True)
class _Model:
    """How to read a tokenizer model, and llama.cpp's defaults for missing keys."""

    describe: Callable[[Metadata, Vocabulary], Described]
    add_bos: Callable[[Metadata], bool]
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


def _whole(keys: Metadata, settings: dict[str, Any], metadata: Mapping[str, Value], rows: int) -> Tokenizer | None:
    """Returns the tokenizer of the file's ``tokenizer.json``, if writing it would give the keys of this file."""
    if not keys.has(_WHOLE):
        return None
    try:
        tokenizer = tokenizer_from_json(keys.typed(_WHOLE, str), settings)
        entries, _ = tokenizer_metadata(tokenizer, rows)
    except (TokenizerError, CheckpointError):
        return None
    return tokenizer if all(metadata.get(key) == value for key, value in entries.items()) else None


def _added(tokens: Vocabulary, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the ``added_tokens`` of a file: those that it marks as such, and those with a role."""
    with_role = {settings[key] for role in ROLE_KEYS if (key := f"{role}_token") in settings}
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ids = {*np.flatnonzero(np.isin(tokens.kinds, _ADDED)).tolist(), *tokens.ids_of(sorted(with_role)).tolist()}
    found = [(token_id, tokens.texts[token_id], int(tokens.kinds[token_id])) for token_id in sorted(ids)]
    return [
        {"id": token_id, "content": token, **usual, "special": kind != TokenKind.USER_DEFINED or token in with_role}
        for token_id, token, kind in found
    ]


def _with_around(tokens: Vocabulary, settings: Mapping[str, Any], description: dict[str, Any]) -> dict[str, Any]:
    """Returns a ``tokenizer.json`` from `description`, with the tokens put around a text."""
    named = [settings[key] for role in ("bos", "eos") if (key := f"{role}_token") in settings]
    around = post_processor(settings, dict(zip(named, tokens.ids_of(named).tolist(), strict=True)))
    return {"version": "1.0", "truncation": None, "padding": None, "post_processor": around, **description}
