"""The vocabulary and the merges of a BPE model as sorted arrays.

They are read from a file in a moment, where the `tokenizers` library needs a second and 300 MB to build its own tables
for the 262,144 tokens and 514,906 merges of Gemma.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from sheepop.core.errors import TokenizerError
from sheepop.core.files import write_atomic
from sheepop.tokenizer.interface import TOKENIZER_FILE
from sheepop.tokenizer.settings import are_tokens
from sheepop.tokenizer.text_index import Places, Texts, joined

TABLES_FILE = "tokenizer.tables"
_FORMAT_VERSION = 1
_METADATA = "sheepop"
_LARGEST_OUTLINE = 2**26
_DTYPES = {"text": "u1", "starts": "<u4", "order": "<u4", "pairs": "<u8", "ranks": "<u4", "merged": "<u4"}


@dataclass(frozen=True, eq=False)
class BpeTables:
    """V texts by id, of which E are entries of the model, and M merges; `outline` is the rest of ``tokenizer.json``.

    `text` has the UTF-8 bytes of all texts; that of id i is ``text[starts[i] : starts[i + 1]]``, `starts` (V + 1,).
    `order` (E,) has the ids of the model's entries in the order of their bytes. `pairs` (M,) has left id * 2^32 +
    right id in rising order, `ranks` (M,) the place of each pair in the list of merges, and `merged` (M,) the id that
    it becomes.
    """

    outline: dict[str, Any]
    text: bytes
    starts: NDArray[np.uint32]
    order: NDArray[np.uint32]
    pairs: NDArray[np.uint64]
    ranks: NDArray[np.uint32]
    merged: NDArray[np.uint32]

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> BpeTables:
        """The tables of a whole ``tokenizer.json``; raises `TokenizerError` if its vocabulary or merges are damaged."""
        model = dict(description["model"])
        vocabulary, merges = model.pop("vocab", None), model.pop("merges", None)
        if not isinstance(vocabulary, dict) or not _are_ids(vocabulary.values()):
            raise _damaged("its vocabulary is not a table from text to id")
        added = description.get("added_tokens") or []
        if not are_tokens(added):
            raise _damaged("its added tokens are not a list of texts with ids")
        texts, outline = _texts_by_id(vocabulary), {**description, "model": model, "added_tokens": []}
        tables = cls.made(outline, texts, *_merged(vocabulary, texts, merges, model.get("continuing_subword_prefix")))
        return tables.with_added(added)

    @classmethod
    def made(
        cls,
        outline: dict[str, Any],
        texts: Texts,
        left: Places,
        right: Places,
        merged: Places,
        ranks: Places | None = None,
    ) -> BpeTables:
        """The tables of entries with the ids 0, 1, 2, ..., without added tokens.

        The merges of `left` and `right` to `merged` come in their order, or in that of `ranks`, which grow by 1.
        """
        if (equal := texts.index.equal) is not None:
            raise _damaged(f"the tokens {equal[0]} and {equal[1]} have the same text, {texts[equal[0]]!r:.80}")
        pairs = left.astype(np.uint64) << np.uint64(32) | right.astype(np.uint64)
        order = np.argsort(pairs)
        pairs = pairs[order]
        first = np.flatnonzero(np.append(True, pairs[1:] != pairs[:-1])[: len(pairs)])
        # Of a pair that is listed twice, the last place counts, as in the library.
        chosen = np.maximum.reduceat(order, first) if len(first) else order
        found = [(chosen if ranks is None else ranks[chosen]), merged[chosen], texts.starts, texts.in_order()]
        ranks32, merged32, starts, sorted_ids = (each.astype(np.uint32) for each in found)
        tables = cls(outline, texts.text.tobytes(), starts, sorted_ids, pairs[first], ranks32, merged32)
        tables.__dict__["_entries"] = texts  # which has been indexed
        return tables

    def with_added(self, added: list[dict[str, Any]]) -> BpeTables:
        """The tables with these entries of ``added_tokens`` instead of their own.

        Raises `TokenizerError` if one has another id than the library gives it, which is that of an entry of the model
        or the next one that is free, whatever the file says.
        """
        entries, own = self._entries, Texts.of(_encoded(token["content"] for token in added))
        free, further = len(entries), [entries.text.tobytes()]
        starts = [entries.starts]
        for number, actual in enumerate(entries.index.find(own.of_all).tolist()):
            if actual < 0:
                actual, free = free, free + 1
                further.append(own.text[own.starts[number] : own.starts[number + 1]].tobytes())
                starts.append(starts[-1][-1:] + len(further[-1]))
            if actual != added[number]["id"]:
                raise TokenizerError(
                    f"The ids of {TOKENIZER_FILE} are out of place: the added token {own[number]!r} claims the id "
                    f"{added[number]['id']}, and the rest of the vocabulary leaves it {actual}. The file is damaged."
                )
        outline, places = {**self.outline, "added_tokens": added}, np.concatenate(starts).astype(np.uint32)
        return replace(self, outline=outline, text=b"".join(further), starts=places)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, token_id: int) -> str:
        return self._bytes(token_id).decode("utf-8")

    def texts(self) -> list[str]:
        """All texts in the order of ids."""
        return Texts(np.frombuffer(self.text, dtype=np.uint8), self.starts).decoded()

    def __contains__(self, text: object) -> bool:
        return isinstance(text, str) and self.id_of(text) is not None

    def id_of(self, text: str) -> int | None:
        """The id of an entry of the model, or None."""
        data = text.encode("utf-8")
        place = bisect_left(self._order, data, key=self._bytes)
        if place == len(self._order) or self._bytes(self._order[place]) != data:
            return None
        return int(self._order[place])

    def is_merged(self, token_id: int) -> bool:
        """Whether merges form the token."""
        return bool(self._are_merged[token_id])

    def pair(self, left: int, right: int) -> tuple[int, int] | None:
        """The rank of the merge of two neighbours, and the id that they become; None if there is none."""
        wanted = left << 32 | right
        place = bisect_left(self._pairs, wanted)
        if place == len(self._pairs) or self._pairs[place] != wanted:
            return None
        return self._ranks[place], self._merged[place]

    def model(self) -> dict[str, Any]:
        """The ``vocab`` and the ``merges`` of the ``model`` in a ``tokenizer.json``."""
        texts = self.texts()
        pairs = self.pairs[np.argsort(self.ranks)].tolist()
        return {
            "vocab": dict(zip(texts[: len(self.order)], range(len(self.order)), strict=True)),
            "merges": [(texts[pair >> 32], texts[pair & 0xFFFFFFFF]) for pair in pairs],
        }

    @cached_property
    def _entries(self) -> Texts:
        """The texts of the model's entries."""
        return Texts(np.frombuffer(self.text, dtype=np.uint8), self.starts).first(len(self.order))

    @cached_property
    def _are_merged(self) -> NDArray[np.bool_]:
        found = np.zeros(len(self), dtype=np.bool_)
        found[self.merged] = True
        return found

    # Indexing a memoryview is several times faster than indexing an array.
    @cached_property
    def _order(self) -> memoryview:
        return self.order.data

    @cached_property
    def _starts(self) -> memoryview:
        return self.starts.data

    @cached_property
    def _pairs(self) -> memoryview:
        return self.pairs.data

    @cached_property
    def _ranks(self) -> memoryview:
        return self.ranks.data

    @cached_property
    def _merged(self) -> memoryview:
        return self.merged.data

    def _bytes(self, token_id: int) -> bytes:
        return self.text[self._starts[token_id] : self._starts[token_id + 1]]

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("outline", *_DTYPES)}

    def content(self) -> bytes:
        """A ``tokenizer.json`` with these tables."""
        return orjson.dumps({**self.outline, "model": {**self.outline["model"], **self.model()}})

    def save(self, directory: Path, content: bytes | None) -> None:
        """Writes the tables in the format of safetensors, beside a ``tokenizer.json`` with `content`, if any."""
        from safetensors.numpy import save

        arrays = self._arrays()
        outline = json.dumps(self.outline, ensure_ascii=False)
        metadata = {
            "format_version": _FORMAT_VERSION,
            "tokenizer_sha256": _sha256(content),
            "sha256": _checksum(arrays, outline),
            "outline": outline,
        }
        # As one value, because the format writes several in any order.
        write_atomic(directory / TABLES_FILE, save(arrays, {_METADATA: json.dumps(metadata)}))

    @classmethod
    def load(cls, directory: Path, content: bytes | None) -> BpeTables | None:
        """The tables in `directory`; None if there are none, or those of another content or format.

        Without a `content`, only tables are found that stand alone. Raises `TokenizerError` if the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        file = directory / TABLES_FILE
        if not file.is_file():
            return None
        try:
            with safe_open(file, framework="numpy") as opened:
                metadata = json.loads((opened.metadata() or {})[_METADATA])
                if metadata["format_version"] != _FORMAT_VERSION:
                    return None
                if metadata["tokenizer_sha256"] != _sha256(content):
                    return None
                arrays = {name: opened.get_tensor(name) for name in _DTYPES}
            outline = metadata["outline"]
            is_whole = len(outline) <= _LARGEST_OUTLINE and metadata["sha256"] == _checksum(arrays, outline)
            if is_whole and _is_consistent(**arrays):
                tables = cls(orjson.loads(outline), **{**arrays, "text": arrays["text"].tobytes()})
                if tables._fit_outline():
                    return tables
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        remedy = f"Remove it: it only repeats {TOKENIZER_FILE}, to load it faster"
        if content is None:
            remedy = f"Remove {directory}, and give the model again"
        raise TokenizerError(f"{file} is damaged. {remedy}.")

    def _fit_outline(self) -> bool:
        """Whether the outline is of a BPE model, whose added tokens have the texts and ids of the tables."""
        model = self.outline.get("model") if isinstance(self.outline, dict) else None
        if not isinstance(model, dict) or model.get("type") != "BPE":
            return False
        added = self.outline.get("added_tokens") or []
        if not are_tokens(added):
            return False
        ids, texts = [token["id"] for token in added], _encoded(token["content"] for token in added)
        return all(0 <= token_id < len(self) for token_id in ids) and list(map(self._bytes, ids)) == texts

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {**{name: getattr(self, name) for name in _DTYPES}, "text": np.frombuffer(self.text, dtype=np.uint8)}


def _are_ids(values: Collection[Any]) -> bool:
    return set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < 2**32))


def _texts_by_id(vocabulary: Mapping[str, int]) -> Texts:
    """The texts of all ids; raises `TokenizerError` unless the ids are 0, 1, 2, ..., as the library gives them."""
    texts, count = dict(zip(vocabulary.values(), vocabulary, strict=True)), len(vocabulary)
    found = [text for text in map(texts.get, range(count)) if text is not None]
    if len(texts) != count or len(found) != count:
        raise TokenizerError(
            f"The ids of {TOKENIZER_FILE} are out of place: {count} tokens must have the ids 0 to {count - 1}, each "
            "once. The file is damaged."
        )
    return Texts.of(_encoded(found))


def _encoded(texts: Iterable[str]) -> list[bytes]:
    try:
        return [text.encode("utf-8") for text in texts]
    except UnicodeEncodeError:
        raise _damaged("its vocabulary has a lone surrogate, which is not text") from None


def _merged(vocabulary: Mapping[str, int], texts: Texts, merges: Any, prefix: Any) -> tuple[Places, Places, Places]:
    """The ids that each of a list of merges, pairs or texts with a space between, joins, and that it makes."""
    if not isinstance(merges, list):
        raise _damaged("it has no list of merges")
    # The first line of some lists is a comment.
    parts = merges
    if str in set(map(type, merges)):
        lines = (line for line in merges if not (isinstance(line, str) and line.startswith("#version")))
        parts = [line.split(" ") if isinstance(line, str) else line for line in lines]
    cut = len(prefix.encode("utf-8")) if isinstance(prefix, str) else 0
    try:
        if set(map(len, parts)) <= {2}:
            ids = np.array(list(map(vocabulary.__getitem__, chain.from_iterable(parts))), dtype=np.int64).reshape(-1, 2)
            whole = texts.index.find(joined(texts, ids[:, 0], ids[:, 1], cut))
            if not len(whole) or whole.min() >= 0:
                return ids[:, 0], ids[:, 1], whole
    except (KeyError, TypeError):
        pass
    wrong = next(part for part in parts if not _is_merge(part, vocabulary, cut))
    raise _damaged(f"the merge {wrong!r:.80} is not one of two tokens that form a token")


def _is_merge(part: Any, vocabulary: Mapping[str, int], cut: int) -> bool:
    is_pair = isinstance(part, list) and len(part) == 2 and all(isinstance(text, str) for text in part)
    whole = b"".join((part[0].encode("utf-8"), part[1].encode("utf-8")[cut:])) if is_pair else b""
    return is_pair and {*part, whole.decode("utf-8", "replace")} <= vocabulary.keys()


def _is_consistent(
    text: NDArray[Any],
    starts: NDArray[Any],
    order: NDArray[Any],
    pairs: NDArray[Any],
    ranks: NDArray[Any],
    merged: NDArray[Any],
) -> bool:
    """Whether the arrays have the right types and shapes, and no index lies outside another array."""
    arrays = {"text": text, "starts": starts, "order": order, "pairs": pairs, "ranks": ranks, "merged": merged}
    if any(array.ndim != 1 or array.dtype != np.dtype(_DTYPES[name]) for name, array in arrays.items()):
        return False
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(text) or (starts[1:] < starts[:-1]).any():
        return False
    text.tobytes().decode("utf-8")
    # No text begins inside a character.
    inside = starts[starts < len(text)]
    size = len(starts) - 1
    return (
        not ((text[inside] & 0xC0) == 0x80).any()
        and len(pairs) == len(ranks) == len(merged)
        and len(order) <= size
        and bool((order < len(order)).all())
        and bool((np.bincount(order, minlength=len(order)) == 1).all())
        and bool((merged < size).all())
        and bool((pairs[1:] > pairs[:-1]).all())
    )


def _checksum(arrays: Mapping[str, NDArray[Any]], outline: str) -> str:
    digest = hashlib.sha256(outline.encode("utf-8"))
    for name in _DTYPES:
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _sha256(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _damaged(reason: str) -> TokenizerError:
    return TokenizerError(f"{TOKENIZER_FILE} is damaged or of an unknown format: {reason}.")
