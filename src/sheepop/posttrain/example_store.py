"""The examples of a run, tokenised once and stored on disk, so that every session of the run reads the same.

Each split has the files ``train-tokens.bin`` (int32, little endian), ``train-supervised.bin`` (one byte per token, 1 if
it is learnt), ``train-ends.bin`` (int64, the end of every example), ``train-values.bin`` (float32, one value per group)
and ``train-fields.jsonl`` (the other keys of prompts' lines); ``manifest.json`` has their counts and checksums. A group
is one example, or the chosen and the rejected one of a pair.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from sheepop.core.console import Console
from sheepop.core.errors import DataError
from sheepop.core.facts import counted
from sheepop.core.files import read_json, sha256_file, write_json
from sheepop.data.record_files import file_of
from sheepop.posttrain.config import BadExamples, LongExamples
from sheepop.posttrain.encoding import Example, ExampleEncoder
from sheepop.posttrain.rows import FIRST_PROBLEMS, Row, RowError, Supervised, read_rows

FORMAT, FORMAT_VERSION = "sheepop-examples", 1
TOKENS = "tokens"
"""The name of the folder with a run's tokenised examples."""
_MANIFEST = "manifest.json"
_TYPES: dict[str, Any] = {
    "tokens": np.dtype("<i4"),
    "supervised": np.dtype("u1"),
    "ends": np.dtype("<i8"),
    "values": np.dtype("<f4"),
}
_FIELDS = "fields.jsonl"


class Learnt(NamedTuple):
    """A stored example: its token ids, and 1 for those that are learnt (both of one length)."""

    ids: NDArray[np.int32]
    supervised: NDArray[np.uint8]

    @property
    def prompt(self) -> NDArray[np.int32]:
        """The token ids before the first that is learnt."""
        return self.ids[: int(np.argmax(self.supervised))]


@dataclass(frozen=True, eq=False)
class ExampleSplit:
    """The memory-mapped examples of a split, in groups of `group_size`; `values` has one number per group."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.uint8]
    ends: NDArray[np.int64]
    values: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    fields_file: Path | None = None
    group_size: int = 1

    @property
    def num_examples(self) -> int:
        """The number of examples."""
        return len(self.ends)

    @property
    def num_groups(self) -> int:
        """The number of groups, one per line of the input."""
        return self.num_examples // self.group_size

    @cached_property
    def fields(self) -> list[Mapping[str, Any]]:
        """The other keys of each prompt's line."""
        assert self.fields_file is not None
        return [orjson.loads(line) for line in self.fields_file.read_bytes().splitlines()]

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all examples."""
        return len(self.tokens)

    @cached_property
    def num_supervised(self) -> int:
        """The number of learnt tokens."""
        return int(self.supervised.sum(dtype=np.int64))

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each example."""
        return np.diff(self.ends, prepend=0)

    def example(self, number: int) -> Learnt:
        """Returns one example; raises IndexError if there is none with that number."""
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
        """Opens and verifies a store; raises `DataError` naming the missing, damaged or newer file."""
        found = read_json(directory / _MANIFEST, DataError)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise DataError(f"{directory / _MANIFEST} does not describe examples.")
        if found.get("format_version") != FORMAT_VERSION:
            raise DataError(
                f"{directory} has format version {found.get('format_version')} of examples; this SheepOp reads "
                f"{FORMAT_VERSION}. Install a newer SheepOp."
            )
        splits = []
        for split in ("train", "validation"):
            arrays = {}
            for name in (*(f"{name}.bin" for name in _TYPES), _FIELDS):
                file = directory / f"{split}-{name}"
                if not file.is_file() or sha256_file(file) != found["checksums"].get(file.name):
                    raise DataError(f"{file} is missing or damaged. Restore it, or start a new run.")
            for name, dtype in _TYPES.items():
                file = directory / f"{split}-{name}.bin"
                arrays[name] = np.memmap(file, dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)
            fields = directory / f"{split}-{_FIELDS}"
            splits.append(ExampleSplit(**arrays, fields_file=fields, group_size=found["group_size"]))
        return cls(directory, found, *splits)

    @property
    def fingerprint(self) -> str:
        """A checksum of all files of the store."""
        return hashlib.sha256(repr(sorted(self.manifest["checksums"].items())).encode()).hexdigest()

    @property
    def files(self) -> tuple[list[str], NDArray[np.int64]]:
        """The files of the training examples in order, and the number of its file for each group."""
        found = self.manifest.get("files") or []
        return [name for name, _ in found], np.repeat(np.arange(len(found)), [count for _, count in found])

    @property
    def longest(self) -> int:
        """The tokens of the longest example of both splits."""
        return int(max(split.lengths.max(initial=1) for split in (self.train, self.validation)))


