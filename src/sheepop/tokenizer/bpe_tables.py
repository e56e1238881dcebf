"""The vocabulary and the merges of a BPE model as sorted arrays, and merging with them.

They are read from a file in a moment, where the `tokenizers` library needs a second and 300 MB to build its own tables
for the 262,144 tokens and 514,906 merges of Gemma. Sennrich, Haddow and Birch 2016, algorithm 1.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.core.errors import TokenizerError
from sheepop.core.files import write_atomic
from sheepop.tokenizer.interface import TOKENIZER_FILE
from sheepop.tokenizer.settings import are_tokens
from sheepop.tokenizer.vocabulary import BYTE_TOKENS

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
        texts = _texts_by_id(vocabulary, added)
        try:
            encoded = [text.encode("utf-8") for text in texts]
        except UnicodeEncodeError:
            raise _damaged("its vocabulary has a lone surrogate, which is not text") from None
        starts = np.zeros(len(texts) + 1, dtype=np.uint32)
        np.cumsum([len(text) for text in encoded], out=starts[1:])
        order = np.array(sorted(vocabulary.values(), key=encoded.__getitem__), dtype=np.uint32)
        pairs, ranks, merged = _merge_arrays(vocabulary, merges, model.get("continuing_subword_prefix"))
        return cls({**description, "model": model}, b"".join(encoded), starts, order, pairs, ranks, merged)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, token_id: int) -> str:
        return self._bytes(token_id).decode("utf-8")

    def texts(self) -> list[str]:
        """All texts in the order of ids."""
        starts = self.starts.tolist()
        return [self.text[begin:end].decode("utf-8") for begin, end in pairwise(starts)]

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
            "vocab": {texts[token_id]: token_id for token_id in self.order.tolist()},
            "merges": [(texts[pair >> 32], texts[pair & 0xFFFFFFFF]) for pair in pairs],
        }

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

    def save(self, directory: Path, content: bytes) -> None:
        """Writes the tables of the ``tokenizer.json`` with `content` beside it, in the format of safetensors."""
        from safetensors.numpy import save

        arrays = self._arrays()
        outline = json.dumps(self.outline, ensure_ascii=False)
        metadata = {
            "format_version": _FORMAT_VERSION,
            "tokenizer_sha256": hashlib.sha256(content).hexdigest(),
            "sha256": _checksum(arrays, outline),
            "outline": outline,
        }
        # As one value, because the format writes several in any order.
        write_atomic(directory / TABLES_FILE, save(arrays, {_METADATA: json.dumps(metadata)}))

    @classmethod
    def load(cls, directory: Path, content: bytes) -> BpeTables | None:
        """The tables in `directory`; None if there are none, or those of another content or format.

        Raises `TokenizerError` if the file is damaged.
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
                if metadata["tokenizer_sha256"] != hashlib.sha256(content).hexdigest():
                    return None
                arrays = {name: opened.get_tensor(name) for name in _DTYPES}
            outline = metadata["outline"]
            is_whole = len(outline) <= _LARGEST_OUTLINE and metadata["sha256"] == _checksum(arrays, outline)
            if is_whole and _is_consistent(**arrays):
                tables = cls(json.loads(outline), **{**arrays, "text": arrays["text"].tobytes()})
                if tables._fit_outline():
                    return tables
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        raise TokenizerError(f"{file} is damaged. Remove it: it only repeats {TOKENIZER_FILE}, to load it faster.")

    def _fit_outline(self) -> bool:
        """Whether the outline is of a BPE model, whose added tokens have the texts and ids of the tables."""
        model = self.outline.get("model") if isinstance(self.outline, dict) else None
        if not isinstance(model, dict) or model.get("type") != "BPE":
            return False
        added = self.outline.get("added_tokens") or []
        return are_tokens(added) and all(
            0 <= token["id"] < len(self) and self[token["id"]] == token["content"] for token in added
        )

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {**{name: getattr(self, name) for name in _DTYPES}, "text": np.frombuffer(self.text, dtype=np.uint8)}


def _are_ids(values: Collection[Any]) -> bool:
    return set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < 2**32))


def _texts_by_id(vocabulary: Mapping[str, int], added: list[dict[str, Any]]) -> list[str]:
    """The texts of all ids; raises `TokenizerError` unless the ids are 0, 1, 2, ..., as the library gives them."""
    texts = dict(zip(vocabulary.values(), vocabulary, strict=True))
    count = free = len(vocabulary)
    for token in added:
        actual = vocabulary.get(token["content"])
        if actual is None:
            # The library gives a new token the next id, whatever the file says.
            actual, count, free = free, count + 1, free + 1
        if actual != token["id"]:
            raise TokenizerError(
                f"The ids of {TOKENIZER_FILE} are out of place: the added token {token['content']!r} claims the id "
                f"{token['id']}, and the rest of the vocabulary leaves it {actual}. The file is damaged."
            )
        texts[actual] = token["content"]
    if len(texts) != count or any(i not in texts for i in range(count)):
        raise TokenizerError(
            f"The ids of {TOKENIZER_FILE} are out of place: {count} tokens must have the ids 0 to {count - 1}, each "
            "once. The file is damaged."
        )
    return [texts[i] for i in range(count)]


