"""The bytes and characters of which vocabularies are made, and checks of vocabularies."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.interface import TOKENIZER_FILE
from sheepop.tokenizer.settings import SPECIAL_FLAGS, are_tokens

if TYPE_CHECKING:
    import tokenizers


# In a byte-level vocabulary (Radford et al. 2019) characters represent bytes: printable bytes are represented by
# themselves, others by U+0100 and following.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
BYTE_ALPHABET = {chr(b): b for b in _PRINTABLE} | {chr(0x100 + i): b for i, b in _OTHERS}
_CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_ALPHABET.items()}

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""The tokens for single bytes in vocabularies of characters, used for characters that they lack."""


def bytes_as_characters(data: bytes) -> str:
    """The characters that represent `data` in a byte-level vocabulary."""
    return data.decode("latin-1").translate(_CHARACTER_OF_BYTE)


def characters_as_bytes(text: str) -> bytes:
    """The bytes of a byte-level entry; one with other characters stands for its own text, as in `tokenizers`."""
    try:
        return bytes(BYTE_ALPHABET[character] for character in text)
    except KeyError:
        return text.encode("utf-8")


ALGORITHMS = {"BPE": "bpe", "WordPiece": "wordpiece", "Unigram": "unigram", "WordLevel": "word"}
"""The names of the library's models in SheepOp."""

JSON_HEAD = {"version": "1.0", "truncation": None, "padding": None}
"""The beginning of a ``tokenizer.json``."""

BPE_OPTIONS = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
"""The ``model`` of a ``tokenizer.json`` with BPE, without vocabulary and merges, and all options off."""

PRINTABLE_ASCII = tuple(map(chr, range(0x21, 0x7F)))

# The share of a text that its frequent characters make up, as is usual with SentencePiece.
_COVERAGE = 0.9995


def frequent_characters(texts: Iterable[str]) -> list[str]:
    """The most frequent characters that make up 99.95 percent of `texts`, in code-point order."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    needed = _COVERAGE * counts.total()
    chosen, covered = [], 0
    for character in sorted(counts, key=lambda character: (-counts[character], character)):
        if covered >= needed:
            break
        chosen.append(character)
        covered += counts[character]
    return sorted(chosen)


def texts_by_id(library: tokenizers.Tokenizer, content: bytes) -> list[str]:
    """The vocabulary in the order of ids; raises `TokenizerError` unless these are 0, 1, 2, ... without gaps."""
    # If the id of an added token is impossible, the library changes it and only logs that.
    for token in json.loads(content).get("added_tokens") or []:
        actual = library.token_to_id(token["content"])
        if actual != token["id"]:
            raise TokenizerError(
                f"The ids of {TOKENIZER_FILE} are out of place: the added token {token['content']!r} claims the id "
                f"{token['id']}, and the rest of the vocabulary leaves it {actual}. The file is damaged."
            )
    vocabulary = library.get_vocab(with_added_tokens=True)
    by_id = {token_id: text for text, token_id in vocabulary.items()}
    if len(by_id) != len(vocabulary) or any(i not in by_id for i in range(len(by_id))):
        raise TokenizerError(
            f"The ids of {TOKENIZER_FILE} are out of place: {len(vocabulary)} tokens must have the ids 0 to "
            f"{len(vocabulary) - 1}, each once. The file is damaged."
        )
    return [by_id[i] for i in range(len(by_id))]


_MOST_HOLES = 4096


def without_holes(description: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A ``tokenizer.json`` in which every id up to the last has a token, and a note if some had none.

    Ids without a token become reserved special tokens. The library would give added tokens after such a hole other ids
    than the file states, unless they are entries of the model too; so they are made entries of the model. Raises
    `TokenizerError` for more than 4096 holes. Files with other faults are returned as they are.
    """
    vocabulary, added = description["model"].get("vocab"), description.get("added_tokens") or []
    if not isinstance(vocabulary, dict) or not set(map(type, vocabulary.values())) <= {int}:
        return description, ()
    if not are_tokens(added):
        return description, ()
    further = {token["content"]: token["id"] for token in added if token["content"] not in vocabulary}
    ids = {*vocabulary.values(), *further.values()}
    if not ids or min(ids) < 0 or len(ids) < len(vocabulary) + len(further):
        return description, ()
    if max(vocabulary.values(), default=-1) < len(vocabulary) and list(further.values()) == list(
        range(len(vocabulary), len(ids))
    ):
        return description, ()
    if max(ids) >= len(ids) + _MOST_HOLES:
        raise TokenizerError(
            f"The ids of {TOKENIZER_FILE} are out of place: it has {len(ids):,} tokens, and one has the id "
            f"{max(ids):,}. The file is damaged."
        )
    holes = [token_id for token_id in range(max(ids)) if token_id not in ids]
    reserved = {f"<|reserved_{token_id}|>": token_id for token_id in holes}
    if taken := reserved.keys() & {*vocabulary, *further}:
        raise TokenizerError(
            f"{TOKENIZER_FILE} has no token with the id {reserved[min(taken)]}, but {min(taken)!r} has another id."
        )
    entries = [{"id": token_id, "content": text, **SPECIAL_FLAGS} for text, token_id in reserved.items()]
    whole = {
        **description,
        "added_tokens": sorted((*added, *entries), key=lambda token: token["id"]),
        "model": {**description["model"], "vocab": {**vocabulary, **further, **reserved}},
    }
    if not holes:
        return whole, ()
    return whole, (f"{len(holes):,} ids have no token, {holes[0]} first; they are reserved special tokens now.",)


