"""What went into a build and what became of it, counted so that it adds up."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sheepop.data.discovery import Skipped
from sheepop.data.reading import ReadFile


@dataclass
class Counts:
    """Files found are read or skipped; documents in are kept, duplicates or empty. Folders are counted apart."""

    found: int = 0
    read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    folders_skipped: Counter[str] = field(default_factory=Counter)
    encodings: Counter[str] = field(default_factory=Counter)
    documents: int = 0
    duplicates: int = 0
    empty: int = 0
    kept: int = 0

    def add_skipped(self, skipped: Skipped) -> None:
        """Counts a file or folder that is left out."""
        (self.folders_skipped if skipped.is_directory else self.skipped)[skipped.reason] += 1

    def add_read(self, result: ReadFile, kept: int) -> None:
        """Counts a file that was read and of whose documents `kept` were new."""
        self.read += 1
        self.encodings[result.encoding] += 1
        self.documents += len(result.documents) + result.num_empty
        self.empty += result.num_empty
        self.kept += kept
        self.duplicates += len(result.documents) - kept

    def as_record(self) -> dict[str, Any]:
        """The entries ``files`` and ``documents`` of the manifest."""
        assert self.found == self.read + self.skipped.total()
        assert self.documents == self.kept + self.duplicates + self.empty
        return {
            "files": {
                "found": self.found,
                "read": self.read,
                "skipped": dict(sorted(self.skipped.items())),
                "folders_skipped": dict(sorted(self.folders_skipped.items())),
                "encodings": dict(sorted(self.encodings.items())),
            },
            "documents": {
                "in": self.documents,
                "kept": self.kept,
                "duplicates": self.duplicates,
                "empty": self.empty,
            },
        }

    def in_words(self) -> str:
        """Files found, read and skipped by reason, for an error or the console."""
        words = f"{self.found:,} files found, {self.read:,} read"
        for name, counter in (("files", self.skipped), ("folders", self.folders_skipped)):
            if counter:
                reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(counter.items()))
                words += f"; {name} skipped: {reasons}"
        return words
