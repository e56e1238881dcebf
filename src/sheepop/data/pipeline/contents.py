"""What a set of documents holds: lengths, kinds, languages, and some of the documents themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sheepop.core.random import derive_seed
from sheepop.data.clean.ledger import EXCERPT_CHARACTERS, Samples
from sheepop.data.documents import Document
from sheepop.data.extract.pair import KIND
from sheepop.data.pairs import Pair


class Contents:
    """Histograms over documents: lengths by powers of two of bytes, kinds, languages by kind; and a sample."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.documents = self.num_bytes = 0
        self.lengths: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self.languages: Counter[str] = Counter()
        self.language_bytes: Counter[str] = Counter()
        self._samples = Samples()

    def add(self, document: Document) -> None:
        """Counts one document."""
        self.documents += 1
        self.num_bytes += document.num_bytes
        self.lengths[document.num_bytes.bit_length()] += 1
        self.kinds[document.kind] += 1
        language = document.language or "not determined"
        self.languages[language] += 1
        self.language_bytes[language] += document.num_bytes
        key = f"{derive_seed(self._seed, 'kept sample', document.id):016x}"
        if self._samples.would_take(key):
            self._samples.offer(key, _excerpt(document))

    def merge(self, record: Mapping[str, Any]) -> None:
        """Adds the record of other documents."""
        self.documents += record["documents"]
        self.num_bytes += record["bytes"]
        self.lengths.update({int(bits): count for bits, count in record["lengths"].items()})
        for name in ("kinds", "languages", "language_bytes"):
            getattr(self, name).update(record[name])
        for sample in record["samples"]:
            self._samples.offer(sample["key"], {k: v for k, v in sample.items() if k != "key"})

    def as_record(self) -> dict[str, Any]:
        """Everything counted, as JSON with sorted entries."""
        return {
            "documents": self.documents,
            "bytes": self.num_bytes,
            "lengths": {str(bits): count for bits, count in sorted(self.lengths.items())},
            "kinds": dict(sorted(self.kinds.items())),
            "languages": dict(sorted(self.languages.items())),
            "language_bytes": dict(sorted(self.language_bytes.items())),
            "samples": self._samples.as_record(),
        }


def _excerpt(document: Document) -> dict[str, Any]:
    text = "\n".join(Pair.of(document)) if document.kind == KIND else document.text
    return {
        "file": document.source,
        "part": document.part,
        "place": document.place,
        "kind": document.kind,
        "language": document.language,
        "bytes": document.num_bytes,
        "excerpt": text[:EXCERPT_CHARACTERS],
    }
