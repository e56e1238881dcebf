"""The examples of a run, tokenised once and kept on disk, so that every session reads the same.

Of each split there are ``train-tokens.bin`` (int32, little endian), ``train-supervised.bin`` (a byte for each token,
1 where it is learnt) and ``train-ends.bin`` (int64, where every example ends); ``manifest.json`` has the counts and
the checksums of all of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sheepop.core.console import Console
from sheepop.core.errors import DataError, first_few
from sheepop.core.facts import counted
from sheepop.core.files import read_json, sha256_file, write_json
from sheepop.posttrain.config import LongExamples
from sheepop.posttrain.encoding import Example, ExampleEncoder
from sheepop.posttrain.rows import RowError, Supervised, read_rows

FORMAT, FORMAT_VERSION = "sheepop-examples", 1
TOKENS = "tokens"
"""The folder of a run's examples that holds them as tokens."""
_MANIFEST = "manifest.json"
_TYPES: dict[str, Any] = {"tokens": np.dtype("<i4"), "supervised": np.dtype("u1"), "ends": np.dtype("<i8")}
_FIRST_PROBLEMS = 5


class Learnt(NamedTuple):
    """An example as it is kept: its ids and where they are learnt, both of one length."""

    ids: NDArray[np.int32]
    supervised: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class ExampleSplit:
    """The examples of a split, read from a map of its files."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.uint8]
    ends: NDArray[np.int64]

    @property
    def num_examples(self) -> int:
        """How many examples there are."""
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        """The tokens of all examples."""
        return len(self.tokens)

    @cached_property
    def num_supervised(self) -> int:
        """How many of them are learnt."""
        return int(self.supervised.sum(dtype=np.int64))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The tokens of every example."""
        return np.diff(self.ends, prepend=0)

    def example(self, number: int) -> Learnt:
        """One example; raises IndexError where there is none of that number."""
        if not 0 <= number < self.num_examples:
            raise IndexError(f"example {number} of {self.num_examples}")
        begin, end = self.ends[number] - self.lengths[number], self.ends[number]
        return Learnt(self.tokens[begin:end], self.supervised[begin:end])


@dataclass(frozen=True, eq=False)
class ExampleStore:
    """The tokenised examples in a directory."""

    directory: Path
    manifest: dict[str, Any]
    train: ExampleSplit
    validation: ExampleSplit

    @classmethod
    def open(cls, directory: Path) -> ExampleStore:
        """Opens and verifies it; raises `DataError` naming the file that is missing, damaged or of a newer format."""
        found = _read_manifest(directory)
        splits = []
        for split in ("train", "validation"):
            arrays = {}
            for name, dtype in _TYPES.items():
                file = directory / f"{split}-{name}.bin"
                if not file.is_file() or sha256_file(file) != found["checksums"].get(file.name):
                    raise DataError(f"{file} is missing or damaged. Restore it, or start the run anew.")
                empty = file.stat().st_size == 0
                arrays[name] = np.zeros(0, dtype) if empty else np.memmap(file, dtype, mode="r")
            splits.append(ExampleSplit(**arrays))
        return cls(directory, found, *splits)

    @property
    def fingerprint(self) -> str:
        """A checksum of all tokens and of what is learnt of them."""
        return hashlib.sha256(repr(sorted(self.manifest["checksums"].items())).encode()).hexdigest()


def read_example_manifest(directory: Path) -> dict[str, Any]:
    """What is said of the examples in the folder of a run; raises `DataError` where that is missing or damaged."""
    return _read_manifest(directory / TOKENS)


def _read_manifest(directory: Path) -> dict[str, Any]:
    found = read_json(directory / _MANIFEST, DataError)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{directory / _MANIFEST} does not describe examples.")
    if found.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{directory} has format version {found.get('format_version')} of examples; this SheepOp reads "
            f"{FORMAT_VERSION}. Install a newer SheepOp."
        )
    return found


def build_examples(
    paths: Sequence[Path],
    directory: Path,
    encoder: ExampleEncoder,
    *,
    max_length: int,
    long_examples: LongExamples,
    validation_fraction: float,
    validation_paths: Sequence[Path] = (),
    console: Console,
) -> ExampleStore:
    """Reads, checks, tokenises and splits the examples of files into `directory`, which is made.

    All lines are checked before the first is tokenised. An example is held out by the hash of its tokens, so that
    equal ones are never on both sides. Raises `DataError` where lines cannot be learnt, counting all of them.
    """
    files = {"train": list(paths), "validation": list(validation_paths)}
    num_rows = {split: sum(1 for _ in read_rows(given, Supervised)) for split, given in files.items() if given}
    directory.mkdir()
    writer = _Writer(directory, encoder, max_length, long_examples, console)
    with writer.opened(), console.progress("Examples", sum(num_rows.values()), "examples") as progress:
        for split in num_rows:
            share = 0.0 if validation_paths else validation_fraction
            for row in read_rows(files[split], Supervised):
                writer.add(row, split, share)
                progress.advance()
    writer.finish(files, num_rows, asks_to_hold_out=validation_fraction > 0)
    return ExampleStore.open(directory)


