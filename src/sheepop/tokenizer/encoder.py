"""Wraps the library's tokenizer so that text that only looks like a special token never becomes one."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.interface import TOKENIZER_FILE
from sheepop.tokenizer.pattern import surrogate_error
from sheepop.tokenizer.vocabulary import BYTE_TOKENS

if TYPE_CHECKING:
    import tokenizers

Rewrite = Callable[[str], str]

# Errors to pass on. A panic of the library, which a bad file or text causes, is not an Exception either.
_PASSED_ON = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)
_SHORT = 2**12  # characters of one text for which the library holds Python's lock


class Encoder:
    """Encodes with the model in `description`, the content of a ``tokenizer.json``.

    The library searches text in a vocabulary that also has special tokens and bytes (``</s>``, ``<0x0A>``), so with
    most models, text that looks like one becomes one. This class finds special tokens only with `allow_special`, and
    such bytes never: it renames their entries to strings that no text contains. `rewrite` is applied to every text
    first. `hidden` are the entries to rename, `library` is the parsed `description`, if it exists already.
    """

    def __init__(
        self,
        description: Mapping[str, Any],
        hidden: Collection[str],
        *,
        allow_special: bool,
        rewrite: Rewrite | None = None,
        library: tokenizers.Tokenizer | None = None,
    ) -> None:
        model = description["model"]
        falls_back = model["type"] == "Unigram" and bool(model["byte_fallback"])
        hidden = set(hidden)
        self._ids_of_bytes: list[int | None] | None = None
        if falls_back:
            ids = {text: token_id for token_id, (text, _) in enumerate(model["vocab"])}
            self._ids_of_bytes = [ids.get(token) for token in BYTE_TOKENS]
            hidden |= ids.keys() & set(BYTE_TOKENS)
        self._unknown: int | None = model.get("unk_id")
        # With `allow_special`, the text of the unknown token is that token.
        self._unknown_text = model["vocab"][self._unknown][0] if falls_back and allow_special else None
        self._rewrite = rewrite
        if hidden or library is None:
            library = parse(json.dumps(_renamed(description, hidden) if hidden else description))
        self.library = library
        self.library.encode_special_tokens = not allow_special

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of every text; raises `TokenizerError` for a lone surrogate or text that the model cannot express."""
        with encoding_errors(texts):
            rewritten = texts if self._rewrite is None else [self._rewrite(text) for text in texts]
            if len(rewritten) == 1 and len(rewritten[0]) <= _SHORT:
                return [self._with_bytes(self.library.encode(rewritten[0], add_special_tokens=False))]
            batch = self.library.encode_batch_fast(list(rewritten), add_special_tokens=False)
            return [self._ids(encoding.ids, text) for encoding, text in zip(batch, rewritten, strict=True)]

    def _ids(self, ids: list[int], text: str) -> list[int]:
        if self._ids_of_bytes is None or self._unknown not in ids:
            return ids
        # The fast method does not return the text of each token.
        return self._with_bytes(self.library.encode(text, add_special_tokens=False))

    def _with_bytes(self, encoding: tokenizers.Encoding) -> list[int]:
        ids = encoding.ids
        if self._ids_of_bytes is None or self._unknown not in ids:
            return ids
        return [
            token_id
            for found, text in zip(ids, encoding.tokens, strict=True)
            for token_id in ((found,) if found != self._unknown else self._fallback(text))
        ]

    def _fallback(self, text: str) -> Sequence[int]:
        assert self._ids_of_bytes is not None and self._unknown is not None
        if text == self._unknown_text:
            return (self._unknown,)
        ids = [self._ids_of_bytes[byte] for byte in text.encode("utf-8")]
        return (self._unknown,) if None in ids else [token_id for token_id in ids if token_id is not None]


@contextmanager
def encoding_errors(texts: Sequence[str]) -> Iterator[None]:
    """Turns what the library raises for `texts` into `TokenizerError`."""
    try:
        yield
    except (*_PASSED_ON, TokenizerError):
        raise
    except BaseException as error:  # A panic of the library is not an Exception.
        raise surrogate_error(texts) or TokenizerError(f"The tokenizer cannot encode this text: {error}.") from None


def parse(content: str | bytes) -> tokenizers.Tokenizer:
    """Parses the text of a ``tokenizer.json`` with the library; turns truncation and padding off."""
    import tokenizers

    try:
        whole = content.encode("utf-8") if isinstance(content, str) else content
        library = tokenizers.Tokenizer.from_buffer(whole)
    except _PASSED_ON:
        raise
    except BaseException as error:  # A panic of the library is not an Exception.
        raise TokenizerError(
            f"{TOKENIZER_FILE} is damaged or of an unknown format: the tokenizers library cannot read it ({error})."
        ) from None
    library.no_truncation()
    library.no_padding()
    return library


def ids_around(library: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the library puts before and after a text."""
    try:
        encoding = library.encode("a", add_special_tokens=True)
    except _PASSED_ON:
        raise
    except BaseException as error:
        raise TokenizerError(
            f"The post_processor of {TOKENIZER_FILE}, which adds tokens around a text, is damaged: {error}."
        ) from None
    inside = [place for place, added in enumerate(encoding.special_tokens_mask) if not added]
    if not inside:
        return tuple(encoding.ids), ()
    return tuple(encoding.ids[: inside[0]]), tuple(encoding.ids[inside[-1] + 1 :])


def found_in_text(description: Mapping[str, Any], special: Collection[str]) -> set[str]:
    """The special tokens that the model itself would find in text that looks like them."""
    model = description["model"]
    if model["type"] == "Unigram":
        texts = {text for text, _ in model["vocab"]}
        unknown = model["vocab"][model["unk_id"]][0]
    else:
        texts, unknown = model["vocab"].keys(), model.get("unk_token")
    known = texts & {*special, unknown}
    if model["type"] == "BPE" and not model["ignore_merges"]:
        # BPE starts from characters and reaches all other entries by merges.
        merged = {left + right for left, right in model["merges"]}
        return {text for text in known if len(text) == 1 or text in merged}
    return known


def _renamed(description: Mapping[str, Any], hidden: set[str]) -> dict[str, Any]:
    """`description` with the entries `hidden` under secret random names, which no text can contain."""
    secret = secrets.token_hex(16)
    names = {text: f"\U0010ffff{secret}{number}" for number, text in enumerate(sorted(hidden))}
    model, added = dict(description["model"]), description["added_tokens"]
    if model["type"] == "Unigram":
        model["vocab"] = [(names.get(text, text), score) for text, score in model["vocab"]]
        model["byte_fallback"] = False
    else:
        model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model["type"] == "BPE":
        model["merges"] = [(left, right) for left, right in model["merges"] if not hidden & {left, right, left + right}]
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in added]
    return {**description, "model": model, "added_tokens": added, "post_processor": None}
