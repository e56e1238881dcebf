"""What every tokenizer that stands on the `tokenizers` library has in common, whatever its algorithm."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.interface import (
    SPECIAL_TOKENS,
    TOKENIZER_FILE,
    SpecialRole,
    Tokenizer,
    check_special_ids,
    first_surrogate,
    outside_vocabulary,
    role_text,
)

if TYPE_CHECKING:
    import tokenizers

# The library needs about 170 bytes of memory per character while it encodes, so a batch is handed over in groups.
_GROUP_CHARACTERS = 2**21

# Without tokenizer_config.json the roles follow from these names; GPT-2 has one special token for both ends.
_CONVENTIONAL_NAMES: dict[SpecialRole, tuple[str, ...]] = {
    role: (text, "<|endoftext|>") if role in ("bos", "eos") else (text,) for role, text in SPECIAL_TOKENS.items()
}


class BackendTokenizer(Tokenizer):
    """A tokenizer described by `content`, the text of a ``tokenizer.json``, and `settings`, its neighbour's keys.

    Truncation, padding and tokens added around a text, which such a file may ask for, are not applied: `encode`
    gives the ids of the text and nothing else. Raises `TokenizerError` when the two do not make a usable tokenizer.
    """

    def __init__(self, content: str, settings: Mapping[str, Any] | None = None) -> None:
        self._content = content
        self._ordinary = _parse(content)
        # Two instances rather than one that is switched: the switch would be seen by other threads.
        self._ordinary.encode_special_tokens = True
        self._description: dict[str, Any] = json.loads(self._ordinary.to_str())
        self._texts = _texts_by_id(self._ordinary, content)
        added = self._description["added_tokens"]
        self._added = {token["id"]: token["content"] for token in added}
        self._special = {token["content"]: token["id"] for token in added if token["special"]}
        self._settings = _with_roles(settings or {}, self._special)
        check_special_ids(self._settings, self._special)
        self._check()

    @abstractmethod
    def _check(self) -> None:
        """Raises `TokenizerError` when `_description` is of a kind that this class does not read."""

    @abstractmethod
    def _piece(self, text: str) -> bytes:
        """The bytes that the vocabulary entry `text` stands for."""

    def _cut(self, text: str) -> Iterator[str]:
        """Parts of `text` that give the same ids one by one as together; this class knows no such places."""
        yield text

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special and other added tokens included."""
        return len(self._texts)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text of every special token with its id."""
        return dict(self._special)

    def special_id(self, role: SpecialRole) -> int | None:
        """The id of the token that ``tokenizer_config.json`` names for `role`, None when it names none."""
        text = role_text(self._settings, role)
        return None if text is None else self._special[text]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`; raises `TokenizerError` for a lone surrogate, which no UTF-8 text can hold."""
        return self.encode_batch((text,), allow_special=allow_special)[0]

    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """`encode` of every text, in order, on the library's threads; Python's lock is released meanwhile."""
        backend = self._with_special if allow_special else self._ordinary
        texts = list(texts)
        results: list[list[int]] = [[] for _ in texts]
        for group in self._groups(texts):
            owners, parts = zip(*group, strict=True)
            if len(parts) == 1:
                results[owners[0]] += _checked_encode(backend.encode, parts[0], texts).ids
                continue
            encodings = _checked_encode(backend.encode_batch_fast, parts, texts)
            for owner, encoding in zip(owners, encodings, strict=True):
                results[owner] += encoding.ids
        return results

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for; empty for a special token."""
        if not 0 <= token_id < len(self._pieces):
            raise outside_vocabulary(token_id, len(self._pieces))
        return self._pieces[token_id]

    def fingerprint(self) -> str:
        """SHA-256 of the model, its pre-tokenization and its special tokens in one canonical form."""
        return self._fingerprint

    def to_json(self) -> str:
        """The text this tokenizer was made from, unchanged."""
        return self._content

    def settings(self) -> dict[str, Any]:
        """The keys of ``tokenizer_config.json`` as they were read, with the roles of the special tokens."""
        return dict(self._settings)

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own pickling forgets `encode_special_tokens`.
        return type(self), (self._content, self._settings)

    @cached_property
    def _with_special(self) -> tokenizers.Tokenizer:
        return _parse(self._content)

    @cached_property
    def _pieces(self) -> list[bytes]:
        special = set(self._special.values())
        added = self._added
        return [
            b"" if i in special else added[i].encode("utf-8") if i in added else self._piece(text)
            for i, text in enumerate(self._texts)
        ]

    @cached_property
    def _fingerprint(self) -> str:
        # Options that are off are left out, so that one a later version of the library adds changes nothing.
        content = {
            "model": _without_defaults(self._description["model"]),
            "normalizer": self._description["normalizer"],
            "pre_tokenizer": self._description["pre_tokenizer"],
            "added_tokens": [_without_defaults(token) for token in self._description["added_tokens"]],
            "roles": {role: self.special_id(role) for role in SPECIAL_TOKENS},
        }
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def _groups(self, texts: list[str]) -> Iterator[list[tuple[int, str]]]:
        group: list[tuple[int, str]] = []
        characters = 0
        for owner, text in enumerate(texts):
            for part in self._cut(text):
                group.append((owner, part))
                characters += len(part)
                if characters >= _GROUP_CHARACTERS:
                    yield group
                    group, characters = [], 0
        if group:
            yield group


def surrogate_error(texts: Iterable[str]) -> TokenizerError | None:
    """The error for the first lone surrogate in `texts`; None when there is none."""
    texts = list(texts)
    found = first_surrogate(texts)
    if found is None:
        return None
    index, position = found
    return TokenizerError(
        f"Text {index + 1} of {len(texts)} holds the lone surrogate {texts[index][position]!r} at character "
        f"{position}, which is not Unicode text. Decode the input with errors='replace', or remove it."
    )


def _checked_encode(encode: Any, argument: Any, texts: list[str]) -> Any:
    try:
        return encode(argument, add_special_tokens=False)
    except (TypeError, UnicodeEncodeError) as error:
        # The library reports a lone surrogate as a wrong type; anything else is the caller's mistake.
        if all(isinstance(text, str) for text in texts) and (problem := surrogate_error(texts)):
            raise problem from None
        raise TypeError(f"a tokenizer encodes str: {error}") from None


def _parse(content: str) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic of the library is not an Exception.
        raise TokenizerError(
            f"{TOKENIZER_FILE} is damaged or of an unknown format: the tokenizers library cannot read it ({error})."
        ) from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _texts_by_id(backend: tokenizers.Tokenizer, content: str) -> list[str]:
    """The vocabulary in the order of its ids, which must be 0, 1, 2, ... without gaps."""
    # The library gives an added token another id than the file says, with no more than a log line.
    for token in json.loads(content).get("added_tokens") or []:
        actual = backend.token_to_id(token["content"])
        if actual != token["id"]:
            raise TokenizerError(
                f"The ids of {TOKENIZER_FILE} are out of place: the added token {token['content']!r} claims the id "
                f"{token['id']}, and the rest of the vocabulary leaves it {actual}. The file is damaged."
            )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    by_id = {token_id: text for text, token_id in vocabulary.items()}
    if len(by_id) != len(vocabulary) or any(i not in by_id for i in range(len(by_id))):
        raise TokenizerError(
            f"The ids of {TOKENIZER_FILE} are out of place: {len(vocabulary)} tokens must have the ids 0 to "
            f"{len(vocabulary) - 1}, each once. The file is damaged."
        )
    return [by_id[i] for i in range(len(by_id))]


def _with_roles(settings: Mapping[str, Any], special: Mapping[str, int]) -> dict[str, Any]:
    """`settings`, with the roles that conventional names play where it says nothing about any role."""
    if any(f"{role}_token" in settings for role in SPECIAL_TOKENS):
        return dict(settings)
    found = {
        f"{role}_token": next((name for name in names if name in special), None)
        for role, names in _CONVENTIONAL_NAMES.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **settings,
        **{key: name for key, name in found.items() if name is not None},
    }


def _without_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None and value is not False and value != ""}
