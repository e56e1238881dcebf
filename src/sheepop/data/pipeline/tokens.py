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
from sheepop.data.corpus import DOCUMENTS, TOKENS
from sheepop.data.document_sources import DocumentSources
from sheepop.data.documents import StoredDocument, batched_by_size, read_stored
from sheepop.data.encoding import DocumentEncoder
from sheepop.data.pipeline.parts import ACCOUNT, part_path
from sheepop.data.pipeline.shuffle import DOCUMENTS_PREFIX, texts_of
from sheepop.data.shards import TokenWriter

_ENCODE_BYTES = 2**20
_PREFIX = "tokens"
_INDEX_TYPE = np.dtype("<i8")


@dataclass(frozen=True)
class Encode:
    """Work on the file that `Gather` wrote as part `rank` of the pass in `source`: its documents as token ids."""

    source: Path
    encoder: DocumentEncoder
    dtype: str
    unknown_id: int | None

    def __call__(self, rank: int, staging: Path) -> None:
        """Writes one shard with its index and the files of its documents, and what is in them."""
        documents = read_stored(part_path(self.source, rank), DOCUMENTS_PREFIX)
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


def place_split(gathered: Path, encoded: Path, buckets: Sequence[int], corpus: Path, prefix: str) -> dict[str, Any]:
    """Puts what `Gather` and `Encode` wrote of some buckets in place; returns the split's entry in the manifest."""
    sources, licenses = list[DocumentSources](), Counter[str]()
    shards, files = list[dict[str, Any]](), list[dict[str, Any]]()
    total = {"documents": 0, "tokens": 0, "bytes": 0, "unknown": 0}
    index = corpus / TOKENS / f"{prefix}.idx"
    with index.open("wb") as file:
        file.write(np.zeros(1, _INDEX_TYPE).tobytes())
        for number, bucket in enumerate(buckets):
            part = part_path(encoded, bucket)
            account = read_json(part / ACCOUNT)
            (shard,) = account["shards"]
            shards.append({**shard, "file": f"{prefix}-{number:05d}.bin"})
            _place_file(part / shard["file"], corpus / TOKENS / shards[-1]["file"])
            offsets = np.fromfile(part / account["index"]["file"], _INDEX_TYPE)
            file.write((offsets[1:] + total["tokens"]).astype(_INDEX_TYPE).tobytes())
            sources.append(DocumentSources.read(part, account["sources"], account["documents"]))
            licenses.update(account["licenses"])
            total = {key: count + account[key] for key, count in total.items()}
            documents = corpus / DOCUMENTS / f"{prefix}-{number:05d}.jsonl.zst"
            _place_file(part_path(gathered, bucket) / f"{DOCUMENTS_PREFIX}-00000.jsonl.zst", documents)
            known = {"documents": account["documents"], "sha256": sha256_file(documents)}
            files.append({"file": documents.name, **known})
    unknown = total.pop("unknown")
    return {
        **total,
        "shards": shards,
        "index": {"file": index.name, "sha256": sha256_file(index)},
        "sources": DocumentSources.joined(sources).write(corpus / TOKENS, prefix),
        "unknown": unknown,
        "licenses": dict(sorted(licenses.items())),
        "files": files,
    }


def _place_file(source: Path, target: Path) -> None:
    """A second name for a finished file, or a copy where the file system knows no second names."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _license(document: StoredDocument) -> str:
    """The licence that a document's origin states, "" for none."""
    # Few documents state one, and the others need not be parsed for it.
    if b'"license"' not in document.line:
        return ""
    return str(orjson.loads(document.line).get("facts", {}).get("license", ""))


def texts_in(source: Path, files: Sequence[int]) -> Iterator[str]:
    """The texts of gathered documents, in order."""
    for bucket in files:
        for stored in read_stored(part_path(source, bucket), DOCUMENTS_PREFIX):
            yield from texts_of(stored.document())
