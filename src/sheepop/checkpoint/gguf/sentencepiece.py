"""SentencePiece BPE in a GGUF file: the tokenizer model that llama.cpp calls ``llama``.

llama.cpp merges any two neighbours that form a token, the token with the best score first, and encodes the rest as
bytes. A ``tokenizer.json`` expresses the same by listing every pair that forms a token, in the order of the scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from sheepop.checkpoint.gguf.metadata import Value, value_of
from sheepop.checkpoint.gguf.token_list import (
    KINDS,
    LOWEST_SCORE,
    ROLE_KEYS,
    SCORES,
    TOKENS,
    TokenKind,
    TokenList,
    described_tokens,
    looking_notes,
)
from sheepop.checkpoint.given import Given
from sheepop.core.errors import CheckpointError
from sheepop.tokenizer.vocabulary import BYTE_TOKENS

_PRE = "ggml.pre"
_SPACE_PREFIX = "ggml.add_space_prefix"
_SPACE = "\u2581"

_ESCAPE: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND: dict[str, Any] = {"type": "Prepend", "prepend": _SPACE}
# Gemma's files split at spaces, which has no effect, because the normalizer has replaced all spaces.
_CUT_AT_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def sentencepiece_entries(description: dict[str, Any]) -> tuple[TokenList, dict[str, Value], list[str]]:
    """Returns tokens, further keys and notes for a ``tokenizer.json`` that merges like SentencePiece.

    Raises `CheckpointError` if llama.cpp would produce other ids.
    """
    model = description["model"]
    if not model["byte_fallback"] or not model["vocab"].keys() >= set(BYTE_TOKENS):
        raise CheckpointError(
            "The tokenizer has no tokens for the 256 bytes, as which llama.cpp encodes characters without a token."
        )
    if model["ignore_merges"]:
        raise CheckpointError(
            "The tokenizer looks up whole words before merging (ignore_merges), which llama.cpp does not do."
        )
    prefix, everywhere = _space_prefix(description)
    tokens, bytes_ = described_tokens(description), set(BYTE_TOKENS)
    for token_id, (token, kind) in enumerate(zip(tokens.texts, tokens.kinds, strict=True)):
        if token == model["unk_token"]:
            tokens.kinds[token_id] = TokenKind.UNKNOWN
        elif kind is TokenKind.NORMAL and token in bytes_:
            tokens.kinds[token_id] = TokenKind.BYTE
    if not everywhere and TokenKind.USER_DEFINED in tokens.kinds:
        raise CheckpointError(
            "The tokenizer puts a space only before a text, but llama.cpp also puts one after added tokens."
        )
    tokens.scores = _scores(model["merges"], tokens)
    keys = {_PRE: value_of("default"), _SPACE_PREFIX: value_of(prefix)}
    return tokens, keys, looking_notes(description["added_tokens"])


def sentencepiece_description(keys: Given, tokens: TokenList) -> dict[str, Any]:
    """Returns the ``tokenizer.json`` of a file's model, without added tokens."""
    if tokens.scores is None:
        raise keys.problem(SCORES, "is missing")
    if not set(tokens.texts) >= set(BYTE_TOKENS):
        raise keys.problem(TOKENS, "does not have a token for each of the 256 bytes, as this model needs")
    prefix = keys.typed(_SPACE_PREFIX, bool, True)
    unescape: dict[str, Any] = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    steps = [unescape, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [_PREPEND, _ESCAPE] if prefix else [_ESCAPE]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*steps, strip] if prefix else steps},
        "model": {
            "type": "BPE",
            "unk_token": _unknown(keys, tokens),
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens.texts)},
            "merges": list(_merges(tokens, tokens.scores)),
        },
    }


def _space_prefix(description: Mapping[str, Any]) -> tuple[bool, bool]:
    """Returns whether a space is put before a text, and whether also after every added token.

    Raises `CheckpointError` for any other change of the text.
    """
    normalizer, cut = description["normalizer"], description["pre_tokenizer"]
    steps = normalizer["normalizers"] if normalizer and normalizer["type"] == "Sequence" else [normalizer]
    if cut in (None, _CUT_AT_SPACES) and steps in ([_PREPEND, _ESCAPE], [_ESCAPE]):
        return len(steps) == 2, True
    if normalizer is None and cut and cut["type"] == "Metaspace" and cut["replacement"] == _SPACE and not cut["split"]:
        return cut["prepend_scheme"] != "never", cut["prepend_scheme"] != "first"
    changes = [step["type"] for step in (*steps, cut) if step is not None]
    raise CheckpointError(
        f"The tokenizer changes text before it looks for tokens ({', '.join(changes)}), but llama.cpp only replaces "
        "spaces."
    )


def _scores(merges: list[Any], tokens: TokenList) -> list[float]:
    """Returns a score for each token, from the rank of its merges.

    Raises `CheckpointError` unless the merges are those of SentencePiece: all that the vocabulary allows, with the
    merges that form the same token next to each other.
    """
    ids = {token: token_id for token_id, token in enumerate(tokens.texts)}
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    order = [token for token, _ in groupby(left + right for left, right in pairs)]
    normal = {token for token, kind in zip(tokens.texts, tokens.kinds, strict=True) if kind is TokenKind.NORMAL}
    allowed = {pair for token in normal for pair in _splits(token, normal)}
    made = {pair for pair in pairs if "".join(pair) in normal}
    if len(set(order)) < len(order) or made != allowed:
        raise CheckpointError(
            "The tokenizer's list of merges differs from that of SentencePiece. For a tokenizer that does not split "
            "text first, llama.cpp merges whatever forms a token, as SentencePiece does."
        )
    scores = [LOWEST_SCORE] * len(ids)
    for rank, token in enumerate(order):
        if token in normal:
            scores[ids[token]] = -float(rank)
    return scores


def _unknown(keys: Given, tokens: TokenList) -> str:
    """Returns the text of the unknown token: the one that the file names, else the only one of that kind."""
    kinds = [token_id for token_id, kind in enumerate(tokens.kinds) if kind is TokenKind.UNKNOWN]
    named = ROLE_KEYS["unk"]
    if not keys.has(named) and len(kinds) != 1:
        raise keys.problem(KINDS, f"has {len(kinds)} unknown tokens, and tokenizer.{named} does not name one")
    token_id = keys.typed(named, int) if keys.has(named) else kinds[0]
    if token_id >= len(tokens.texts):
        raise keys.problem(named, f"is not one of the {len(tokens.texts):,} tokens")
    return tokens.texts[token_id]


def _merges(tokens: TokenList, scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yields every pair of tokens that forms a token, best score first; the lower id first in a tie."""
    kinds = zip(tokens.texts, tokens.kinds, scores, strict=True)
    normal = {token: -score for token, kind, score in kinds if kind is TokenKind.NORMAL}
    for token in sorted(normal, key=normal.__getitem__):
        yield from _splits(token, normal)


def _splits(token: str, parts: Mapping[str, float] | set[str]) -> Iterator[tuple[str, str]]:
    for cut in range(1, len(token)):
        if token[:cut] in parts and token[cut:] in parts:
            yield token[:cut], token[cut:]