def build_examples(
    paths: Sequence[Path],
    directory: Path,
    encoder: ExampleEncoder,
    wanted: type[Row] = Supervised,
    *,
    max_length: int,
    long_examples: LongExamples,
    validation_fraction: float,
    validation_paths: Sequence[Path] = (),
    bad_examples: BadExamples = "refuse",
    columns: Mapping[str, str] = MappingProxyType({}),
    joins_turns: bool = False,
    console: Console,
) -> ExampleStore:
    """Reads, checks, tokenises and splits the examples of files into the new `directory`.

    All lines are checked before the first is tokenised. The hash of an example's tokens decides whether it is held out,
    so that equal examples are in the same split; with several answers to a prompt, the hash of the prompt decides.
    Raises `DataError` with the number of lines that cannot be learnt, unless `bad_examples` leaves them out. `columns`
    and `joins_turns` are those of `read_rows`.
    """
    files = {"train": list(paths), "validation": list(validation_paths)}
    num_rows, writer = Counter[str](), _Writer(directory, encoder, max_length, (long_examples, bad_examples), console)
    read = partial(read_rows, wanted=wanted, columns=columns, joins_turns=joins_turns)
    on_bad = None if bad_examples == "refuse" else writer.bad
    with console.progress("Checking", None, "examples") as progress:
        for split, given in files.items():
            for _ in read(given, on_bad=on_bad, changed=writer.changed) if given else ():
                num_rows[split] += 1
                progress.advance()
    directory.mkdir()
    with writer.opened(), console.progress("Examples", sum(num_rows.values()), "examples") as progress:
        for split in num_rows:
            for row in read(files[split], on_bad=on_bad and (lambda _: None)):
                writer.add(row, split, 0.0 if validation_paths else validation_fraction)
                progress.advance()
    writer.finish(files, num_rows, asks_to_hold_out=validation_fraction > 0)
    return ExampleStore.open(directory)


