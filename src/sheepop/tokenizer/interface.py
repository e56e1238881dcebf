"""The one interface of every tokenizer: text to token ids and back, and the names of the special tokens."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import TokenizerError
from sheepop.core.files import storage_errors, write_atomic, write_json

SpecialRole = Literal["pad", "unk", "bos", "eos"]

PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"

# The order gives the ids: 0, 1, 2, 3 in every tokenizer that SheepOp trains.
SPECIAL_TOKENS: dict[SpecialRole, str] = {"pad": PAD, "unk": UNK, "bos": BOS, "eos": EOS}

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"

WHAT_IS_READ = "SheepOp reads byte-level BPE (GPT-2 and its descendants) and its own character tokenizers."

_SPECIAL_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


class Tokenizer(ABC):
    """Turns text into token ids in ``range(vocab_size)`` and back.

    Tokenizers are immutable and may be used from several threads. A special token (``<eos>``) stands for no text:
    its bytes are empty, and text that merely looks like one is ordinary text unless the caller allows it.
    """

    algorithm: str

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""

    @property
    @abstractmethod
    def special_tokens(self) -> dict[str, int]:
        """Text of every special token with its id."""

    @abstractmethod
    def special_id(self, role: SpecialRole) -> int | None:
        """The id of the token that plays `role`; None in a foreign tokenizer that has no such token."""

    @abstractmethod
    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`; nothing is added around it.

        With `allow_special` the text of a special token becomes that token. Raises `TokenizerError` for text
        that the tokenizer cannot represent.
        """

    @abstractmethod
    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """`encode` of every text, in order, on several threads where the library can."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for, possibly a fragment of a character; empty for a special token.

        Raises `TokenizerError` for an id outside the vocabulary.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of everything that decides ids; equal for two tokenizers that give equal ids."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of ``tokenizer.json``, the format of the `tokenizers` library."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The content of ``tokenizer_config.json``: which token plays which role, with the usual keys."""

    @property
    def pad_id(self) -> int:
        """Id of the padding token. Like the other three it raises `TokenizerError` where there is none."""
        return self._required_id("pad")

    @property
    def unk_id(self) -> int:
        """Id of the token for what the vocabulary cannot express."""
        return self._required_id("unk")

    @property
    def bos_id(self) -> int:
        """Id of the token that begins a document."""
        return self._required_id("bos")

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a document."""
        return self._required_id("eos")

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of a sequence of token ids; bytes that are not UTF-8 become U+FFFD.

        Special tokens are left out, or written as their text when `skip_special` is False.
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        """The bytes that a sequence of token ids stands for, joined; see `decode`."""
        texts = {} if skip_special else {i: text.encode("utf-8") for text, i in self.special_tokens.items()}
        return b"".join(texts[i] if i in texts else self.token_bytes(i) for i in map(int, ids))

    def byte_lengths(self) -> NDArray[np.int64]:
        """Number of UTF-8 bytes of every token, shape (vocab_size,); 0 for special tokens."""
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], dtype=np.int64)

    def save(self, directory: str | Path, *, model_max_length: int | None = None) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json`` into `directory`, which is made if missing.

        `model_max_length`, the longest input of the model that goes with it, is recorded for other programs.
        """
        directory = Path(directory)
        settings = self.settings()
        if model_max_length is not None:
            settings["model_max_length"] = model_max_length
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / TOKENIZER_FILE, self.to_json())
        write_json(directory / SETTINGS_FILE, settings)

    def _required_id(self, role: SpecialRole) -> int:
        token_id = self.special_id(role)
        if token_id is None:
            raise TokenizerError(
                f"This tokenizer has no {role}_token. Name one of its special tokens as {role}_token in "
                f"{SETTINGS_FILE}, or train a tokenizer with SheepOp, which always has one."
            )
        return token_id


def standard_settings(further: Mapping[str, int] | None = None) -> dict[str, Any]:
    """``tokenizer_config.json`` of a tokenizer that SheepOp trained, readable by transformers' `AutoTokenizer`.

    `further` are the special tokens beyond the four, with their ids.
    """
    ids = {text: i for i, text in enumerate(SPECIAL_TOKENS.values())} | dict(further or {})
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": text for role, text in SPECIAL_TOKENS.items()},
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(token_id): {"content": text, **_SPECIAL_FLAGS} for text, token_id in ids.items()},
    }


def special_token_entries() -> list[dict[str, Any]]:
    """The ``added_tokens`` of ``tokenizer.json`` for the four special tokens."""
    return [{"id": i, "content": text, **_SPECIAL_FLAGS} for i, text in enumerate(SPECIAL_TOKENS.values())]


def check_special_ids(settings: dict[str, Any], ids: dict[str, int]) -> None:
    """Raises `TokenizerError` unless the roles and ids that `settings` names are those in `ids` (text -> id)."""
    for role in SPECIAL_TOKENS:
        text = role_text(settings, role)
        if text is not None and text not in ids:
            raise TokenizerError(
                f"{SETTINGS_FILE} names {text!r} as {role}_token, but {TOKENIZER_FILE} has no special token of "
                "that text. Use the two files of the same tokenizer."
            )
    recorded = settings.get("added_tokens_decoder", {})
    if not isinstance(recorded, dict):
        raise TokenizerError(f"{SETTINGS_FILE}: added_tokens_decoder must be a table from id to token.")
    for token_id, token in recorded.items():
        text = token.get("content") if isinstance(token, dict) else token
        actual = ids.get(text) if isinstance(text, str) else None
        if actual is not None and str(actual) != token_id:
            raise TokenizerError(
                f"{SETTINGS_FILE} says that {text!r} has the id {token_id}, but {TOKENIZER_FILE} gives it "
                f"{actual}. Use the two files of the same tokenizer."
            )


def role_text(settings: dict[str, Any], role: SpecialRole) -> str | None:
    """Text of the token that `settings` names for `role`, which stands there as a string or as a token object."""
    value = settings.get(f"{role}_token")
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{SETTINGS_FILE}: {role}_token = {json.dumps(value)} is not a token's text.")
    return value


def outside_vocabulary(token_id: int, vocab_size: int) -> TokenizerError:
    """The error for an id that is not in the vocabulary."""
    return TokenizerError(
        f"Token id {token_id} is outside this tokenizer's vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}). "
        "The ids come from another tokenizer."
    )


def first_surrogate(texts: Sequence[str]) -> tuple[int, int] | None:
    """Index of the first text that holds a lone surrogate, and its position there; None when all are Unicode text."""
    for index, text in enumerate(texts):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return index, error.start
    return None
