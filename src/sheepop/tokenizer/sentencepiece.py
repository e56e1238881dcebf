"""Converts SentencePiece models (Kudo and Richardson 2018) to the `tokenizers` library, with the same ids."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.charsmap import CHARSMAP_MATCHING, LONGEST, Charsmap
from sheepop.tokenizer.interface import SPECIAL_TOKENS
from sheepop.tokenizer.sentencepiece_model import NormalizerSpec, Piece, PieceType, SentencePieceModel, read_model
from sheepop.tokenizer.settings import SPECIAL_FLAGS, post_processor, recorded_tokens
from sheepop.tokenizer.vocabulary import BPE_OPTIONS, JSON_HEAD

_SPACE = "\u2581"  # represents a space in pieces


def read_sentencepiece(file: Path, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Converts a model file to the content of a ``tokenizer.json``, and returns it with its settings.

    `settings` are those of the directory; the model supplies missing roles, and whether a space is put before a text.
    Tokens that `settings` add after the model's own keep their ids. Raises `TokenizerError` if the file is damaged or
    has features that cannot be converted.
    """
    model = read_model(file)
    if settings.get("add_prefix_space") is False:
        model = replace(model, normalizer=replace(model.normalizer, add_dummy_prefix=False))
    settings = {**_roles(model), **settings}
    symbols = _symbols(model)
    added = _added_tokens(model, set(symbols), settings)
    description = {
        **JSON_HEAD,
        "added_tokens": added,
        # In a Unigram model symbols are vocabulary entries, in BPE they are cut out first.
        "normalizer": _normalizer(model.normalizer, symbols if model.type == "bpe" else []),
        "pre_tokenizer": None,
        "post_processor": post_processor(settings, {token["content"]: token["id"] for token in added}),
        "decoder": _decoder(model),
        "model": _unigram(model) if model.type == "unigram" else _bpe(model),
    }
    if model.normalizer.charsmap:
        settings[CHARSMAP_MATCHING] = LONGEST
    return json.dumps(description, ensure_ascii=False), settings


def _roles(model: SentencePieceModel) -> dict[str, Any]:
    """Settings with the pieces of the special roles, if they exist."""
    roles = {role: model.role_ids.get(role, -1) for role in SPECIAL_TOKENS}
    special = (PieceType.UNKNOWN, PieceType.CONTROL)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{
            f"{role}_token": model.pieces[token_id].text
            for role, token_id in roles.items()
            if 0 <= token_id < len(model.pieces) and model.pieces[token_id].type in special
        },
    }


def _symbols(model: SentencePieceModel) -> list[str]:
    """The user-defined symbols that can occur in text; raises `TokenizerError` for one that normalization changes."""
    symbols = [piece.text for piece in model.pieces if piece.type is PieceType.USER_DEFINED]
    if model.normalizer.charsmap:
        charsmap = Charsmap(model.normalizer.charsmap)
        for symbol in symbols:
            if charsmap.rewrite(symbol) != symbol:
                raise TokenizerError(f"it keeps {symbol!r} (user_defined_symbols), which its normalization changes.")
    # SentencePiece searches for them after it has replaced spaces.
    return [symbol for symbol in symbols if " " not in symbol]


def _normalizer(spec: NormalizerSpec, symbols: Sequence[str]) -> dict[str, Any]:
    """The ``normalizer`` of a ``tokenizer.json``; `symbols` are added tokens that are searched for in its result.

    The library also normalizes each of `symbols` alone, so a text that equals one gets no space before it: the only
    text that SentencePiece treats differently.
    """
    steps: list[dict[str, Any]] = []
    if spec.charsmap:
        table = base64.b64encode(spec.charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if spec.remove_extra_whitespaces:
        steps += [_replace(r"\A +| +\z", ""), _replace(" {2,}", " ")]
    if spec.add_dummy_prefix and symbols:
        alone = "|".join(map(re.escape, symbols))
        steps.append(_replace(rf"\A(?!(?:{alone})\z)(?=[\s\S])", _SPACE))
    elif spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    if spec.remove_extra_whitespaces:
        # As in SentencePiece, a literal sign for a space at the end of the text counts as a space.
        steps.append(_replace(rf"{_SPACE}+\z", ""))
    return {"type": "Sequence", "normalizers": steps}


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    vocabulary = [(piece.text, _unigram_score(piece)) for piece in model.pieces]
    return {"type": "Unigram", "unk_id": model.unknown_id, "vocab": vocabulary, "byte_fallback": model.byte_fallback}


def _unigram_score(piece: Piece) -> float:
    """The score in SentencePiece 0.2.3: a symbol gets more than any cut into log probabilities, unreachable ones 0."""
    if piece.type is PieceType.USER_DEFINED:
        return 0.1 * (len(piece.text.encode()) - 1)
    return piece.score if piece.type is PieceType.NORMAL else 0.0


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
    """The BPE model: like SentencePiece, it merges any two pieces that form a piece, the best piece first."""
    normal = {piece.text: piece.score for piece in model.pieces if piece.type is PieceType.NORMAL}
    ids = {piece.text: token_id for token_id, piece in enumerate(model.pieces)}
    merges = [
        (-score, ids[text], cut, text[:cut], text[cut:])
        for text, score in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    return {
        **BPE_OPTIONS,
        "unk_token": model.pieces[model.unknown_id].text,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "vocab": ids,
        "merges": [(left, right) for *_, left, right in sorted(merges)],
    }


def _decoder(model: SentencePieceModel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.normalizer.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _added_tokens(model: SentencePieceModel, symbols: set[str], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries = []
    for token_id, piece in enumerate(model.pieces):
        if piece.type in (PieceType.UNKNOWN, PieceType.CONTROL):
            entries.append({"id": token_id, "content": piece.text, **SPECIAL_FLAGS})
        elif piece.text in symbols and model.type == "bpe":
            # Searched for in normalized text, as in SentencePiece.
            flags = {**SPECIAL_FLAGS, "normalized": True, "special": False}
            entries.append({"id": token_id, "content": piece.text, **flags})
    return entries + _further_tokens(len(model.pieces), settings)


def _further_tokens(first: int, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of tokens that were added to the model later, whose ids follow its own."""
    further = recorded_tokens(settings)
    beyond = sorted(token_id for token_id in further if token_id >= first)
    if beyond != list(range(first, first + len(beyond))):
        raise TokenizerError(
            f"the tokens that were added to it have the ids {', '.join(map(str, beyond[:5]))}, ..., and they must "
            f"follow its own {first:,} without gaps. The files are not of the same tokenizer."
        )
    return [{"id": token_id, **further[token_id]} for token_id in beyond]
