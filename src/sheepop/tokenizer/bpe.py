"""BPE tokenizers: short texts are encoded with tables that are there at once, many texts by the library."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from sheepop.core.errors import TokenizerError
from sheepop.tokenizer.backend import BackendTokenizer
from sheepop.tokenizer.bpe_model import BpeModel
from sheepop.tokenizer.bpe_tables import BpeTables
from sheepop.tokenizer.encoder import Encoder, encoding_errors, parse
from sheepop.tokenizer.interface import TOKENIZER_FILE
from sheepop.tokenizer.pattern import surrogate_error
from sheepop.tokenizer.vocabulary import BYTE_TOKENS, check_options

if TYPE_CHECKING:
    import tokenizers

# Encoding so many characters for each token of the vocabulary takes about as long as loading the library's tables.
_BEFORE_THE_LIBRARY = 0.5
_WORDS = 2**16
_LOOKS_AROUND = ("single_word", "lstrip", "rstrip")


class BpeTokenizer(BackendTokenizer):
    """A tokenizer with a BPE model, from the text of a ``tokenizer.json``, from its `tables`, or from both.

    Without a `content`, the text is made from the tables when it is asked for.
    """

    def __init__(
        self,
        content: str | bytes | None,
        settings: Mapping[str, Any] | None = None,
        tables: BpeTables | None = None,
    ) -> None:
        self._given = tables
        super().__init__(content, settings)
        self._characters_so_far = 0

    @cached_property
    def _content(self) -> bytes:
        return self._tables.content() if self._given_content is None else self._given_content

    def _read(self) -> tokenizers.Tokenizer:
        self._tables = BpeTables.of(orjson.loads(self._content)) if self._given is None else self._given
        outline = self._tables.outline
        self._description = orjson.loads(parse(orjson.dumps(_with_model(outline, vocab={}, merges=[]))).to_str())
        # The library numbers added tokens without regard to the vocabulary that is left out.
        ids = {token["content"]: token["id"] for token in outline.get("added_tokens") or []}
        added = [{**token, "id": ids[token["content"]]} for token in self._description["added_tokens"]]
        self._description["added_tokens"] = sorted(added, key=lambda token: token["id"])
        if (dropout := self._description["model"]["dropout"]) is not None:
            self.notes += (
                f"The tokenizer drops merges at random (dropout {dropout:g}) while a model is trained on it; text is "
                "encoded without that.",
            )
            self._description["model"]["dropout"] = None
        self._texts = self._tables
        return self._steps(self._description)

    def _steps(self, description: Mapping[str, Any]) -> tokenizers.Tokenizer:
        """The library's steps of `description`, without added tokens and with a model to which words are unknown."""
        model = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
        return parse(json.dumps({**description, "added_tokens": [], "model": model}))

    def _check(self) -> None:
        model = self._description["model"]
        check_options(model, "end_of_word_suffix")
        if (unknown := model["unk_token"]) is not None:
            if unknown not in self._tables:
                raise TokenizerError(
                    f"{TOKENIZER_FILE} names {unknown!r} as its unknown token, but does not have that token. The file "
                    "is damaged."
                )
        elif not model["byte_fallback"] or not all(token in self._tables for token in BYTE_TOKENS):
            raise TokenizerError(
                f"{TOKENIZER_FILE} has a BPE model that drops unknown characters: it has neither an unknown token nor "
                "tokens for all 256 bytes. Use a tokenizer that has one or the other."
            )

    def _whole_description(self) -> Mapping[str, Any]:
        return _with_model(self._description, **self._tables.model())

    def _save_tables(self, directory: Path, *, alone: bool) -> bool:
        self._tables.save(directory, None if alone else self._content)
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._given_content, self._settings, self._tables)

    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """`encode` of every text, in order; by the library once there were many, on its threads."""
        texts = list(texts)
        splitter = self._splitter
        if splitter is None or not all(isinstance(text, str) for text in texts) or self._is_worth_the_library(texts):
            return super().encode_batch(texts, allow_special=allow_special)
        if problem := surrogate_error(texts):
            raise problem
        tokenize = self._tokenize_with_special if allow_special else self._tokenize
        results = []
        with encoding_errors(texts):
            for text in texts:
                ids: list[int] = []
                for part in splitter.split(text, allow_special=allow_special):
                    ids += [part] if isinstance(part, int) else tokenize(part)
                results.append(ids)
        return results

    def _is_worth_the_library(self, texts: Iterable[str]) -> bool:
        self._characters_so_far += sum(map(len, texts))
        return self._characters_so_far > _BEFORE_THE_LIBRARY * len(self._tables)

    def tokenize_word(self, word: str) -> list[int]:
        """The ids of a word as the model sees it: after normalization and pre-tokenization."""
        if self._is_worth_the_library((word,)):
            return [token.id for token in self._ordinary.library.model.tokenize(word)]
        return self._tokenize(word)

    @cached_property
    def _hidden(self) -> frozenset[int]:
        """The special tokens that the model itself would find in text that looks like them."""
        model = self._description["model"]
        known = (self._tables.id_of(text) for text in {*self._special, model["unk_token"]} - {None})
        return frozenset(
            token_id
            for token_id in known
            if token_id is not None
            and (model["ignore_merges"] or len(self._texts[token_id]) == 1 or self._tables.is_merged(token_id))
        )

    @cached_property
    def _tokenize(self) -> Any:
        return _remembering(BpeModel(self._tables, self._description["model"], self._hidden))

    @cached_property
    def _tokenize_with_special(self) -> Any:
        return _remembering(BpeModel(self._tables, self._description["model"], frozenset()))

    @cached_property
    def _splitter(self) -> Splitter | None:
        """Splits text into words as the library does; None for steps that only the library can take."""
        description, rewrite = self._without_charsmap(self._description)
        added = description["added_tokens"]
        if any(token[flag] for token in added for flag in _LOOKS_AROUND):
            return None
        if added and '"prepend_scheme": "first"' in json.dumps(description["pre_tokenizer"]):
            return None
        return Splitter(self._steps(description), added, self._hidden, rewrite)

    def _encoder(self, *, allow_special: bool) -> Encoder:
        hidden = set() if allow_special else {self._texts[token_id] for token_id in self._hidden}
        description, rewrite = self._without_charsmap(self._description)
        if hidden or rewrite is not None:
            description, rewrite = self._without_charsmap(self._whole_description())
            return Encoder(description, hidden, allow_special=allow_special, rewrite=rewrite)
        library = parse(self._content)
        library.model.dropout = None
        return Encoder(description, (), allow_special=allow_special, library=library)


