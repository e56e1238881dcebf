"""Tokenizers that use the `tokenizers` library, with any of its algorithms."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.charsmap import CHARSMAP_MATCHING, charsmap_of
from sheepop.tokenizer.decoding import Decoding, read_decoding
from sheepop.tokenizer.encoder import Encoder, Rewrite, found_in_text, ids_around, parse
from sheepop.tokenizer.interface import SPECIAL_TOKENS, TOKENIZER_FILE, SpecialRole, Tokenizer
from sheepop.tokenizer.pattern import CUT, begins_with_known_cut, cut_text
from sheepop.tokenizer.settings import check_special_ids, role_text, with_roles
from sheepop.tokenizer.vocabulary import ALGORITHMS, check_model, texts_by_id

if TYPE_CHECKING:
    import tokenizers

# The library needs about 170 bytes of memory per character during encoding, so a batch is encoded in groups.
_GROUP_CHARACTERS = 2**21


class _Texts(Protocol):
    """The texts of all tokens, in the order of ids."""

    def __len__(self) -> int: ...
    def __getitem__(self, token_id: int, /) -> str: ...


class BackendTokenizer(Tokenizer):
    """A tokenizer from `content`, the text of a ``tokenizer.json``, and `settings`, the keys of its settings file.

    It ignores truncation and padding in the file, and `encode` returns only the ids of the text: the tokens that the
    file adds around a text are `prefix_ids` and `suffix_ids`. Raises `TokenizerError` if the two do not make a usable
    tokenizer.
    """

    def __init__(self, content: str | bytes | None, settings: Mapping[str, Any] | None = None) -> None:
        self._given_content = None if content is None else as_bytes(content)
        library = self._read()
        self.algorithm = ALGORITHMS[self._description["model"]["type"]]
        added = self._description["added_tokens"]
        self._added = {token["id"]: token["content"] for token in added}
        self._special = {token["content"]: token["id"] for token in added if token["special"]}
        self._settings = with_roles(settings or {}, self._special)
        check_special_ids(self._settings, self._special)
        self._check()
        self._decoding = self._read_decoding()
        self.leading_spaces = self._decoding.leading_spaces
        self.prefix_ids, self.suffix_ids = self._ids_around(library)

    @cached_property
    def _content(self) -> bytes:
        assert self._given_content is not None
        return self._given_content

    def _read(self) -> tokenizers.Tokenizer:
        """Sets `_description` and `_texts`; the library's tokenizer that is returned puts the same ids around texts."""
        library = parse(self._content)
        self._description: dict[str, Any] = json.loads(library.to_str())
        self._texts: _Texts = texts_by_id(library, self._content)
        return library

    def _check(self) -> None:
        """Raises `TokenizerError` if this class does not support `_description`."""
        check_model(self._description["model"])

    def _read_decoding(self) -> Decoding:
        return read_decoding(self._description["decoder"])

    def _ids_around(self, library: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self._description["post_processor"] is None:
            return (), ()
        around = ids_around(library)
        if any(token_id >= self.vocab_size for ids in around for token_id in ids):
            raise TokenizerError(f"{TOKENIZER_FILE} adds to texts a token whose id is not in its vocabulary.")
        return around

    @property
    def vocab_size(self) -> int:
        """The number of token ids, special and other added tokens included."""
        return len(self._texts)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The text of every special token with its id."""
        return dict(self._special)

    def special_id(self, role: SpecialRole) -> int | None:
        """The id of the token that ``tokenizer_config.json`` names for `role`, or None."""
        text = role_text(self._settings, role)
        return None if text is None else self._special[text]

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The token ids of `text`; raises `TokenizerError` for a lone surrogate, which UTF-8 cannot encode."""
        return self.encode_batch((text,), allow_special=allow_special)[0]

    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """`encode` of every text, in order, on the library's threads, without Python's global lock."""
        encoder = self._with_special if allow_special else self._ordinary
        texts = list(texts)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a tokenizer encodes str")
        results: list[list[int]] = [[] for _ in texts]
        for group in self._groups(texts):
            owners, parts = zip(*group, strict=True)
            for owner, ids in zip(owners, encoder.encode(parts), strict=True):
                results[owner] += ids
        return results

    def fingerprint(self) -> str:
        """SHA-256 of the model, its pre-tokenization and its special tokens in a canonical form."""
        return self._fingerprint

    def to_json(self) -> str:
        """The text from which this tokenizer was made, unchanged."""
        return self._content.decode("utf-8")

    def settings(self) -> dict[str, Any]:
        """The keys of ``tokenizer_config.json`` as they were read, with the roles of the special tokens."""
        return dict(self._settings)

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own pickling loses `encode_special_tokens`.
        return type(self), (self._given_content, self._settings)

    def _encoder(self, *, allow_special: bool) -> Encoder:
        description, rewrite = self._without_charsmap(self._whole_description())
        hidden = set() if allow_special else found_in_text(description, self._special.keys())
        return Encoder(description, hidden, allow_special=allow_special, rewrite=rewrite)

    def _whole_description(self) -> Mapping[str, Any]:
        """The content of ``tokenizer.json`` in the library's words, with vocabulary."""
        return self._description

    def _without_charsmap(self, description: Mapping[str, Any]) -> tuple[Mapping[str, Any], Rewrite | None]:
        """`description` without the table of replacements that this package applies itself, and its application."""
        matching = self._settings.get(CHARSMAP_MATCHING)
        if matching is None:
            return description, None
        rest, charsmap = charsmap_of(description, matching)
        return rest, charsmap.rewrite

    @cached_property
    def _ordinary(self) -> Encoder:
        return self._encoder(allow_special=False)

    @cached_property
    def _with_special(self) -> Encoder:
        return self._encoder(allow_special=True)

    @cached_property
    def _pieces(self) -> Sequence[bytes]:
        return _Pieces(self._texts, self._piece)

    def _piece(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is None:
            return self._decoding.entry(self._texts[token_id])
        return b"" if added in self._special else self._decoding.added(added)

    @cached_property
    def _bytes_of_special(self) -> dict[int, bytes]:
        return {token_id: self._decoding.added(text) for text, token_id in self._special.items()}

    @cached_property
    def _fingerprint(self) -> str:
        # Leaves out options that are off, so that options added by later versions of the library change nothing.
        content = {
            "model": _without_defaults(self._whole_description()["model"]),
            "normalizer": self._description["normalizer"],
            "pre_tokenizer": self._description["pre_tokenizer"],
            "added_tokens": [_without_defaults(token) for token in self._description["added_tokens"]],
            "roles": {role: self.special_id(role) for role in SPECIAL_TOKENS},
        }
        if self.prefix_ids:
            content["prefix"] = self.prefix_ids
        if CHARSMAP_MATCHING in self._settings:
            content[CHARSMAP_MATCHING] = self._settings[CHARSMAP_MATCHING]
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()

    def _groups(self, texts: list[str]) -> Iterator[list[tuple[int, str]]]:
        group: list[tuple[int, str]] = []
        characters = 0
        for owner, text in enumerate(texts):
            for part in cut_text(text) if self._may_be_cut else (text,):
                group.append((owner, part))
                characters += len(part)
                if characters >= _GROUP_CHARACTERS:
                    yield group
                    group, characters = [], 0
        if group:
            yield group

    @cached_property
    def _may_be_cut(self) -> bool:
        """Whether the parts from `cut_text` give the same ids separately as the whole text."""
        normalizer, pre_tokenizer = self._description["normalizer"], self._description["pre_tokenizer"]
        # This pre-tokenizer cuts text wherever `cut_text` does, and does not look beyond a cut.
        if pre_tokenizer == {"type": "BertPreTokenizer"}:
            cuts = normalizer is None or normalizer["type"] == "BertNormalizer"
        else:
            cuts = normalizer is None and begins_with_known_cut(pre_tokenizer or {})
        # `cut_text` may cut inside an added token, or beside one that depends on its surroundings.
        flags, added = ("single_word", "lstrip", "rstrip"), self._description["added_tokens"]
        return cuts and not any(CUT.search(token["content"]) or any(token[flag] for flag in flags) for token in added)


class _Pieces(Sequence[bytes]):
    """The result of `piece` for the id of each of `texts`, found when it is first asked for."""

    def __init__(self, texts: _Texts, piece: Callable[[int], bytes]) -> None:
        self._found: list[bytes | None] = [None] * len(texts)
        self._piece = piece

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, token_id: Any) -> Any:
        found = self._found[token_id]
        if found is None:
            found = self._found[token_id] = self._piece(token_id)
        return found


def as_bytes(content: str | bytes) -> bytes:
    """The UTF-8 bytes of a ``tokenizer.json``; raises `TokenizerError` for a lone surrogate."""
    try:
        return content if isinstance(content, bytes) else content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(f"{TOKENIZER_FILE} is damaged: it is not Unicode text ({error.reason}).") from None


def _without_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None and value is not False and value != ""}
