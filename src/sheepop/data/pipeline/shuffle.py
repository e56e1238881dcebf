"""The passes that shuffle and split the documents, and write the document and token files of the corpus.

`decide_assignment` reads the index of all parts. `Scatter` reads a part and writes its documents grouped by bucket;
`Gather` collects one bucket from all parts, sorts it by key and writes a file of the corpus. Buckets are ranges of
keys, so in order they are the whole corpus sorted by key. Neither holds more documents in memory than one file has.
`Encode` turns a file into tokens, and `place_split` moves both to the corpus.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from sheepop.core.files import read_json, sha256_file, write_json
from sheepop.core.random import derive_seed
from sheepop.data.clean.account import EXCERPT_CHARACTERS, Account, Samples
from sheepop.data.config import DataConfig
from sheepop.data.corpus import DOCUMENTS, TOKENS
from sheepop.data.documents import Document, Pair, StoredDocument, batched_by_size, read_stored, stored_file
from sheepop.data.encoding import DocumentEncoder
from sheepop.data.extract.template import PAIR
from sheepop.data.mixing import Mixture, copies
from sheepop.data.pipeline.parts import ACCOUNT, FinishedPart, part_path
from sheepop.data.shards import DocumentSources, TokenWriter
from sheepop.data.split import SPLITS, SplitName, Splitter

DOCUMENTS_PREFIX = "documents"
_MOST_BUCKETS = 256
_SMALLEST_BUCKET, _LARGEST_BUCKET = 2**21, 2**26
_KEY_BITS, _KEY_LENGTH = 63, 20
_CHUNK_BYTES = 2**26
_CHUNK, _OFFSETS, _OFFSET = "chunk-{:05d}.bin", "offsets.bin", np.dtype("<i8")
_ENCODE_BYTES, _TOKENS_PREFIX = 2**20, "tokens"
_COUNTED = ("documents", "bytes", "occurrences", "occurring_bytes")


@dataclass(frozen=True)
class Assignment:
    """The split, the number of copies, and the order of all documents.

    `epochs` has one entry per mixed source. `buckets` is the number of files of each split; `starts` has the bytes and
    the number of kept documents before each part.
    """

    splitter: Splitter
    shuffle: bool
    epochs: tuple[float, ...]
    buckets: tuple[int, int]
    starts: tuple[tuple[int, int], ...]

    def times(self, split: SplitName, mixed: int, document_id: str) -> int:
        """How often a document of the mixed source `mixed` (-1 for none) occurs."""
        if mixed < 0 or (split == "validation" and self.epochs[mixed] > 0):
            return 1
        return copies(self.epochs[mixed], self.splitter.seed, document_id)

    def place(self, split: SplitName, document_id: str, copy: int, passed: int, ordinal: int) -> tuple[int, bytes]:
        """The bucket of one occurrence, numbered over both splits, and its sort key there."""
        count = self.buckets[SPLITS.index(split)]
        if self.shuffle:
            position = derive_seed(self.splitter.seed, "shuffle", f"{document_id} {copy}")
            bucket = position * count >> _KEY_BITS
        else:
            position = ordinal
            bucket = passed * count // max(1, self.splitter.num_bytes)
        return bucket + self.buckets[0] * SPLITS.index(split), b"%016x%04x" % (position, copy)


def decide_assignment(parts: Sequence[FinishedPart], config: DataConfig, seed: int) -> Assignment:
    """The assignment, from ids and sizes of the kept documents; raises `DataError` if the mixture is impossible."""
    splitter = Splitter(config.split, config.validation_fraction, seed)
    starts: list[tuple[int, int]] = []
    for part in parts:
        starts.append((splitter.num_bytes, splitter.documents))
        for identity, size, _ in _kept_documents(part):
            splitter.count(identity, size)
    epochs, train_bytes = _epochs(parts, Mixture(config.mix), splitter)
    held_out = splitter.num_bytes * splitter.fraction
    buckets = (_num_buckets(train_bytes), _num_buckets(held_out) if held_out else 0)
    return Assignment(splitter, config.clean.shuffle, epochs, buckets, tuple(starts))


def _epochs(parts: Sequence[FinishedPart], mixture: Mixture, splitter: Splitter) -> tuple[tuple[float, ...], float]:
    """The epochs of every mixed source, and the approximate bytes of training text."""
    if not mixture.sources:
        return (), float(splitter.num_bytes)
    *sizes, others = [0] * (len(mixture.sources) + 1)
    passed = 0
    for part in parts:
        for identity, size, mixed in _kept_documents(part):
            trains = splitter.side(identity, size, passed) != "validation"
            passed += size
            if mixed < 0:
                others += size * trains
            else:
                sizes[mixed] += size * trains
    epochs = mixture.epochs(sizes, others)
    return tuple(epochs), float(np.dot(sizes, epochs)) + others


def _kept_documents(part: FinishedPart) -> Iterator[tuple[str, int, int]]:
    """Yields id, size and mixed source of every document that stays."""
    index = part.kept_index()
    ids = index["id"].tobytes().hex()
    for number, (size, mixed) in enumerate(index[["size", "mixed"]].tolist()):
        yield ids[32 * number : 32 * (number + 1)], size, mixed


def _num_buckets(num_bytes: float) -> int:
    target = min(max(num_bytes / _MOST_BUCKETS, _SMALLEST_BUCKET), _LARGEST_BUCKET)
    return max(1, round(num_bytes / target))


@dataclass(frozen=True)
class Scatter:
    """The work that groups the kept documents of part `rank` of the pass in `source` by bucket."""

    source: Path
    assignment: Assignment

    def __call__(self, rank: int, staging: Path) -> None:
        """Writes files ``chunk-N.bin`` of documents sorted by bucket, and the offsets of the buckets in them."""
        assignment, part, cut_documents = self.assignment, FinishedPart(self.source, rank), 0
        splits = {name: dict.fromkeys(_COUNTED, 0) for name in SPLITS}
        mixed_sources: dict[int, dict[str, int]] = {}
        passed, ordinal = assignment.starts[rank]
        account = Account(assignment.splitter.seed)
        account.begin(staging)
        with closing(account), closing(_Chunks(staging, sum(assignment.buckets))) as chunks:
            for document, mixed in zip(part.kept(account), part.kept_index()["mixed"].tolist(), strict=True):
                pieces = assignment.splitter.pieces(document, passed)
                cut_documents += len(pieces) - 1
                for split, piece in pieces:
                    times = assignment.times(split, mixed, piece.id)
                    _count(splits[split], piece, times)
                    if split == "train" and mixed >= 0:
                        _count(mixed_sources.setdefault(mixed, dict.fromkeys(_COUNTED, 0)), piece, times)
                    for copy in range(times):
                        chunks.add(*assignment.place(split, piece.id, copy, passed, ordinal), piece.line)
                passed += document.num_bytes
                ordinal += 1
        counts = {"splits": splits, "mixed": mixed_sources, "cut_documents": cut_documents}
        write_json(staging / ACCOUNT, {**account.as_record(), **counts})


def _count(counts: dict[str, int], document: StoredDocument, times: int) -> None:
    for name, amount in zip(_COUNTED, (1, document.num_bytes, times, times * document.num_bytes), strict=True):
        counts[name] += amount


class _Chunks:
    """Buffers occurrences and writes them, grouped by bucket, whenever a chunk is full."""

    def __init__(self, directory: Path, num_buckets: int) -> None:
        self._directory, self._num_buckets = directory, num_buckets
        self._held: list[tuple[int, bytes, bytes]] = []
        self._size = self._written = 0
        self._offsets = (directory / _OFFSETS).open("wb")

    def add(self, bucket: int, key: bytes, line: bytes) -> None:
        self._held.append((bucket, key, line))
        self._size += len(line)
        if self._size >= _CHUNK_BYTES:
            self._flush()

    def close(self) -> None:
        if self._held:
            self._flush()
        self._offsets.close()

    def _flush(self) -> None:
        ends = np.zeros(self._num_buckets + 1, _OFFSET)
        with (self._directory / _CHUNK.format(self._written)).open("wb") as file:
            for bucket, key, line in sorted(self._held, key=lambda held: held[0]):
                ends[bucket + 1] += file.write(key + line)
        self._offsets.write(np.cumsum(ends, dtype=_OFFSET).tobytes())
        self._written += 1
        self._held, self._size = [], 0


@dataclass(frozen=True)
class Gather:
    """The work that sorts bucket `rank`: its documents from all parts of the `Scatter` pass in `source`, by key."""

    source: Path
    num_parts: int
    num_buckets: int
    seed: int

    def __call__(self, rank: int, staging: Path) -> None:
        """Writes the documents of the bucket, and an account with counts by length, kind and language, and samples."""
        counts = {name: Counter[str]() for name in ("lengths", "kinds", "languages", "language_bytes")}
        samples, num_bytes = Samples(), 0
        lines = sorted(line for number in range(self.num_parts) for line in self._lines(number, rank))
        with stored_file(staging, DOCUMENTS_PREFIX) as file:
            for line in lines:
                stored = StoredDocument.from_line(line[_KEY_LENGTH:])
                file.write(stored.line)
                document, size = stored.document(), stored.num_bytes
                language = document.language or "not determined"
                num_bytes += size
                counts["lengths"][str(size.bit_length())] += 1
                counts["kinds"][document.kind] += 1
                counts["languages"][language] += 1
                counts["language_bytes"][language] += size
                key = f"{derive_seed(self.seed, 'kept sample', document.id):016x}"
                if samples.would_take(key):
                    samples.offer(key, _excerpt(document))
        sums = {"documents": len(lines), "bytes": num_bytes, **counts}
        write_json(staging / ACCOUNT, {**sums, "samples": samples.as_record()})

    def _lines(self, number: int, bucket: int) -> Iterator[bytes]:
        directory = part_path(self.source, number)
        # The start of each bucket in each chunk of the part, (chunks, buckets + 1); a part may have no chunks.
        is_filled = (directory / _OFFSETS).stat().st_size > 0
        offsets = np.memmap(directory / _OFFSETS, _OFFSET, "r") if is_filled else np.zeros(0, _OFFSET)
        begins = offsets.reshape(-1, self.num_buckets + 1)[:, bucket : bucket + 2]
        for chunk, (start, stop) in enumerate(begins.tolist()):
            if stop > start:
                with (directory / _CHUNK.format(chunk)).open("rb") as file:
                    file.seek(start)
                    yield from file.read(stop - start).splitlines(keepends=True)


def _excerpt(document: Document) -> dict[str, Any]:
    return {
        "file": document.source,
        **{name: getattr(document, name) for name in ("part", "place", "kind", "language")},
        "bytes": document.num_bytes,
        "excerpt": "\n".join(texts_of(document))[:EXCERPT_CHARACTERS],
    }


def texts_of(document: Document) -> tuple[str, ...]:
    """The text of a document, or the source and target of a pair."""
    return Pair.of(document) if document.kind == PAIR else (document.text,)


@dataclass(frozen=True)
class Encode:
    """The work that encodes the documents in part `rank` of the `Gather` pass in `source`."""

    source: Path
    encoder: DocumentEncoder
    dtype: str
    unknown_id: int | None

    def __call__(self, rank: int, staging: Path) -> None:
        """Writes one shard with its index, the sources of its documents, and an account."""
        documents = read_stored(part_path(self.source, rank), DOCUMENTS_PREFIX)
        unknown, sources, licenses = 0, [], Counter[str]()
        with TokenWriter(staging, _TOKENS_PREFIX, np.dtype(self.dtype)) as writer:
            for batch in batched_by_size(documents, _ENCODE_BYTES):
                sources.append(DocumentSources.of_names(orjson.loads(document.line)["source"] for document in batch))
                licenses.update(stated for document in batch if (stated := _license(document)))
                for token_ids, num_bytes in self.encoder(batch):
                    writer.write(token_ids, num_bytes)
                    if self.unknown_id is not None:
                        unknown += int(np.count_nonzero(token_ids == self.unknown_id))
        entry = DocumentSources.joined(sources).write(staging, _TOKENS_PREFIX)
        write_json(staging / ACCOUNT, {**writer.summary(), "unknown": unknown, "sources": entry, "licenses": licenses})


def place_split(gathered: Path, encoded: Path, buckets: Sequence[int], corpus: Path, prefix: str) -> dict[str, Any]:
    """Places the document files and shards of `buckets` in the corpus; returns the manifest entry of the split."""
    sources, licenses = list[DocumentSources](), Counter[str]()
    shards, files = list[dict[str, Any]](), list[dict[str, Any]]()
    total = {"documents": 0, "tokens": 0, "bytes": 0, "unknown": 0}
    index = corpus / TOKENS / f"{prefix}.idx"
    with index.open("wb") as file:
        file.write(np.zeros(1, _OFFSET).tobytes())
        for number, bucket in enumerate(buckets):
            part = part_path(encoded, bucket)
            account = read_json(part / ACCOUNT)
            (shard,) = account["shards"]
            shards.append({**shard, "file": f"{prefix}-{number:05d}.bin"})
            _place_file(part / shard["file"], corpus / TOKENS / shards[-1]["file"])
            offsets = np.fromfile(part / account["index"]["file"], _OFFSET)
            file.write((offsets[1:] + total["tokens"]).astype(_OFFSET).tobytes())
            sources.append(DocumentSources.read(part, account["sources"], account["documents"]))
            licenses.update(account["licenses"])
            total = {key: count + account[key] for key, count in total.items()}
            documents = corpus / DOCUMENTS / f"{prefix}-{number:05d}.jsonl.zst"
            _place_file(part_path(gathered, bucket) / f"{DOCUMENTS_PREFIX}-00000.jsonl.zst", documents)
            known = {"documents": account["documents"], "sha256": sha256_file(documents)}
            files.append({"file": documents.name, **known})
    return {
        **{name: total[name] for name in ("documents", "tokens", "bytes")},
        "shards": shards,
        "index": {"file": index.name, "sha256": sha256_file(index)},
        "sources": DocumentSources.joined(sources).write(corpus / TOKENS, prefix),
        "unknown": total["unknown"],
        "licenses": dict(sorted(licenses.items())),
        "files": files,
    }


def _place_file(source: Path, target: Path) -> None:
    """Links a finished file to `target`, or copies it if the file system has no hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _license(document: StoredDocument) -> str:
    """The licence in the facts of a document, or "" if there is none."""
    # Few documents have one, so this avoids parsing the others.
    states = b'"license"' in document.line
    return str(orjson.loads(document.line).get("facts", {}).get("license", "")) if states else ""


def texts_in(source: Path, files: Sequence[int]) -> Iterator[str]:
    """Yields the texts of gathered documents, in order."""
    for bucket in files:
        for stored in read_stored(part_path(source, bucket), DOCUMENTS_PREFIX):
            yield from texts_of(stored.document())