def _merge_arrays(vocabulary: Mapping[str, int], merges: Any, prefix: Any) -> tuple[NDArray[Any], ...]:
    """The arrays `pairs`, `ranks` and `merged` of a list of merges, as pairs or as texts with a space between."""
    if not isinstance(merges, list):
        raise _damaged("it has no list of merges")
    # The first line of some lists is a comment.
    parts = merges
    if str in set(map(type, merges)):
        lines = (line for line in merges if not (isinstance(line, str) and line.startswith("#version")))
        parts = [line.split(" ") if isinstance(line, str) else line for line in lines]
    cut = len(prefix) if isinstance(prefix, str) else 0
    try:
        left = [vocabulary[a] for a, _ in parts]
        right = [vocabulary[b] for _, b in parts]
        whole = [vocabulary[a + b[cut:]] for a, b in parts]
    except (KeyError, ValueError, TypeError):
        wrong = next(part for part in parts if not _is_merge(part, vocabulary, cut))
        raise _damaged(f"the merge {wrong!r:.80} is not one of two tokens that form a token") from None
    pairs = np.array(left, dtype=np.uint64) << np.uint64(32) | np.array(right, dtype=np.uint64)
    order = np.argsort(pairs, kind="stable")
    pairs = pairs[order]
    # Of a pair that is listed twice, the last place counts, as in the library.
    last = np.append(pairs[1:] != pairs[:-1], True)[: len(pairs)]
    chosen = order[last].astype(np.uint32)
    return pairs[last], chosen, np.array(whole, dtype=np.uint32)[chosen]


def _is_merge(part: Any, vocabulary: Mapping[str, int], cut: int) -> bool:
    is_pair = isinstance(part, list) and len(part) == 2 and all(isinstance(text, str) for text in part)
    return is_pair and part[0] in vocabulary and part[1] in vocabulary and part[0] + part[1][cut:] in vocabulary


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
        and all(bool((array < size).all()) for array in (order, merged))
        and bool((pairs[1:] > pairs[:-1]).all())
    )


def _checksum(arrays: Mapping[str, NDArray[Any]], outline: str) -> str:
    digest = hashlib.sha256(outline.encode("utf-8"))
    for name in _DTYPES:
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _damaged(reason: str) -> TokenizerError:
    return TokenizerError(f"{TOKENIZER_FILE} is damaged or of an unknown format: {reason}.")


class BpeModel:
    """Splits words into tokens with `tables`, as the model of the library does; tokens in `hidden` are never found.

    `options` are those of the ``model`` in a ``tokenizer.json``.
    """

    def __init__(self, tables: BpeTables, options: Mapping[str, Any], hidden: frozenset[int]) -> None:
        self._tables, self._hidden = tables, hidden
        self._prefix = options["continuing_subword_prefix"] or ""
        self._whole_first, self._fuse = options["ignore_merges"], options["fuse_unk"]
        unknown = options["unk_token"]
        self._unknown = None if unknown is None else tables.id_of(unknown)
        found = [tables.id_of(token) for token in BYTE_TOKENS] if options["byte_fallback"] else []
        self._bytes = found or [None] * 256
        self._known: dict[str, int | None] = {}

    def tokenize(self, word: str) -> list[int]:
        """The ids of a word; what the vocabulary lacks becomes bytes, else the unknown token, else nothing."""
        if self._whole_first and (whole := self._id_of(word)) is not None:
            return [whole]
        return self._merge(self._characters(word))

    def _id_of(self, text: str) -> int | None:
        found = self._tables.id_of(text)
        return None if found in self._hidden else found

    def _characters(self, word: str) -> list[int]:
        ids: list[int] = []
        pending = False
        for place, character in enumerate(word):
            text = self._prefix + character if place else character
            if text not in self._known:
                self._known[text] = self._id_of(text)
            if (found := self._known[text]) is not None:
                if pending:
                    ids.append(self._unknown_id())
                ids.append(found)
                pending = False
                continue
            spelled = [self._bytes[byte] for byte in text.encode("utf-8")]
            if None not in spelled:
                ids += [token_id for token_id in spelled if token_id is not None]
            elif self._unknown is not None:
                if pending and not self._fuse:
                    ids.append(self._unknown)
                pending = True
        return [*ids, self._unknown_id()] if pending else ids

    def _unknown_id(self) -> int:
        assert self._unknown is not None
        return self._unknown

    def _merge(self, ids: list[int]) -> list[int]:
        """Merges neighbours, the pair of the lowest rank first, of equal ones the left one."""
        count = len(ids)
        before, after = list(range(-1, count - 1)), list(range(1, count + 1))
        heap: list[tuple[int, int, int, int, int]] = []

        def consider(left: int, right: int) -> None:
            found = self._tables.pair(ids[left], ids[right])
            if found is not None and found[1] not in self._hidden:
                heappush(heap, (found[0], left, found[1], ids[left], ids[right]))

        for place in range(count - 1):
            consider(place, place + 1)
        while heap:
            _, left, whole, *pair = heappop(heap)
            right = after[left]
            if ids[left] < 0 or right >= count:
                continue
            if [ids[left], ids[right]] != pair:
                # A neighbour has changed meanwhile; the library goes by what the two become now.
                found = self._tables.pair(ids[left], ids[right])
                if found is None or found[1] != whole:
                    continue
            ids[left], ids[right] = whole, -1
            after[left] = after[right]
            if after[right] < count:
                before[after[right]] = left
                consider(left, after[left])
            if before[left] >= 0:
                consider(before[left], left)
        return [token_id for token_id in ids if token_id >= 0]
