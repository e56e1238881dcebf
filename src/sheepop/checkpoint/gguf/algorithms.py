"""The algorithms of GGUF vocabularies: byte-level BPE, llama.cpp's model ``gpt2``, and SentencePiece, ``llama``.

``gemma4`` spells text like ``llama``, and lists its merges like ``gpt2``; it is only read.

A character tokenizer is also written as byte-level BPE, whose merges form each character from its bytes.
For SentencePiece, llama.cpp merges any two neighbours that form a token, the token with the best score first, and
encodes the rest as bytes. A ``tokenizer.json`` expresses the same by listing every pair that forms a token, in the
order of the scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sheepop.checkpoint.gguf.metadata import Metadata, Value, texts, value_of
from sheepop.checkpoint.gguf.pre_tokenizers import BY_NAME, find_name
from sheepop.checkpoint.gguf.token_list import (
    KINDS,
    LOWEST_SCORE,
    ROLE_KEYS,
    SCORES,
    TOKENS,
    TokenKind,
    TokenList,
    Vocabulary,
    described_tokens,
    looking_notes,
)
from sheepop.core.errors import CheckpointError
from sheepop.tokenizer import CharTokenizer
from sheepop.tokenizer.text_index import Places, TextIndex, joined
from sheepop.tokenizer.vocabulary import BYTE_TOKENS, bytes_as_characters

Merges: TypeAlias = tuple[Places, Places, Places, Places | None]
"""The ids of the left and the right part of each merge, of what they form, and the rank, or None for their order."""
Described: TypeAlias = tuple[dict[str, Any], Merges]

_PIECE = 2**14  # tokens that are taken apart at a time
_PRE = "ggml.pre"
_MERGES = "ggml.merges"


def byte_level_entries(description: dict[str, Any]) -> tuple[TokenList, dict[str, Value], list[str]]:
    """Returns tokens, further keys and notes for a byte-level BPE ``tokenizer.json``.

    Raises `CheckpointError` if llama.cpp would split text differently.
    """
    model = description["model"]
    name = find_name(description["pre_tokenizer"], bool(model.get("ignore_merges")))
    if name is None:
        raise CheckpointError(
            "llama.cpp cannot split text like this tokenizer, and would produce other ids. For byte-level BPE it "
            "knows the patterns of GPT-2, Llama 3, Qwen, DeepSeek and others; tokenizer.pattern=llama3, the "
            "default, trains with Llama 3's. Export without the tokenizer for a program that brings its own."
        )
    notes = _normalizer_notes(description["normalizer"]) + looking_notes(description["added_tokens"])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return described_tokens(description), {_PRE: value_of(name), _MERGES: texts(merges)}, notes


def character_entries(tokenizer: CharTokenizer) -> tuple[TokenList, dict[str, Value], list[str]]:
    """Returns tokens, further keys and notes for a character tokenizer."""
    special = {token_id: token for token, token_id in tokenizer.special_tokens.items()}
    tokens = TokenList([], [])
    merges = []
    for token_id in range(tokenizer.vocab_size):
        if token_id in special:
            tokens.append(special[token_id], TokenKind.CONTROL)
            continue
        spelled = bytes_as_characters(tokenizer.token_bytes(token_id))
        tokens.append(spelled, TokenKind.NORMAL)
        merges += [f"{spelled[:end]} {spelled[end]}" for end in range(1, len(spelled))]
    note = (
        "llama.cpp skips characters that are not in the vocabulary of a character tokenizer; SheepOp encodes them as "
        "<unk>."
    )
    # Characters may share their first bytes.
    return tokens, {_PRE: value_of("gpt-2"), _MERGES: texts(dict.fromkeys(merges))}, [note]


def byte_level_adds_bos(keys: Metadata) -> bool:
    """Whether llama.cpp by default puts a BOS token before a text."""
    known = BY_NAME.get(keys.typed(_PRE, str, ""))
    return known is not None and known.add_bos


def byte_level_description(keys: Metadata, tokens: Vocabulary) -> Described:
    """Returns the ``tokenizer.json`` of a file's byte-level BPE, without added tokens, and its merges."""
    name = keys.typed(_PRE, str, "")
    known = BY_NAME.get(name)
    if known is None:
        reason = f"is a way to split text that SheepOp does not know; it knows {', '.join(BY_NAME)}"
        raise keys.problem(_PRE, reason if name else "is missing, but it defines how text is split")
    description = {
        "normalizer": None,
        "pre_tokenizer": known.description,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": known.ignore_merges},
    }
    return description, _listed_merges(keys, tokens)