class LittleTextError(TokenizerError):
    """A text that allows only a vocabulary of `possible` tokens, fewer than were requested."""

    def __init__(self, possible: int, vocab_size: int) -> None:
        super().__init__(
            f"The vocabulary is larger than the corpus allows: tokenizer.vocab_size is {vocab_size}, and this "
            f"text gives {possible} tokens at most. Set tokenizer.vocab_size={possible} or less, or add text."
        )
        self.possible = possible


def require_size(possible: int, vocab_size: int) -> None:
    """Raises `LittleTextError` if training gave fewer tokens (`possible`) than the requested `vocab_size`."""
    if possible < vocab_size:
        raise LittleTextError(possible, vocab_size)


def check_model(model: Mapping[str, Any]) -> None:
    """Raises `TokenizerError` for a model that drops or cannot encode some characters, or encodes at random."""
    _CHECKS[model["type"]](model)


def check_options(model: Mapping[str, Any], *names: str) -> None:
    """Raises `TokenizerError` if one of the options `names` of a BPE model is set."""
    if unsupported := [name for name in names if model[name]]:
        raise TokenizerError(
            f"{TOKENIZER_FILE} sets {', '.join(unsupported)} of its BPE model, which SheepOp does not support. "
            "Use a tokenizer without it."
        )


def _check_unknown(model: Mapping[str, Any]) -> None:
    unknown = model["unk_token"]
    if unknown not in model["vocab"]:
        raise TokenizerError(
            f"{TOKENIZER_FILE} names {unknown!r} as its unknown token, but does not have that token. The file is "
            "damaged."
        )


def _check_unigram(model: Mapping[str, Any]) -> None:
    if model["unk_id"] is None:
        raise TokenizerError(
            f"{TOKENIZER_FILE} has a Unigram model without a token for unknown characters (unk_id), so it cannot "
            "encode some texts. Use a tokenizer that has one."
        )
    for text, score in model["vocab"]:
        if not math.isfinite(score):
            raise TokenizerError(f"{TOKENIZER_FILE} gives {text!r} the score {score}. The file is damaged.")


_CHECKS = {"WordPiece": _check_unknown, "WordLevel": _check_unknown, "Unigram": _check_unigram}
