"""One token per character: ASCII ids are code points, other characters follow from 128."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.interface import SETTINGS_FILE, SPECIAL_TOKENS, TOKENIZER_FILE, UNK, SpecialRole, Tokenizer
from sheepop.tokenizer.settings import check_special_ids, role_text, special_token_entries, standard_settings
from sheepop.tokenizer.vocabulary import JSON_HEAD

_ASCII_SIZE = 128
_SPECIAL_IDS = {text: i for i, text in enumerate(SPECIAL_TOKENS.values())}
_ROLE_IDS = {role: i for i, role in enumerate(SPECIAL_TOKENS)}
_SPECIAL_PATTERN = re.compile("(" + "|".join(map(re.escape, _SPECIAL_IDS)) + ")")
_EVERY_CHARACTER = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}


class CharTokenizer(Tokenizer):
    """A character tokenizer: the id of an ASCII character is its code point; `extra_characters` follow, in order.

    The special tokens take the ids of the control characters 0 to 3. These four, unknown characters, and lone
    surrogates are encoded as ``<unk>``. Raises `TokenizerError` if an extra character is not one encodable character.
    """

    algorithm = "char"

    def __init__(self, extra_characters: Iterable[str] = ()) -> None:
        characters = set(extra_characters)
        for character in characters:
            if len(character) != 1 or _is_surrogate(character) or ord(character) < len(_SPECIAL_IDS):
                raise TokenizerError(
                    f"{character!r} cannot be in a character vocabulary: it must be a single character, not a lone "
                    "surrogate, and not one of the control characters 0 to 3, whose ids the special tokens take."
                )
        self.extra_characters = "".join(sorted(c for c in characters if ord(c) >= _ASCII_SIZE))
        self._settings = standard_settings()

    @classmethod
    def train(cls, texts: Iterable[str]) -> CharTokenizer:
        """Makes a tokenizer whose vocabulary is ASCII and every other character of `texts`."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return cls(c for c in characters if ord(c) >= _ASCII_SIZE and not _is_surrogate(c))

    @classmethod
    def from_json(cls, content: str, settings: Mapping[str, Any] | None = None) -> CharTokenizer:
        """Reads the content that `to_json` wrote; raises `TokenizerError` for anything else."""
        try:
            vocabulary = json.loads(content)["model"]["vocab"]
            extras = [token for token, token_id in vocabulary.items() if token_id >= _ASCII_SIZE]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise TokenizerError(f"{TOKENIZER_FILE} is damaged: it has no table of characters.") from None
        tokenizer = cls(extras)
        expected = tokenizer._vocabulary()
        if vocabulary != expected:
            wrong = next(t for t in [*expected, *vocabulary] if vocabulary.get(t) != expected.get(t))
            raise TokenizerError(
                f"The ids of {TOKENIZER_FILE} are out of place: {wrong!r} has the id {vocabulary.get(wrong)}, but a "
                f"character tokenizer gives it {expected.get(wrong)}."
            )
        settings = dict(settings or {})
        check_special_ids(settings, _SPECIAL_IDS)
        for role, text in SPECIAL_TOKENS.items():
            if role_text(settings, role) not in (None, text):
                raise TokenizerError(
                    f"{SETTINGS_FILE} names {role_text(settings, role)!r} as {role}_token, but in a character "
                    f"tokenizer it is always {text!r}."
                )
        tokenizer._settings |= settings
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """128 plus the number of extra characters."""
        return _ASCII_SIZE + len(self.extra_characters)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The four special tokens at 0 to 3."""
        return dict(_SPECIAL_IDS)

    def special_id(self, role: SpecialRole) -> int:
        """0 for ``pad``, 1 for ``unk``, 2 for ``bos``, 3 for ``eos``."""
        return _ROLE_IDS[role]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """One id per character, and with `allow_special`, per special token."""
        if not allow_special:
            return self._encode_characters(text)
        ids: list[int] = []
        for part in _SPECIAL_PATTERN.split(text):
            ids += [_SPECIAL_IDS[part]] if part in _SPECIAL_IDS else self._encode_characters(part)
        return ids

    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """`encode` of every text, in order."""
        return [self.encode(text, allow_special=allow_special) for text in texts]

    @cached_property
    def _pieces(self) -> list[bytes]:
        return [b"" if text in _SPECIAL_IDS else text.encode("utf-8") for text in self._vocabulary()]

    def fingerprint(self) -> str:
        """SHA-256 of the name of the algorithm and the extra characters."""
        return hashlib.sha256(f"sheepop character vocabulary\n{self.extra_characters}".encode()).hexdigest()

    def to_json(self) -> str:
        """A word-level model whose words are single characters, for which `tokenizers` gives the same ids."""
        description = {
            **JSON_HEAD,
            "added_tokens": special_token_entries(),
            "normalizer": None,
            "pre_tokenizer": _EVERY_CHARACTER,
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": self._vocabulary(), "unk_token": UNK},
        }
        return json.dumps(description, ensure_ascii=False, separators=(",", ":"))

    def settings(self) -> dict[str, Any]:
        """The keys of ``tokenizer_config.json``, as read or standard."""
        return dict(self._settings)

    def _encode_characters(self, text: str) -> list[int]:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        table = self._ids_by_code_point
        # The last entry of the table is <unk>, and code points beyond the table map to it.
        ids: list[int] = table[np.minimum(points, len(table) - 1)].tolist()
        return ids

    @cached_property
    def _ids_by_code_point(self) -> NDArray[np.int32]:
        largest = max(map(ord, self.extra_characters), default=_ASCII_SIZE - 1)
        table = np.full(largest + 2, _SPECIAL_IDS[UNK], dtype=np.int32)
        table[len(_SPECIAL_IDS) : _ASCII_SIZE] = np.arange(len(_SPECIAL_IDS), _ASCII_SIZE)
        extras = [ord(c) for c in self.extra_characters]
        table[extras] = np.arange(_ASCII_SIZE, _ASCII_SIZE + len(extras))
        return table

    def _vocabulary(self) -> dict[str, int]:
        characters = [chr(i) for i in range(len(_SPECIAL_IDS), _ASCII_SIZE)] + list(self.extra_characters)
        return _SPECIAL_IDS | {c: i for i, c in enumerate(characters, start=len(_SPECIAL_IDS))}


def is_character_tokenizer(description: Mapping[str, Any]) -> bool:
    """Whether the content of a ``tokenizer.json``, apart from its vocabulary, is from `CharTokenizer.to_json`."""
    return (
        description.get("pre_tokenizer") == _EVERY_CHARACTER
        and description.get("normalizer") is None
        and description.get("added_tokens") == special_token_entries()
    )


def _is_surrogate(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"