class _Writer:
    """Writes examples one after the other, and counts them."""

    def __init__(
        self, directory: Path, encoder: ExampleEncoder, max_length: int, long_examples: LongExamples, console: Console
    ) -> None:
        self._directory, self._encoder, self._console = directory, encoder, console
        self._max_length, self._policy = max_length, long_examples
        self._counts: Counter[str] = Counter()
        self._problems: list[str] = []
        self._longest = 0
        self._totals = {"train": 0, "validation": 0}

    def opened(self) -> ExitStack:
        """The files, open until the stack is closed."""
        stack = ExitStack()
        self._files = {
            (split, name): stack.enter_context((self._directory / f"{split}-{name}.bin").open("wb"))
            for split in self._totals
            for name in _TYPES
        }
        return stack

    def add(self, row: Supervised, split: str, validation_fraction: float) -> None:
        """Writes the example of a row, unless it is too long or cannot be learnt."""
        try:
            example = self._encoder(row)
        except RowError as error:
            self._bad(row.place, str(error))
            return
        if len(example) > self._max_length:
            self._longest = max(self._longest, len(example))
            self._counts["long"] += 1
            if self._policy != "cut":
                return
            example = example.cut(self._max_length)
            if not any(example.supervised):
                self._bad(row.place, f"has no token to learn within the first {self._max_length:,}; leave it out")
                return
        if split == "train" and _is_held_out(example, validation_fraction):
            split = "validation"
        self._totals[split] += len(example)
        values = {"tokens": example.ids, "supervised": example.supervised, "ends": [self._totals[split]]}
        for name, value in values.items():
            self._files[split, name].write(np.asarray(value, dtype=_TYPES[name]).tobytes())
        self._counts[split] += 1
        self._counts["conversations"] += not isinstance(row.answer, str)

    def _bad(self, place: str, reason: str) -> None:
        self._counts["bad"] += 1
        if len(self._problems) < _FIRST_PROBLEMS:
            self._problems.append(f"{place}: {reason}")

    def finish(self, files: dict[str, list[Path]], num_rows: dict[str, int], *, asks_to_hold_out: bool) -> None:
        """Writes the manifest; raises `DataError` for what was refused."""
        counts = self._counts
        if counts["bad"]:
            raise DataError(
                f"{counted(counts['bad'], 'example')} of {sum(num_rows.values()):,} cannot be learnt. Mend or remove:\n"
                + "\n".join(self._problems)
            )
        if counts["long"] and self._policy == "refuse":
            raise DataError(
                f"{counted(counts['long'], 'example')} of {sum(num_rows.values()):,} have more than "
                f"{self._max_length:,} tokens; the longest has {self._longest:,}. Raise data.max_length if the model "
                "reads as many, or choose: tuning.long_examples=cut cuts their ends, leave_out leaves them out."
            )
        if not counts["train"]:
            raise DataError("No example is left to train on. Lower data.validation_fraction, or give more examples.")
        if asks_to_hold_out and not counts["validation"]:
            self._console.warn("There are so few examples that none is held out. Name some with --validation FILE.")
        left_out = counts["long"] if self._policy == "leave_out" else 0
        if counts["long"]:
            what = "left out" if left_out else "cut"
            self._console.warn(
                f"{counted(counts['long'], 'example')} of more than {self._max_length:,} tokens: {what} "
                f"(tuning.long_examples={self._policy})."
            )
        sources = [file for given in files.values() for file in given]
        write_json(
            self._directory / _MANIFEST,
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "inputs": {str(file): sha256_file(file) for file in sources},
                "examples": {
                    "read": sum(num_rows.values()),
                    "train": counts["train"],
                    "validation": counts["validation"],
                    "left_out": left_out,
                    "cut": counts["long"] - left_out,
                },
                "conversations": counts["conversations"],
                "tokens": self._totals,
                "max_length": self._max_length,
                "tokenizer": self._encoder.tokenizer.fingerprint(),
                "checksums": {file.name: sha256_file(file) for file in sorted(self._directory.glob("*.bin"))},
            },
        )


def _is_held_out(example: Example, fraction: float) -> bool:
    """Whether the hash of an example, a number below 1, is below `fraction`."""
    digest = hashlib.blake2b(np.asarray(example.ids, dtype="<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def first_examples(paths: Sequence[Path], encoder: ExampleEncoder, count: int) -> Iterator[tuple[str, Example]]:
    """The first examples of files with their places, to look at; raises `DataError` for one that cannot be learnt."""
    for number, row in enumerate(read_rows(paths, Supervised)):
        if number == count:
            return
        try:
            yield row.place, encoder(row)
        except RowError as error:
            raise DataError(first_few([f"{row.place}: {error}"], 1)) from None
