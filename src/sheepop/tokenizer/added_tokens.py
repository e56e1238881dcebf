"""Adds the tokens that only ``tokenizer_config.json`` names to the content of a ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.interface import SETTINGS_FILE, SPECIAL_TOKENS, TOKENIZER_FILE
from sheepop.tokenizer.settings import FURTHER_LISTS, FURTHER_ROLES, RECORDED, SPECIAL_FLAGS, role_text

Entry = dict[str, Any]


def recorded_tokens(settings: Mapping[str, Any]) -> dict[int, Entry]:
    """The tokens in ``added_tokens_decoder`` by id, with all flags; raises `TokenizerError` if it is damaged."""
    try:
        found = {
            int(token_id): {**SPECIAL_FLAGS, **({"content": token} if isinstance(token, str) else token)}
            for token_id, token in settings.get(RECORDED, {}).items()
        }
    except (AttributeError, TypeError, ValueError):
        found = {-1: {}}
    if any(token_id < 0 or not isinstance(token.get("content"), str) for token_id, token in found.items()):
        raise TokenizerError(f"{SETTINGS_FILE}: {RECORDED} must be a table from id to token.")
    return found


def with_recorded_tokens(description: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """`description` with all tokens named in `settings` among its added tokens, marked as special where stated.

    In some files such a token is an ordinary entry of the vocabulary. In others, to which tokens were added later, it
    is missing: then it gets the next free id, as in transformers. Raises `TokenizerError` if `settings` state a
    different id.
    """
    added, vocabulary = description.get("added_tokens") or [], _vocabulary(description)
    if not vocabulary or not _are_tokens(added):
        return description
    recorded, further = recorded_tokens(settings), _further_names(settings)
    roles = {text for role in SPECIAL_TOKENS if (text := role_text(settings, role)) is not None}
    special = {*roles, *further, *(token["content"] for token in recorded.values() if token["special"])}
    flags = {token["content"]: token for token in recorded.values()}
    ids: dict[str, int] = {token["content"]: token["id"] for token in added}
    marked = [{**token, "special": True} if token["content"] in special else token for token in added]
    # In the order of ids, in which the library adds them.
    inside = sorted((vocabulary[text], text) for text in {*special, *flags} - ids.keys() if text in vocabulary)
    tokens = [
        *({**SPECIAL_FLAGS, **flags.get(text, {}), "id": token_id, "content": text} for token_id, text in inside),
        *marked,
        *_appended({**vocabulary, **ids}, recorded, further),
    ]
    return description if tokens == added else {**description, "added_tokens": tokens}


def _appended(ids: Mapping[str, int], recorded: Mapping[int, Entry], further: list[str]) -> Iterator[Entry]:
    """Yields the tokens that are not in `ids`, with the next ids: first those with a stated id, then the others."""
    first = max(ids.values()) + 1
    missing = {token_id: token for token_id, token in sorted(recorded.items()) if token["content"] not in ids}
    for free, (token_id, token) in enumerate(missing.items(), first):
        if token_id != free:
            raise TokenizerError(
                f"{SETTINGS_FILE} says that {token['content']!r} has the id {token_id}, but {TOKENIZER_FILE} does not "
                f"have it, and its next id is {free}. Use the two files of the same tokenizer."
            )
        yield {**token, "id": token_id}
    known = ids.keys() | {token["content"] for token in missing.values()}
    for token_id, text in enumerate((text for text in further if text not in known), first + len(missing)):
        yield {"id": token_id, "content": text, **SPECIAL_FLAGS}


def _further_names(settings: Mapping[str, Any]) -> list[str]:
    """The distinct special tokens that `settings` name besides those of the four main roles."""
    found = [settings.get(key) for key in FURTHER_ROLES]
    for key in FURTHER_LISTS:
        names = settings.get(key) or []
        found += names.values() if isinstance(names, dict) else names if isinstance(names, list) else [0]
    named = [token.get("content") if isinstance(token, dict) else token for token in found if token is not None]
    texts = [text for text in named if isinstance(text, str) and text]
    if len(texts) < len(named):
        raise TokenizerError(f"{SETTINGS_FILE}: {', '.join((*FURTHER_ROLES, *FURTHER_LISTS))} must name tokens.")
    return list(dict.fromkeys(texts))


def _are_tokens(added: Any) -> bool:
    return isinstance(added, list) and all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int
        for token in added
    )


def _vocabulary(description: Mapping[str, Any]) -> dict[str, int]:
    model = description.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        pairs = [entry for entry in vocabulary if isinstance(entry, list) and entry and isinstance(entry[0], str)]
        return {entry[0]: token_id for token_id, entry in enumerate(pairs)} if len(pairs) == len(vocabulary) else {}
    if isinstance(vocabulary, dict) and all(isinstance(token_id, int) for token_id in vocabulary.values()):
        return vocabulary
    return {}
