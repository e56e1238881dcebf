"""The build: files become documents, documents a tokenizer and tokens, and all of it one corpus directory.

Everything streams: at no time does memory hold more than a few files and documents, and the set of content hashes
spills to disk. The result depends on the input, the configuration and the seed only; not on the number of workers.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from sheepop.core.console import Console
from sheepop.core.errors import DataError
from sheepop.core.files import atomic_directory, remove_tree, write_json
from sheepop.data.config import DataConfig
from sheepop.data.corpus import DOCUMENTS, QUARANTINE, TOKENIZER, TOKENS, Corpus
from sheepop.data.counts import Counts
from sheepop.data.discovery import FoundFile, Skipped, discover, input_labels, printable
from sheepop.data.documents import DocumentWriter, batched_by_size, read_documents, read_stored
from sheepop.data.duplicates import SeenContent
from sheepop.data.encoding import DocumentEncoder
from sheepop.data.manifest import CORPUS_FORMAT, FORMAT_VERSION, MANIFEST, is_corpus
from sheepop.data.reading import FileReader, ReadFile, reading_tasks
from sheepop.data.shards import FILE_PREFIX, TokenWriter, token_type
from sheepop.data.split import Census, Splitter
from sheepop.data.workers import ordered_map
from sheepop.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer, train_tokenizer

_SPOOL = "spool"
_FILE_LIST = "files.jsonl"
_ENCODE_BYTES = 2**20
_PACKAGES = ("sheepop", "tokenizers", "charset-normalizer", "pathspec", "zstandard")


def build_corpus(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    output: str | Path,
    *,
    seed: int,
    console: Console | None = None,
    overwrite: bool = False,
) -> Corpus:
    """Makes the corpus directory `output` from the files below ``config.paths``.

    `output` appears whole when everything is done, and not at all when anything fails. With `overwrite` a corpus
    that is already there is replaced. Raises `DataError` when there is nothing to read, when a split would be
    empty, or when `output` is in the way.
    """
    console = console or Console.silent()
    output = Path(output)
    _check_places(config, output, overwrite)
    with atomic_directory(output, replace=overwrite) as staging:
        build = _Build(config, tokenizer_config, seed, staging, console)
        build.run()
    return Corpus.open(output, verify=False)


def _check_places(config: DataConfig, output: Path, overwrite: bool) -> None:
    if not config.paths:
        raise DataError("There is no text to build a corpus from. Set data.paths to files or folders with text.")
    for path in config.paths:
        if is_corpus(path):
            raise DataError(
                f"{printable(path)} is a finished corpus already. Use it as it is, or give the text it was made of."
            )
    if output.is_dir() and not any(output.iterdir()):
        return
    if overwrite and output.exists() and not is_corpus(output):
        raise DataError(f"{output} is not a corpus, so it is not overwritten. Choose another output directory.")
    if not overwrite and output.exists():
        raise DataError(f"{output} already exists. Choose another output directory, or remove it first.")


class _Build:
    """One build in its staging directory; `run` is the order of the stages."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer_config: TokenizerConfig,
        seed: int,
        staging: Path,
        console: Console,
    ) -> None:
        self._config, self._tokenizer_config, self._seed = config, tokenizer_config, seed
        self._staging, self._console = staging, console
        self._documents = staging / DOCUMENTS
        self._counts = Counts()
        self._census = Census(seed)
        self._found_bytes = 0

    def run(self) -> None:
        given = self._given_tokenizer()
        self._documents.mkdir()
        self._discover()
        self._read()
        splitter = self._split()
        tokenizer = given or self._train_tokenizer()
        tokenizer.save(self._staging / TOKENIZER)
        tokens = self._tokenize(tokenizer)
        self._write_manifest(splitter, tokenizer, tokens)

    def _discover(self) -> None:
        """Lists the files to read in a temporary file, and the others in the quarantine."""
        config = self._config
        with self._open(_FILE_LIST) as found, self._open(QUARANTINE) as quarantine:
            for item in discover(config.paths, max_file_bytes=config.max_file_bytes, ignore=config.ignore):
                if isinstance(item, FoundFile):
                    self._counts.found += 1
                    self._found_bytes += item.size
                    # ASCII escapes keep names that are not UTF-8 as they are.
                    found.write(json.dumps([item.path, item.source, item.size]) + "\n")
                else:
                    self._counts.found += not item.is_directory
                    self._skip(item, quarantine)

    def _read(self) -> None:
        """Reads every listed file, drops duplicates, and spools the documents in the order of the input."""
        reader = FileReader(self._config.documents, self._config.max_file_bytes)
        tasks = reading_tasks(self._found_files())
        with (
            closing(ordered_map(reader, tasks, num_workers=self._config.num_workers)) as results,
            SeenContent(self._staging / "seen.sqlite") as seen,
            DocumentWriter(self._documents, _SPOOL, level=1) as spool,
            self._open(QUARANTINE, "a") as quarantine,
            self._console.progress("Reading files", self._found_bytes / 1e6, "MB") as progress,
        ):
            for result in (item for results_of_task in results for item in results_of_task):
                if isinstance(result, Skipped):
                    self._skip(result, quarantine)
                else:
                    self._keep_new(result, seen, spool)
                    progress.advance(result.file.size / 1e6)
        (self._staging / _FILE_LIST).unlink()
        if self._counts.kept == 0:
            raise DataError(self._nothing_to_read())

    def _keep_new(self, result: ReadFile, seen: SeenContent, spool: DocumentWriter) -> None:
        kept = 0
        for document in result.documents:
            if seen.add(document.id):
                kept += 1
                spool.write(document)
                self._census.add(document.id, document.num_bytes)
        self._counts.add_read(result, kept)

    def _split(self) -> Splitter:
        """Moves the spooled documents into the files of their splits."""
        splitter = Splitter(self._config.split, self._config.validation_fraction, self._census)
        total = self._census.num_bytes / 1e6
        with (
            DocumentWriter(self._documents, FILE_PREFIX["train"]) as train,
            DocumentWriter(self._documents, FILE_PREFIX["validation"]) as validation,
            self._console.progress("Writing documents", total, "MB") as progress,
        ):
            for name, document in splitter.assign(read_stored(self._documents, _SPOOL)):
                (train if name == "train" else validation).write(document)
                progress.advance(document.num_bytes / 1e6)
        for path in self._documents.glob(f"{_SPOOL}-*"):
            remove_tree(path)
        return splitter

    def _given_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the configuration names; it must have an ``<eos>`` to end documents with."""
        if self._tokenizer_config.path is None:
            return None
        tokenizer = load_tokenizer(self._tokenizer_config.path)
        _ = tokenizer.eos_id
        return tokenizer

    def _train_tokenizer(self) -> Tokenizer:
        """A tokenizer trained on the training documents only, so that the held-out text stays unseen."""
        texts = (document.text for document in read_documents(self._documents, FILE_PREFIX["train"]))
        return train_tokenizer(self._tokenizer_config, texts, console=self._console)

    def _tokenize(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Writes the token shards of both splits; returns their entry in the manifest."""
        directory = self._staging / TOKENS
        directory.mkdir()
        dtype = token_type(tokenizer.vocab_size)
        total = self._census.num_bytes / 1e6
        splits: dict[str, Any] = {}
        with self._console.progress("Tokenizing", total, "MB") as progress:
            for split, prefix in FILE_PREFIX.items():
                unknown, unknown_id = 0, tokenizer.special_id("unk")
                with TokenWriter(directory, prefix, dtype) as writer, closing(self._encoded(prefix)) as encoded:
                    for token_ids, num_bytes in encoded:
                        writer.write(token_ids, num_bytes)
                        unknown += 0 if unknown_id is None else int(np.count_nonzero(token_ids == unknown_id))
                        progress.advance(num_bytes / 1e6)
                splits[split] = {**writer.summary(), "unknown": unknown}
                if unknown:
                    self._console.warn(
                        f"{unknown:,} characters of the {split} split are not in the tokenizer's vocabulary and "
                        "became <unk>."
                    )
        return {"type": dtype.name, "splits": splits}

    def _encoded(self, prefix: str) -> Generator[tuple[NDArray[np.uint32], int], None, None]:
        tasks = batched_by_size(read_stored(self._documents, prefix), _ENCODE_BYTES)
        encoder = DocumentEncoder(str(self._staging / TOKENIZER))
        with closing(ordered_map(encoder, tasks, num_workers=self._config.num_workers)) as results:
            for result in results:
                yield from result

    def _write_manifest(self, splitter: Splitter, tokenizer: Tokenizer, tokens: dict[str, Any]) -> None:
        counts = self._counts.as_record()
        counts["documents"]["bytes"] = self._census.num_bytes
        in_splits = sum(split["documents"] for split in tokens["splits"].values())
        bytes_in_splits = sum(split["bytes"] for split in tokens["splits"].values())
        assert in_splits == self._counts.kept + splitter.cut_documents
        assert bytes_in_splits == self._census.num_bytes
        # Neither times nor absolute paths nor the number of workers: the same input gives the same manifest.
        kept_settings = {"documents", "split", "validation_fraction", "max_file_bytes", "ignore"}
        manifest = {
            "format": CORPUS_FORMAT,
            "format_version": FORMAT_VERSION,
            "inputs": input_labels([Path(path) for path in self._config.paths]),
            "config": {
                "data": self._config.model_dump(mode="json", include=kept_settings),
                "tokenizer": self._tokenizer_config.model_dump(mode="json", exclude={"path"}),
                "seed": self._seed,
            },
            **counts,
            "split": {"method": splitter.method, "words": splitter.words, "cut_documents": splitter.cut_documents},
            "tokenizer": {
                "fingerprint": tokenizer.fingerprint(),
                "vocab_size": tokenizer.vocab_size,
                "origin": "trained" if self._tokenizer_config.path is None else "given",
            },
            "tokens": tokens,
            "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        }
        write_json(self._staging / MANIFEST, manifest)
        train, validation = tokens["splits"]["train"], tokens["splits"]["validation"]
        self._console.info(
            f"Corpus: {self._counts.in_words()}. {self._counts.kept:,} documents kept, {self._counts.duplicates:,} "
            f"duplicates and {self._counts.empty:,} empty ones dropped. {train['tokens']:,} training and "
            f"{validation['tokens']:,} validation tokens. {splitter.words}"
        )

    def _found_files(self) -> Iterator[FoundFile]:
        with self._open(_FILE_LIST, "r") as file:
            for line in file:
                yield FoundFile(*json.loads(line))

    def _skip(self, skipped: Skipped, quarantine: TextIO) -> None:
        self._counts.add_skipped(skipped)
        quarantine.write(json.dumps(skipped.as_record(), ensure_ascii=False) + "\n")

    def _open(self, name: str, mode: str = "w") -> TextIO:
        return cast(TextIO, (self._staging / name).open(mode, encoding="utf-8", newline="\n"))

    def _nothing_to_read(self) -> str:
        places = ", ".join(printable(path) for path in self._config.paths)
        counts = self._counts
        dropped = f", {counts.empty:,} empty documents" if counts.empty else ""
        return (
            f"There is no text in {places}: {counts.in_words()}{dropped}. Give files or folders with text; files over "
            f"data.max_file_bytes ({self._config.max_file_bytes:,}) are skipped, and hidden or ignored files are read "
            "only when named themselves."
        )