def _listed_merges(keys: Metadata, tokens: Vocabulary) -> Merges:
    """Returns the listed pairs: texts of two tokens with a space between them."""
    found = keys.texts(_MERGES)
    spaces = np.flatnonzero(found.text == ord(" "))
    counts = np.bincount(np.searchsorted(found.starts, spaces, side="right") - 1, minlength=len(found))
    if len(wrong := np.flatnonzero(counts != 1)):
        raise keys.problem(_MERGES, f"has the entry {found[wrong[0]]!r}, which does not have two parts")
    begins, ends, index = found.starts[:-1], found.starts[1:], tokens.texts.index
    left = index.find(found.hashes(begins, spaces))
    right = index.find(found.hashes(spaces + 1, ends))
    merged = index.find(joined(tokens.texts, left, right))
    if len(wrong := np.flatnonzero((left < 0) | (right < 0) | (merged < 0))):
        raise keys.problem(_MERGES, f"cannot be used: the entry {found[wrong[0]]!r} is not two tokens that form one")
    return left, right, merged, None


def _normalizer_notes(normalizer: Any) -> list[str]:
    if normalizer is None:
        return []
    if normalizer == {"type": "NFC"}:
        return ["llama.cpp does not normalise text to Unicode's composed form (NFC) before it splits it."]
    raise CheckpointError(
        f"The tokenizer changes text before it splits it ({normalizer['type']}), which llama.cpp does not do."
    )


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


def sentencepiece_description(keys: Metadata, tokens: Vocabulary) -> Described:
    """Returns the ``tokenizer.json`` of a file's model, without added tokens, and its merges."""
    if tokens.scores is None:
        raise keys.problem(SCORES, "is missing")
    description = _spelled_description(keys, tokens, keys.typed(_SPACE_PREFIX, bool, True))
    return description, _merges(tokens, tokens.scores)


def gemma4_description(keys: Metadata, tokens: Vocabulary) -> Described:
    """Returns the ``tokenizer.json`` of a file's model that lists its merges, without added tokens, and its merges."""
    keys.take(_SPACE_PREFIX, None)
    return _spelled_description(keys, tokens, prefix=False), _listed_merges(keys, tokens)


def _spelled_description(keys: Metadata, tokens: Vocabulary, prefix: bool) -> dict[str, Any]:
    """Returns the ``tokenizer.json`` of BPE over characters, with spaces replaced and bytes for unknown characters."""
    if not tokens.has_all(BYTE_TOKENS):
        raise keys.problem(TOKENS, "does not have a token for each of the 256 bytes, as this model needs")
    unescape: dict[str, Any] = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    steps = [unescape, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    options = {"fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [_PREPEND, _ESCAPE] if prefix else [_ESCAPE]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*steps, strip] if prefix else steps},
        "model": {"type": "BPE", "unk_token": _unknown(keys, tokens), **options},
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
    allowed = set(_splits(normal, normal))
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


def _unknown(keys: Metadata, tokens: Vocabulary) -> str:
    """Returns the text of the unknown token: the one that the file names, else the only one of that kind."""
    kinds = np.flatnonzero(tokens.kinds == TokenKind.UNKNOWN).tolist()
    named = ROLE_KEYS["unk"]
    if not keys.has(named) and len(kinds) != 1:
        raise keys.problem(KINDS, f"has {len(kinds)} unknown tokens, and tokenizer.{named} does not name one")
    token_id = keys.typed(named, int) if keys.has(named) else kinds[0]
    if token_id >= len(tokens):
        raise keys.problem(named, f"is not one of the {len(tokens):,} tokens")
    return tokens.texts[token_id]


def _merges(tokens: Vocabulary, scores: NDArray[np.float32]) -> Merges:
    """Returns every pair of tokens that forms a token, best score first; the lower id first in a tie."""
    texts, is_normal = tokens.texts, tokens.kinds == TokenKind.NORMAL
    normal = np.flatnonzero(is_normal)
    index, begins, ends = TextIndex(texts, normal), texts.starts[:-1], texts.starts[1:]
    found = []
    for first in range(0, len(texts), _PIECE):
        cuts, whole = texts.cuts(first, min(first + _PIECE, len(texts)))
        cuts, whole = cuts[is_normal[whole]], whole[is_normal[whole]]
        left = index.find(texts.hashes(begins[whole], cuts))
        cuts, whole, left = (each[left >= 0] for each in (cuts, whole, left))
        right = index.find(texts.hashes(cuts, ends[whole]))
        found.append([each[right >= 0] for each in (left, right, whole)])
    left, right, whole = map(np.concatenate, zip(*found, strict=True))
    counts = np.bincount(whole, minlength=len(texts))
    best_first = normal[np.argsort(-scores[normal], kind="stable")]
    before = np.zeros(len(texts), dtype=np.int64)  # the pairs of better tokens
    before[best_first[1:]] = np.cumsum(counts[best_first])[:-1]
    ranks = before[whole] + np.arange(len(whole)) - (np.cumsum(counts) - counts)[whole]
    return left, right, whole, ranks


def _splits(tokens: Iterable[str], parts: set[str]) -> list[tuple[str, str]]:
    """Returns the pairs of `parts` that form each of `tokens`."""
    return [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in parts and token[cut:] in parts
    ]
