"""Checks that a tokenizer fits a model: the network needs an embedding row for every token."""

from __future__ import annotations

import json
from typing import Any

from sheepop.core.errors import CheckpointError, TokenizerError, first_few
from sheepop.model import ModelConfig
from sheepop.tokenizer import Tokenizer, tokenizer_from_json

_SHOWN = 5


def require_fit(tokenizer: Tokenizer, config: ModelConfig, where: object) -> None:
    """Raises `CheckpointError` if the tokenizer has an id for which the model has no embedding row."""
    if tokenizer.vocab_size > config.vocabulary:
        raise CheckpointError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens, but the model has only {config.vocabulary} "
            "embedding rows (vocab_size). Use the tokenizer of this model."
        )


def fitting(tokenizer: Tokenizer, config: ModelConfig, where: object) -> tuple[Tokenizer, list[str]]:
    """Returns the tokenizer without special tokens that have no embedding row, and notes, one of which names them.

    Some published models have such tokens: text-only Gemma 3 has an image token, others have a padding token that was
    added later. They represent no text, and the model cannot read or write them. Raises `CheckpointError` if the
    tokenizer still does not fit.
    """
    rows, notes = config.vocabulary, list(tokenizer.notes)
    surplus = [text for text, token_id in tokenizer.special_tokens.items() if token_id >= rows]
    if not surplus:
        require_fit(tokenizer, config, where)
        return tokenizer, notes
    description = json.loads(tokenizer.to_json())
    added = description.get("added_tokens") or []
    description["added_tokens"] = [token for token in added if token["content"] not in surplus]
    settings = _settings_without(tokenizer.settings(), set(surplus), rows)
    try:
        kept = tokenizer_from_json(json.dumps(description, ensure_ascii=False), settings)
    except TokenizerError:
        kept = tokenizer  # another part of it needs one of these tokens
    require_fit(kept, config, where)
    named = first_few(surplus, _SHOWN)
    return kept, [*notes, f"The model has no embedding for the special tokens {named}, so they were removed."]


def _settings_without(settings: dict[str, Any], surplus: set[str], rows: int) -> dict[str, Any]:
    """Returns ``tokenizer_config.json`` without the tokens in `surplus`, except roles that texts need, such as eos."""
    kept = dict(settings)
    for role in ("pad_token", "sep_token", "cls_token", "mask_token"):
        if _is_one_of(kept.get(role), surplus):
            del kept[role]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(kept.get(key), list):
            kept[key] = [token for token in kept[key] if not _is_one_of(token, surplus)]
        elif isinstance(kept.get(key), dict):
            kept[key] = {name: token for name, token in kept[key].items() if not _is_one_of(token, surplus)}
    decoder = kept.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        kept["added_tokens_decoder"] = {
            number: entry for number, entry in decoder.items() if number.isdecimal() and int(number) < rows
        }
    return kept


def _is_one_of(token: Any, surplus: set[str]) -> bool:
    """Whether a token, given as its text or as a table with its text, is in `surplus`."""
    text = token.get("content") if isinstance(token, dict) else token
    return isinstance(text, str) and text in surplus
