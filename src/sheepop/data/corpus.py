"""A corpus directory, opened: documents, token splits, the tokenizer, the manifest that ties them together.

And from a position in the tokens back to the document, the file, and the page it came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

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
    """A finished corpus; open one with `Corpus.open`. Tokens and documents are read when needed."""

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
        """Opens a corpus directory; with `verify` every file is read and compared with its checksum.

        Raises `DataError` for what is no corpus, is damaged (naming the files), or was written by a newer SheepOp.
        """
        directory = Path(directory)
        manifest = read_manifest(directory)
        problems = damaged_files(directory) if verify else []
        if problems:
            raise DataError(f"The corpus in {directory} is damaged. Build it again.\n" + "\n".join(problems))
        return cls(directory, manifest)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the content of all token files and the tokenizer: equal for equal training data."""
        hashes = {
            name: [file["sha256"] for file in (summary["index"], *summary["shards"])]
            for name, summary in ((name, self._summary(name)) for name in SPLITS)
        }
        content = {"tokenizer": self._tokenizer_fingerprint, "splits": hashes}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode("utf-8")).hexdigest()

    @property
    def holds_pairs(self) -> bool:
        """Whether its documents are pairs of source and target."""
        return self.manifest["config"]["data"].get("extract", {}).get("pair") is not None

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the tokens belong to."""
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
        """Documents ``first .. last - 1`` of a split, in the order of its tokens; files before them are not read."""
        directory, passed = self.directory / DOCUMENTS, 0
        paths = sorted(directory.glob(f"{FILE_PREFIX[split]}-*.jsonl.zst"))
        counts = {file["file"]: file["documents"] for file in self._summary(split).get("files", ())}
        while paths and passed + counts.get(paths[0].name, first + 1) <= first:  # format 1 says nothing of its files
            passed += counts[paths.pop(0).name]
        documents = chain.from_iterable(map(read_documents_file, paths))
        return islice(documents, first - passed, None if last is None else last - passed)

    @property
    def licenses(self) -> dict[str, int]:
        """The licences that the origins of training documents state, and how many state each."""
        return dict(self._summary("train").get("licenses", {}))

    def sources(self, split: SplitName) -> DocumentSources:
        """The file that every document of a split comes from; an older corpus is read through for it."""
        entry = self._summary(split).get("sources")
        if entry is None:
            return DocumentSources.of_names(document.source for document in self.documents(split))
        tokens = self.train if split == "train" else self.validation
        return DocumentSources.read(self.directory / TOKENS, entry, tokens.num_documents)

    def _summary(self, split: str) -> Mapping[str, Any]:
        summary: Mapping[str, Any] = self.manifest["tokens"]["splits"][split]
        return summary


@dataclass(frozen=True, slots=True)
class Origin:
    """Tokens ``start:stop`` of a split that belong to one document.

    `document` is the document's number in the split; `file`, `part` and `place` say where it came from, `pages` which
    of its pages, slides or cells the tokens stand on, and `text` is what they say.
    """

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
    """The origin of the tokens ``start:stop`` of a split, one for each document they touch, in order.

    Raises `UsageError` when the range does not lie in the split.
    """
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
        yield Origin(
            split=split,
            start=begin,
            stop=end,
            document=number,
            file=document.source,
            part=document.part,
            place=document.place,
            pages=_pages(document, before, before + len(text)),
            kind=document.kind,
            language=document.language,
            facts=dict(document.facts),
            text=text,
        )


def _pages(document: Document, start: int, stop: int) -> tuple[str, ...]:
    """The marks in force between two offsets in characters."""
    ends = [*(offset for offset, _ in document.marks[1:]), len(document.text)]
    return tuple(
        name
        for (offset, name), end in zip(document.marks, ends, strict=False)
        if offset < max(stop, start + 1) and end > start
    )
