"""The one interface of every tokenizer: text to token ids and back, and the names of the special tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
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

CHAT_TEMPLATE = "chat_template"


class Tokenizer(ABC):
    """Turns text into token ids in ``range(vocab_size)`` and back.

    Tokenizers are immutable and may be used from several threads. A special token (``<eos>``) stands for no text:
    its bytes are empty, and text that merely looks like one is ordinary text unless the caller allows it.

    `leading_spaces` is how many spaces in front of a text are the tokenizer's own and not the text's: decoding drops
    them where a text begins, not where ids continue one.
    """

    algorithm: str
    leading_spaces: int = 0

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

    def __len__(self) -> int:
        """`vocab_size`."""
        return self.vocab_size

    def __call__(self, text: str) -> list[int]:
        """The token ids of `text`; see `encode`."""
        return self.encode(text)

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids that the tokenizer's makers put before every text, such as a ``<bos>``; `encode` leaves them out."""
        return ()

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """Ids that the tokenizer's makers put behind every text; `encode` leaves them out."""
        return ()

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

    @property
    def filler_id(self) -> int:
        """An id to fill up rows with where nothing reads it: that of padding, or of ``<eos>``, or else 0."""
        found = (self.special_id("pad"), self.special_id("eos"))
        return next((token_id for token_id in found if token_id is not None), 0)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """Text of a sequence of token ids; bytes that are not UTF-8 become U+FFFD.

        Special tokens are left out, or written as their text when `skip_special` is False. With `continues` the ids
        stand behind others that hold text, so that a space in front belongs to the text.
        """
        data = self.decode_bytes(ids, skip_special=skip_special, continues=continues)
        return data.decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> bytes:
        """The bytes that a sequence of token ids stands for, joined; see `decode`."""
        shown = {} if skip_special else self._bytes_of_special
        data = b"".join(shown[i] if i in shown else self.token_bytes(i) for i in map(int, ids))
        return data if continues else without_leading_spaces(data, self.leading_spaces)

    @property
    def _bytes_of_special(self) -> Mapping[int, bytes]:
        """What special tokens are written as where they are shown."""
        return {token_id: text.encode("utf-8") for text, token_id in self.special_tokens.items()}

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


def without_leading_spaces(data: bytes, count: int) -> bytes:
    """`data` without its first spaces, at most `count` of them."""
    kept = data.lstrip(b" ")
    return data[min(count, len(data) - len(kept)) :]


def outside_vocabulary(token_id: int, vocab_size: int) -> TokenizerError:
    """The error for an id that is not in the vocabulary."""
    return TokenizerError(
        f"Token id {token_id} is outside this tokenizer's vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}). "
        "The ids come from another tokenizer."
    )