class Splitter:
    """Splits text into words for the model and added tokens, by the library's steps and in its order.

    `added` are the entries of ``added_tokens``; those with an id in `hidden` are found only if special tokens are.
    """

    def __init__(
        self, steps: tokenizers.Tokenizer, added: list[dict[str, Any]], hidden: frozenset[int], rewrite: Any
    ) -> None:
        self._normalizer, self._pre_tokenizer, self._rewrite = steps.normalizer, steps.pre_tokenizer, rewrite
        self._special = {token["id"] for token in added if token["special"]}
        self._finders = {}
        for allow_special in (False, True):
            shown = [token for token in added if allow_special or token["id"] not in hidden]
            raw = {token["content"]: token["id"] for token in shown if not token["normalized"]}
            normal = {self._normalized(token["content"]): token["id"] for token in shown if token["normalized"]}
            self._finders[allow_special] = (_Finder(raw), _Finder(normal))

    def split(self, text: str, *, allow_special: bool) -> Iterator[str | int]:
        """Yields the words and the ids of the added tokens between them, in order."""
        raw, normal = self._finders[allow_special]
        skipped: set[int] = set() if allow_special else self._special
        for part in raw.split(text if self._rewrite is None else self._rewrite(text), skipped):
            if isinstance(part, int):
                yield part
                continue
            for piece in normal.split(self._normalized(part), skipped):
                if isinstance(piece, int) or self._pre_tokenizer is None:
                    yield piece
                else:
                    yield from (word for word, _ in self._pre_tokenizer.pre_tokenize_str(piece))

    def _normalized(self, text: str) -> str:
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))


class _Finder:
    """Finds the texts in `ids` from left to right, at each place the longest."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._beginning_with: dict[str, list[str]] = {}
        for text in sorted(ids, key=len, reverse=True):
            if text:
                self._beginning_with.setdefault(text[0], []).append(text)
        first = "".join(map(re.escape, self._beginning_with))
        self._first = re.compile(f"[{first}]" if first else "(?!)")

    def split(self, text: str, skipped: set[int]) -> Iterator[str | int]:
        """Yields what is between the texts, and their ids except those in `skipped`, which stay in the text."""
        begin = place = 0
        while found := self._first.search(text, place):
            place = found.start()
            whole = next((one for one in self._beginning_with[found[0]] if text.startswith(one, place)), None)
            if whole is None:
                place += 1
                continue
            if (token_id := self._ids[whole]) not in skipped:
                if begin < place:
                    yield text[begin:place]
                yield token_id
                begin = place + len(whole)
            place += len(whole)
        if begin < len(text):
            yield text[begin:]


def _remembering(model: BpeModel) -> Any:
    """`model.tokenize` with a memory of short words."""
    remembered = lru_cache(_WORDS)(lambda word: tuple(model.tokenize(word)))
    return lambda word: remembered(word) if len(word) <= 64 else model.tokenize(word)


def _with_model(description: Mapping[str, Any], **parts: Any) -> dict[str, Any]:
    return {**description, "model": {**description["model"], **parts}}
