"""The interface of all tokenizers, the names of the special tokens, and decoding of a stream."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import TokenizerError
from sheepop.core.files import storage_errors, write_atomic, write_json

SpecialRole = Literal["pad", "unk", "bos", "eos"]

PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"

# In order of their ids: 0, 1, 2, 3 in every tokenizer that SheepOp trains.
SPECIAL_TOKENS: dict[SpecialRole, str] = {"pad": PAD, "unk": UNK, "bos": BOS, "eos": EOS}

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"

CHAT_TEMPLATE = "chat_template"


class Tokenizer(ABC):
    """Turns text into token ids in ``range(vocab_size)`` and back.

    Tokenizers are immutable and may be used from several threads. A special token (``<eos>``) represents no text: its
    bytes are empty, and text that looks like one is ordinary text unless the caller allows special tokens.

    `leading_spaces` is the number of spaces that the tokenizer itself puts before a text: decoding drops them at the
    beginning of a text, but not if the ids continue one.
    """

    algorithm: str
    leading_spaces: int = 0
    prefix_ids: tuple[int, ...] = ()
    """Ids that the tokenizer's own format puts before every text, such as ``<bos>``; `encode` leaves them out."""
    suffix_ids: tuple[int, ...] = ()
    """Ids that the tokenizer's own format puts after every text; `encode` leaves them out."""
    notes: tuple[str, ...] = ()
    """What a person should know who takes this tokenizer from another program, one sentence each."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of token ids, special tokens included."""

    @property
    @abstractmethod
    def special_tokens(self) -> dict[str, int]:
        """The text of every special token with its id."""

    @abstractmethod
    def special_id(self, role: SpecialRole) -> int | None:
        """The id of the token with `role`; None if the tokenizer has no such token."""

    @abstractmethod
    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The token ids of `text`, without prefix and suffix.

        With `allow_special`, the text of a special token becomes that token. Raises `TokenizerError` for text that the
        tokenizer cannot represent.
        """

    @abstractmethod
    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """`encode` of every text, in order, with several threads if the library can."""

    @property
    @abstractmethod
    def _pieces(self) -> Sequence[bytes]:
        """The result of `token_bytes` for every id."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token, possibly a fragment of a character; empty for a special token.

        Raises `TokenizerError` for an id outside the vocabulary.
        """
        size = len(self._pieces)
        if not 0 <= token_id < size:
            raise TokenizerError(
                f"Token id {token_id} is outside this tokenizer's vocabulary of {size} (ids 0 to {size - 1}). "
                "The ids come from another tokenizer."
            )
        return self._pieces[token_id]

    @abstractmethod
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of everything that affects the ids; two tokenizers with equal ids have equal ones."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of ``tokenizer.json``, the format of the `tokenizers` library."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The content of ``tokenizer_config.json``, which names the token of each role under the usual keys."""

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str) -> list[int]:
        """The token ids of `text`; see `encode`."""
        return self.encode(text)

    @property
    def pad_id(self) -> int:
        """The id of the padding token; like the other three, raises `TokenizerError` if there is none."""
        return self._required_id("pad")

    @property
    def unk_id(self) -> int:
        """The id of the token for text that the vocabulary cannot express."""
        return self._required_id("unk")

    @property
    def bos_id(self) -> int:
        """The id of the token that begins a document."""
        return self._required_id("bos")

    @property
    def eos_id(self) -> int:
        """The id of the token that ends a document."""
        return self._required_id("eos")

    @property
    def filler_id(self) -> int:
        """An id to fill unused positions of rows: that of padding, else of ``<eos>``, else 0."""
        found = (self.special_id("pad"), self.special_id("eos"))
        return next((token_id for token_id in found if token_id is not None), 0)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> str:
        """The text of a sequence of token ids; bytes that are not UTF-8 become U+FFFD.

        Special tokens are left out, or written as their text if `skip_special` is False. With `continues`, the ids
        follow others with text, so a leading space belongs to the text.
        """
        return self.decode_bytes(ids, skip_special=skip_special, continues=continues).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = True, continues: bool = False) -> bytes:
        """The bytes of a sequence of token ids; see `decode`."""
        shown = {} if skip_special else self._bytes_of_special
        data = b"".join(shown[i] if i in shown else self.token_bytes(i) for i in map(int, ids))
        return data if continues else without_leading_spaces(data, self.leading_spaces)

    @property
    def _bytes_of_special(self) -> Mapping[int, bytes]:
        """The bytes of each special token if special tokens are shown."""
        return {token_id: text.encode("utf-8") for text, token_id in self.special_tokens.items()}

    def byte_lengths(self) -> NDArray[np.int64]:
        """The number of UTF-8 bytes of every token, (vocab_size,); 0 for special tokens."""
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], dtype=np.int64)

    def save(
        self,
        directory: str | Path,
        *,
        model_max_length: int | None = None,
        tables: bool = True,
        only_tables: bool = False,
    ) -> None:
        """Writes ``tokenizer.json`` and ``tokenizer_config.json``, with the model's longest input, to a directory.

        With `tables`, what takes long to find again is stored in a file beside them, which only SheepOp reads. With
        `only_tables`, that file takes the place of ``tokenizer.json``, if the tokenizer has such tables.
        """
        directory = Path(directory)
        settings = self.settings()
        if model_max_length is not None:
            settings["model_max_length"] = model_max_length
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / SETTINGS_FILE, settings)
        has_tables = (tables or only_tables) and self._save_tables(directory, alone=only_tables)
        if not (only_tables and has_tables):
            write_atomic(directory / TOKENIZER_FILE, self.to_json())

    def _save_tables(self, directory: Path, *, alone: bool) -> bool:
        """Writes the tables of `Tokenizer.save`; returns whether there are any."""
        return False

    def _required_id(self, role: SpecialRole) -> int:
        token_id = self.special_id(role)
        if token_id is None:
            raise TokenizerError(
                f"This tokenizer has no {role}_token. Name one of its special tokens as {role}_token in "
                f"{SETTINGS_FILE}, or train a tokenizer with SheepOp, which always has one."
            )
        return token_id


def without_leading_spaces(data: bytes, count: int) -> bytes:
    """`data` without up to `count` leading spaces."""
    return data[min(count, len(data) - len(data.lstrip(b" "))) :]


class StreamDecoder:
    """Decodes one token at a time; the results of `push` and `finish` joined equal ``tokenizer.decode`` of all ids.

    A character whose bytes span several tokens appears with the token that completes it. Special tokens among
    `shown_ids` are never left out. With `continues`, the tokens follow others with text (see `Tokenizer.decode`).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown_ids: Collection[int] = (),
        continues: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special, self._shown_ids = skip_special, shown_ids
        self._first_spaces = 0 if continues else tokenizer.leading_spaces
        self._spaces = self._first_spaces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty if a character is still incomplete."""
        if self._skip_special and token_id not in self._shown_ids:
            data = self._tokenizer.token_bytes(token_id)
        else:
            data = self._tokenizer.decode_bytes((token_id,), skip_special=False, continues=True)
        if self._spaces and data:
            kept = without_leading_spaces(data, self._spaces)
            # Once other text has begun, no more leading spaces are dropped.
            self._spaces = 0 if kept else self._spaces - len(data)
            data = kept
        return self._decoder.decode(data)

    def finish(self) -> str:
        """The rest: U+FFFD for bytes of an incomplete character. Resets the decoder."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._spaces = self._first_spaces
        return rest
