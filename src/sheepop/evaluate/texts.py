"""Texts to predict: files, folders, JSON lines, and the held-out documents of corpora."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sheepop.core.errors import DataError
from sheepop.core.json_lines import json_rows
from sheepop.data import Corpus, is_corpus
from sheepop.evaluate.perplexity import Text


@dataclass(frozen=True)
class Held:
    """Texts to predict: their number, and a function that reads them from the beginning."""

    count: int
    read: Callable[[], Iterator[Text]]

    @classmethod
    def of(cls, corpus: Corpus) -> Held:
        """The held-out documents of a corpus."""
        return cls(corpus.validation.num_documents, lambda: _of_corpus(corpus))

    def sample(self, limit: int | None) -> Held:
        """About `limit` of the texts, evenly spaced."""
        if limit is None or limit >= self.count:
            return self
        chosen = set(np.linspace(0, self.count - 1, limit).round().astype(int).tolist())
        return Held(len(chosen), lambda: (text for place, text in enumerate(self.read()) if place in chosen))


def held_texts(paths: Sequence[Path]) -> Held:
    """The texts of files and folders, the field ``text`` of JSON lines, and the held-out documents of corpora.

    Raises `DataError` for a path that does not exist and for a file that is not UTF-8 text.
    """
    files = [(path, file) for path in paths for file in _files(path)]
    counts = [_count(file) for _, file in files]

    def read() -> Iterator[Text]:
        return (text for path, file in files for text in _texts(path, file))

    return Held(sum(counts), read)


def _of_corpus(corpus: Corpus) -> Iterator[Text]:
    for number, document in enumerate(corpus.documents("validation")):
        yield Text(f"{number}:{document.source}", document.text, _folder(document.source))


def _files(path: Path) -> list[Path]:
    if is_corpus(path) or path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist. Give a file, a folder or a corpus to predict.")
    found = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    if not found:
        raise DataError(f"{path} has no files.")
    return found


def _count(file: Path) -> int:
    if is_corpus(file):
        return Corpus.open(file, verify=False).validation.num_documents
    return sum(1 for _ in json_rows(file)) if file.suffix == ".jsonl" else 1


def _texts(path: Path, file: Path) -> Iterator[Text]:
    if is_corpus(file):
        yield from _of_corpus(Corpus.open(file, verify=False))
        return
    name = file.name if file == path else str(file.relative_to(path))
    if file.suffix != ".jsonl":
        yield Text(name, _decoded(file), _folder(name))
        return
    for number, row in json_rows(file):
        text = row.get("text")
        if not isinstance(text, str):
            raise DataError(f'{file}, line {number}: "text" must be a text, not {text!r}.')
        yield Text(f"{name}:{row.get('id', number)}", text, name)


def _decoded(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(
            f"{file} is not UTF-8 text. Convert other files to text with: sheepop data build {file} --output CORPUS"
        ) from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {(error.strerror or '').lower()}.") from None


def _folder(source: str) -> str:
    """The group of a text in the report: the first folder of its name, or else its file extension."""
    parts = Path(source).parts
    return parts[0] if len(parts) > 1 else Path(source).suffix or source
