"""The tokens of a corpus: encoded file by file in a pass, then put in place as the shards of a split."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from sheepop.core.files import read_json, sha256_file, write_json
from sheepop.data.document_sources import DocumentSources
from sheepop.data.documents import StoredDocument, batched_by_size, read_stored
from sheepop.data.encoding import DocumentEncoder
from sheepop.data.extract.pair import KIND
from sheepop.data.pairs import Pair
from sheepop.data.pipeline.parts import ACCOUNT, part_path
from sheepop.data.pipeline.shuffle import DOCUMENTS_PREFIX
from sheepop.data.shards import TokenWriter

_ENCODE_BYTES = 2**20
_PREFIX = "tokens"
_INDEX_TYPE = np.dtype("<i8")


@dataclass(frozen=True)
class Encode:
    """Work on file `rank` of `files`, directories that `Gather` wrote below `source`: its documents as token ids."""

    source: Path
    files: tuple[int, ...]
    encoder: DocumentEncoder
    dtype: str
    unknown_id: int | None

    def __call__(self, rank: int, staging: Path) -> None:
        """Writes one shard with its index and the files of its documents, and what is in them."""
        documents = read_stored(part_path(self.source, self.files[rank]), DOCUMENTS_PREFIX)
        unknown, sources, licenses = 0, [], Counter[str]()
        with TokenWriter(staging, _PREFIX, np.dtype(self.dtype)) as writer:
            for batch in batched_by_size(documents, _ENCODE_BYTES):
                sources.append(DocumentSources.of_names(orjson.loads(document.line)["source"] for document in batch))
                licenses.update(stated for document in batch if (stated := _license(document)))
                for token_ids, num_bytes in self.encoder(batch):
                    writer.write(token_ids, num_bytes)
                    if self.unknown_id is not None:
                        unknown += int(np.count_nonzero(token_ids == self.unknown_id))
        entry = DocumentSources.joined(sources).write(staging, _PREFIX)
        write_json(staging / ACCOUNT, {**writer.summary(), "unknown": unknown, "sources": entry, "licenses": licenses})


def place_documents(source: Path, files: Sequence[int], directory: Path, prefix: str) -> list[dict[str, Any]]:
    """Puts the files that `Gather` wrote under their names in the corpus; returns their entries in the manifest."""
    entries = []
    for number, bucket in enumerate(files):
        gathered = part_path(source, bucket)
        name = f"{prefix}-{number:05d}.jsonl.zst"
        place_file(gathered / f"{DOCUMENTS_PREFIX}-00000.jsonl.zst", directory / name)
        documents = read_json(gathered / ACCOUNT)["documents"]
        entries.append({"file": name, "documents": documents, "sha256": sha256_file(directory / name)})
    return entries


def place_tokens(source: Path, ranks: Sequence[int], directory: Path, prefix: str) -> dict[str, Any]:
    """Puts the shards that `Encode` wrote in place and joins the rest; returns the split's manifest entry."""
    sources: list[DocumentSources] = []
    licenses = Counter[str]()
    shards: list[dict[str, Any]] = []
    total = {"documents": 0, "tokens": 0, "bytes": 0, "unknown": 0}
    index = directory / f"{prefix}.idx"
    with index.open("wb") as file:
        file.write(np.zeros(1, _INDEX_TYPE).tobytes())
        for number, rank in enumerate(ranks):
            encoded = part_path(source, rank)
            account = read_json(encoded / ACCOUNT)
            name = f"{prefix}-{number:05d}.bin"
            (shard,) = account["shards"]
            place_file(encoded / shard["file"], directory / name)
            shards.append({**shard, "file": name})
            offsets = np.fromfile(encoded / account["index"]["file"], _INDEX_TYPE)
            file.write((offsets[1:] + total["tokens"]).astype(_INDEX_TYPE).tobytes())
            sources.append(DocumentSources.read(encoded, account["sources"], account["documents"]))
            licenses.update(account["licenses"])
            for key in total:
                total[key] += account[key]
    entry = {"file": index.name, "sha256": sha256_file(index)}
    return {
        "documents": total["documents"],
        "tokens": total["tokens"],
        "bytes": total["bytes"],
        "shards": shards,
        "index": entry,
        "sources": DocumentSources.joined(sources).write(directory, prefix),
        "unknown": total["unknown"],
        "licenses": dict(sorted(licenses.items())),
    }


def _license(document: StoredDocument) -> str:
    """The licence that a document's origin states, "" for none."""
    # Few documents state one, and the others need not be parsed for it.
    if b'"license"' not in document.line:
        return ""
    return str(orjson.loads(document.line).get("facts", {}).get("license", ""))


def place_file(source: Path, target: Path) -> None:
    """A second name for a finished file, or a copy where the file system knows no second names."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def documents_in(source: Path, files: Sequence[int]) -> Iterator[str]:
    """The texts of gathered documents, in order; of a pair first the one and then the other."""
    for bucket in files:
        for stored in read_stored(part_path(source, bucket), DOCUMENTS_PREFIX):
            document = stored.document()
            yield from Pair.of(document) if document.kind == KIND else (document.text,)
