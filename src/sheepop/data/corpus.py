"""Opens a corpus directory: documents, token splits, tokenizer and manifest; traces tokens back to file and page."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from sheepop.core.errors import DataError, UsageError
from sheepop.core.files import damaged_files
from sheepop.data.documents import Document, read_documents_file
from sheepop.data.manifest import read_manifest
from sheepop.data.shards import FILE_PREFIX, DocumentSources, TokenSplit
from sheepop.data.split import SPLITS, SplitName
from sheepop.tokenizer import Tokenizer, load_tokenizer

DOCUMENTS, TOKENS, TOKENIZER = "documents", "tokens", "tokenizer"
QUARANTINE, REMOVED = "quarantine.jsonl", "removed.jsonl.zst"
_TYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class Corpus:
    """A finished corpus, opened with `Corpus.open`; it reads tokens and documents on demand."""

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.manifest = manifest
        try:
            dtype = _TYPES[manifest["tokens"]["type"]]
            self.train, self.validation = (
                TokenSplit.open(directory / TOKENS, self._summary(name), dtype) for name in SPLITS
            )
            self._tokenizer_fingerprint = str(manifest["tokenizer"]["fingerprint"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"The manifest of {directory} is damaged: {type(error).__name__} {error}. Build the corpus again."
            ) from None

    @classmethod
    def open(cls, directory: str | Path, *, verify: bool = True) -> Corpus:
        """Opens a corpus, with `verify` by its checksums; raises `DataError` if it is none, damaged or too new."""
        directory = Path(directory)
        manifest = read_manifest(directory)
        problems = damaged_files(directory) if verify else []
        if problems:
            raise DataError(f"The corpus in {directory} is damaged. Build it again.\n" + "\n".join(problems))
        return cls(directory, manifest)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all token files and the tokenizer: equal for equal training data."""
        hashes = {
            name: [file["sha256"] for file in (summary["index"], *summary["shards"])]
            for name, summary in ((name, self._summary(name)) for name in SPLITS)
        }
        content = {"tokenizer": self._tokenizer_fingerprint, "splits": hashes}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()

    @property
    def holds_pairs(self) -> bool:
        """Whether the documents are pairs of source and target."""
        return self.manifest["config"]["data"].get("extract", {}).get("pair") is not None

    def tokenizer(self) -> Tokenizer:
        """Loads the tokenizer of the corpus."""
        return load_tokenizer(self.directory / TOKENIZER)

    def require_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises `DataError` unless the corpus was tokenized with `tokenizer`."""
        given = tokenizer.fingerprint()
        if given != self._tokenizer_fingerprint:
            raise DataError(
                f"The corpus {self.directory} was built with another tokenizer: its fingerprint is "
                f"{self._tokenizer_fingerprint[:16]}, but that of the tokenizer in use is {given[:16]}. Build the "
                "corpus again with tokenizer.path set to the tokenizer in use, or use the corpus's own, "
                f"{self.directory / TOKENIZER}."
            )

    def documents(self, split: SplitName, first: int = 0, last: int | None = None) -> Iterator[Document]:
        """Yields the documents ``first .. last - 1`` of a split in token order; skips the files before them."""
        directory, passed = self.directory / DOCUMENTS, 0
        paths = sorted(directory.glob(f"{FILE_PREFIX[split]}-*.jsonl.zst"))
        counts = {file["file"]: file["documents"] for file in self._summary(split).get("files", ())}
        while paths and passed + counts.get(paths[0].name, first + 1) <= first:  # format 1 has no counts
            passed += counts[paths.pop(0).name]
        documents = chain.from_iterable(map(read_documents_file, paths))
        return islice(documents, first - passed, None if last is None else last - passed)

    @property
    def licenses(self) -> dict[str, int]:
        """The stated licences of training documents, with the number of documents under each."""
        return dict(self._summary("train").get("licenses", {}))

    def sources(self, split: SplitName) -> DocumentSources:
        """The source file of every document of a split; for an older corpus it reads all documents."""
        entry = self._summary(split).get("sources")
        if entry is None:
            return DocumentSources.of_names(document.source for document in self.documents(split))
        tokens = self.train if split == "train" else self.validation
        return DocumentSources.read(self.directory / TOKENS, entry, tokens.num_documents)

    def _summary(self, split: str) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], self.manifest["tokens"]["splits"][split])


@dataclass(frozen=True, slots=True)
class Origin:
    """Tokens ``start:stop`` of a split: those of one document, with its number and origin, and their pages and text."""

    split: str
    start: int
    stop: int
    document: int
    file: str
    part: int
    place: str
    pages: tuple[str, ...]
    kind: str
    language: str
    facts: dict[str, str]
    text: str


def trace_tokens(corpus: Corpus, split: SplitName, start: int, stop: int) -> Iterator[Origin]:
    """Yields the origins of the tokens ``start:stop``, one per document; raises `UsageError` if out of range."""
    tokens = corpus.train if split == "train" else corpus.validation
    if not 0 <= start < stop <= tokens.num_tokens:
        raise UsageError(
            f"Tokens {start}:{stop} are not in the {split} split, which has {tokens.num_tokens:,} tokens. "
            f"Give a range A:B with 0 <= A < B <= {tokens.num_tokens}."
        )
    first = int(np.searchsorted(tokens.offsets, start, side="right")) - 1
    last = int(np.searchsorted(tokens.offsets, stop, side="left"))
    tokenizer = corpus.tokenizer()
    for number, document in zip(range(first, last), corpus.documents(split, first, last), strict=True):
        begin = max(start, int(tokens.offsets[number]))
        end = min(stop, int(tokens.offsets[number + 1]))
        before = len(tokenizer.decode(tokens.tokens(int(tokens.offsets[number]), begin).tolist()))
        text = tokenizer.decode(tokens.tokens(begin, end).tolist(), continues=before > 0)
        about = {name: getattr(document, name) for name in ("part", "place", "kind", "language")}
        about |= {"pages": _pages(document, before, before + len(text)), "facts": dict(document.facts)}
        yield Origin(split, begin, end, number, file=document.source, text=text, **about)


def _pages(document: Document, start: int, stop: int) -> tuple[str, ...]:
    """The names of the pages, slides or cells that overlap the characters ``start:stop``."""
    ends = [*(offset for offset, _ in document.marks[1:]), len(document.text)]
    return tuple(
        name
        for (offset, name), end in zip(document.marks, ends, strict=False)
        if offset < max(stop, start + 1) and end > start
    )
