"""A sample of a large text, so that a plan need not read all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from sheepop.core.files import link_or_copy
from sheepop.core.random import numpy_generator
from sheepop.data import is_corpus

MOST_BYTES = 16_000_000
# Formats of lines, whose beginning is a file of the same kind.
_LINES = {".txt", ".md", ".jsonl", ".csv", ".tsv", ".log", ".py"}


def sampled(paths: Sequence[str], place: Path, most: int = MOST_BYTES) -> tuple[list[str], float]:
    """Returns paths with about `most` bytes of the files at `paths`, in the directory `place`, and their share.

    A text with fewer bytes, a corpus directory and an address are returned as they are, with the share 1. Files are
    drawn at random; of a file of lines that is longer than a quarter of `most`, the sample has the first lines.
    """
    if any("://" in path or is_corpus(path) for path in paths):
        return list(paths), 1.0
    files = [(number, file) for number, path in enumerate(paths) for file in _files(Path(path))]
    sizes = [file.stat().st_size for _, file in files]
    if sum(sizes) <= most:
        return list(paths), 1.0
    taken, share_of_file = 0, most // 4
    for index in numpy_generator(0, "sample of a text").permutation(len(files)).tolist():
        (number, file), size = files[index], sizes[index]
        if taken >= most:
            break
        root = Path(paths[number])
        target = place / str(number) / (file.relative_to(root) if root.is_dir() else file.name)
        if size > share_of_file and file.suffix.lower() in _LINES:
            target.parent.mkdir(parents=True, exist_ok=True)
            taken += _copy_lines(file, target, share_of_file)
        elif size <= most or not taken:
            target.parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(file, target)
            taken += size
    return [str(folder) for folder in sorted(place.iterdir())], taken / sum(sizes)


def _files(path: Path) -> Iterator[Path]:
    """Yields the files at or below `path` that are not hidden."""
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if not name.startswith(".") and file.is_file() and not file.is_symlink():
                yield file


def _copy_lines(source: Path, target: Path, most: int) -> int:
    """Copies whole lines from the beginning of `source`, about `most` bytes; returns how many bytes."""
    with source.open("rb") as reader, target.open("wb") as writer:
        for line in reader:
            if writer.tell() + len(line) > most and writer.tell():
                break
            writer.write(line)
        return writer.tell()


def directory_bytes(place: Path) -> int:
    """The bytes of all files below a directory."""
    return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
