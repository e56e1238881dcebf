"""SentencePiece models (Kudo and Richardson 2018) as tokenizers of the `tokenizers` library with the same ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.added_tokens import recorded_tokens
from sheepop.tokenizer.around import post_processor
from sheepop.tokenizer.charsmap import CHARSMAP_MATCHING, LONGEST, Charsmap
from sheepop.tokenizer.interface import SPECIAL_TOKENS
from sheepop.tokenizer.sentencepiece_model import PieceType, SentencePieceModel, read_model
from sheepop.tokenizer.sentencepiece_normalizer import SPACE, normalizer_of
from sheepop.tokenizer.settings import SPECIAL_FLAGS

_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False}


def read_sentencepiece(file: Path, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A model file as the content of a ``tokenizer.json``, and its settings.

    `settings` are those of the directory; where they are silent, the model says which token plays which role, and
    whether a space is put in front of a text. Tokens that they add behind the model's own keep their ids. Raises
    `TokenizerError` when the file is damaged or uses what cannot be expressed.
    """
    model = read_model(file)
    if settings.get("add_prefix_space") is False:
        model = replace(model, normalizer=replace(model.normalizer, add_dummy_prefix=False))
    settings = {**_roles(model), **settings}
    symbols = _symbols(model)
    added = _added_tokens(model, set(symbols), settings)
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        # In a Unigram model such symbols are entries of the vocabulary, in BPE they are cut out first.
        "normalizer": normalizer_of(model.normalizer, symbols if model.type == "bpe" else []),
        "pre_tokenizer": None,
        "post_processor": post_processor(settings, {token["content"]: token["id"] for token in added}),
        "decoder": _decoder(model),
        "model": _unigram(model) if model.type == "unigram" else _bpe(model),
    }
    if model.normalizer.charsmap:
        settings[CHARSMAP_MATCHING] = LONGEST
    return json.dumps(description, ensure_ascii=False), settings


def _roles(model: SentencePieceModel) -> dict[str, Any]:
    """Which pieces play the roles, as far as they are there."""
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
    """The user-defined symbols that can be found in text; raises `TokenizerError` for one that normalising changes."""
    symbols = [piece.text for piece in model.pieces if piece.type is PieceType.USER_DEFINED]
    if model.normalizer.charsmap:
        charsmap = Charsmap(model.normalizer.charsmap)
        for symbol in symbols:
            if charsmap.rewrite(symbol) != symbol:
                raise TokenizerError(f"it keeps {symbol!r} (user_defined_symbols), which its normalization changes.")
    # SentencePiece looks for them where spaces have been replaced already.
    return [symbol for symbol in symbols if " " not in symbol]


def _unigram(model: SentencePieceModel) -> dict[str, Any]:
    """A user-defined symbol has the score by which SentencePiece prefers it; those that text never gives have none."""
    vocabulary = [
        (piece.text, _symbol_score(piece.text))
        if piece.type is PieceType.USER_DEFINED
        else (piece.text, piece.score if piece.type is PieceType.NORMAL else 0.0)
        for piece in model.pieces
    ]
    return {
        "type": "Unigram",
        "unk_id": model.unknown_id,
        "vocab": vocabulary,
        "byte_fallback": model.byte_fallback,
    }


def _symbol_score(text: str) -> float:
    """That of SentencePiece 0.2.3, in which the other pieces have logarithms of probabilities: no parts do better."""
    return 0.1 * (len(text.encode()) - 1)


def _bpe(model: SentencePieceModel) -> dict[str, Any]:
    """BPE that merges whatever makes a piece, the best piece first, as SentencePiece does."""
    normal = {piece.text: piece.score for piece in model.pieces if piece.type is PieceType.NORMAL}
    ids = {piece.text: token_id for token_id, piece in enumerate(model.pieces)}
    merges = [
        (-score, ids[text], cut, text[:cut], text[cut:])
        for text, score in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    ]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": model.pieces[model.unknown_id].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": ids,
        "merges": [(left, right) for *_, left, right in sorted(merges)],
    }


def _decoder(model: SentencePieceModel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
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
            # Found in text that is normalised already, where SentencePiece looks for them.
            entries.append({"id": token_id, "content": piece.text, **_FLAGS, "normalized": True, "special": False})
    return entries + _further_tokens(len(model.pieces), settings)


def _further_tokens(first: int, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entries for the tokens that were added to the model afterwards, whose ids follow its own."""
    further = recorded_tokens(settings)
    beyond = sorted(token_id for token_id in further if token_id >= first)
    if beyond != list(range(first, first + len(beyond))):
        raise TokenizerError(
            f"the tokens that were added to it have the ids {', '.join(map(str, beyond[:5]))}, ..., and they must "
            f"follow its own {first:,} without gaps. The files are not of the same tokenizer."
        )
    return [{"id": token_id, **further[token_id]} for token_id in beyond]