class _Writer:
    """Writes examples to the files of a store and counts them."""

    def __init__(
        self,
        directory: Path,
        encoder: ExampleEncoder,
        max_length: int,
        policies: tuple[LongExamples, BadExamples],
        console: Console,
    ) -> None:
        self._directory, self._encoder, self._console = directory, encoder, console
        self._max_length, (self._policy, self._policy_for_bad) = max_length, policies
        self._counts, self.changed = Counter[str](), Counter[str]()
        self._of_files: list[list[Any]] = []  # each with its number of groups to train on
        self._problems: list[str] = []
        self.longest, self._group_size = 0, 1
        self._totals = {"train": 0, "validation": 0}

    def opened(self) -> ExitStack:
        """Opens the files; the returned stack closes them."""
        stack = ExitStack()
        names = (*(f"{name}.bin" for name in _TYPES), _FIELDS)
        self._files = {
            (split, name.partition(".")[0]): stack.enter_context((self._directory / f"{split}-{name}").open("wb"))
            for split in self._totals
            for name in names
        }
        return stack

    def add(self, row: Row, split: str, validation_fraction: float) -> None:
        """Writes the examples of a row, or counts the row if it is too long or cannot be learnt."""
        try:
            groups = self._encoder(row)
        except RowError as error:
            self.bad(f"{row.place}: {error}")
            return
        longest = max(len(example) for group in groups for example in group.examples)
        self.longest = max(self.longest, longest)
        if longest > self._max_length:
            self._counts["long"] += 1
            if self._policy != "cut":
                return
            groups = tuple(group.cut(self._max_length) for group in groups)
            if not all(any(example.supervised) for group in groups for example in group.examples):
                self.bad(f"{row.place}: has no token to learn within the first {self._max_length:,}; leave it out")
                return
        if split == "train" and _is_held_out(_identity(row, groups[0].examples), validation_fraction):
            split = "validation"
        for group in groups:
            for example in group.examples:
                self._totals[split] += len(example)
                self._write(split, tokens=example.ids, supervised=example.supervised, ends=[self._totals[split]])
            self._write(split, values=[group.value])
            if group.fields is not None:
                self._files[split, "fields"].write(orjson.dumps(group.fields) + b"\n")
        self._counts[split] += 1
        if split == "train":
            file = file_of(row.place)
            if not self._of_files or self._of_files[-1][0] != file:
                self._of_files.append([file, 0])
            self._of_files[-1][1] += len(groups)
        self._counts["conversations"] += not isinstance(row.answer if isinstance(row, Supervised) else row.prompt, str)
        self._group_size = len(groups[0].examples)

    def _write(self, split: str, **arrays: Sequence[float]) -> None:
        for name, values in arrays.items():
            self._files[split, name].write(np.asarray(values, dtype=_TYPES[name]).tobytes())

    def bad(self, problem: str) -> None:
        """Counts an example that cannot be learnt."""
        self._counts["bad"] += 1
        if len(self._problems) < FIRST_PROBLEMS:
            self._problems.append(problem)

    def finish(self, files: dict[str, list[Path]], num_rows: dict[str, int], *, asks_to_hold_out: bool) -> None:
        """Writes the manifest; raises `DataError` if rows were refused or none is left."""
        counts = self._counts
        if counts["bad"] and self._policy_for_bad == "refuse":
            raise DataError(
                f"{counted(counts['bad'], 'example')} of {sum(num_rows.values()):,} cannot be learnt. Fix or remove "
                "them, or leave them out with tuning.bad_examples=leave_out:\n" + "\n".join(self._problems)
            )
        if counts["bad"]:
            self._console.warn(
                f"{counted(counts['bad'], 'example')} cannot be learnt and were left out "
                f"(tuning.bad_examples=leave_out), first: {self._problems[0]}"
            )
        if counts["long"] and self._policy == "refuse":
            raise DataError(
                f"{counted(counts['long'], 'example')} of {sum(num_rows.values()):,} have more than "
                f"{self._max_length:,} tokens; the longest has {self.longest:,}. Raise data.max_length if the "
                "model's context allows it, or choose: tuning.long_examples=cut cuts their ends, leave_out leaves them "
                "out."
            )
        if not counts["train"]:
            raise DataError("No example is left to train on. Lower data.validation_fraction, or give more examples.")
        if asks_to_hold_out and not counts["validation"]:
            self._console.warn("With so few examples none is held out. Give some with --validation FILE.")
        left_out = counts["long"] if self._policy == "leave_out" else 0
        if counts["long"]:
            what = "left out" if left_out else "cut"
            self._console.warn(
                f"{counted(counts['long'], 'example')} of more than {self._max_length:,} tokens: {what} "
                f"(tuning.long_examples={self._policy})."
            )
        changed = {how: count for how, count in self.changed.items() if count}
        for how, count in changed.items():
            self._console.info(f"{how} in {counted(count, 'conversation')}.")
        self._encoder.tell(self._console)
        write_json(
            self._directory / _MANIFEST,
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "inputs": {str(file): sha256_file(file) for given in files.values() for file in given},
                "examples": {
                    "read": counts["train"] + counts["validation"] + left_out + counts["bad"],
                    "train": counts["train"],
                    "validation": counts["validation"],
                    "left_out": left_out,
                    "bad": counts["bad"],
                    "cut": counts["long"] - left_out,
                },
                "problems": self._problems,
                "changed": changed,
                "files": self._of_files,
                "conversations": counts["conversations"],
                "longest": self.longest,
                "end_ids": self._encoder.end_ids,
                "group_size": self._group_size,
                "tokens": self._totals,
                "max_length": self._max_length,
                "tokenizer": self._encoder.tokenizer.fingerprint(),
                "checksums": {
                    file.name: sha256_file(file)
                    for pattern in ("*.bin", f"*-{_FIELDS}")
                    for file in sorted(self._directory.glob(pattern))
                },
            },
        )


def _identity(row: Row, examples: Sequence[Example]) -> list[int]:
    """The tokens that decide whether a row is held out: all of a supervised example, else those of the prompt."""
    first = examples[0]
    has_answer = not isinstance(row, Supervised) and any(first.supervised)
    return first.ids[: first.supervised.index(True)] if has_answer else first.ids


def _is_held_out(ids: list[int], fraction: float) -> bool:
    """Whether the hash of `ids`, as a number from 0 to 1, is below `fraction`."""
    digest = hashlib.blake2b(np.asarray(ids, dtype="<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64
