"""Builds a corpus directory: reads documents, cleans and shuffles them, trains a tokenizer, and writes token shards.

The build is a sequence of passes over parts of the input (see `sheepop.data.pipeline`); each task leaves its result on
disk. The corpus depends only on the input, the configuration and the seed, not on the engine, the number of workers,
or how often the build was stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sheepop.core.console import Console
from sheepop.core.errors import DataError, OutputError, SheepOpError, TokenizerError
from sheepop.core.facts import counted
from sheepop.core.files import atomic_directory, publish_directory, remove_tree, write_json
from sheepop.data.clean.decontamination import EvaluationFile, load_evaluation_sets
from sheepop.data.config import DataConfig
from sheepop.data.corpus import DOCUMENTS, QUARANTINE, REMOVED, TOKENIZER, TOKENS, Corpus
from sheepop.data.discovery import printable
from sheepop.data.encoding import SENTINELS, DocumentEncoder, Infilling, sentinel_ids
from sheepop.data.manifest import is_corpus
from sheepop.data.pipeline.engine import Engine, LocalEngine, run_pass
from sheepop.data.pipeline.parts import added_accounts, finished_parts, part_path
from sheepop.data.pipeline.passes import clean_documents, close_extraction, spans_of
from sheepop.data.pipeline.record import (
    BUILD,
    BuildRecord,
    BuildRequest,
    counts_of_files,
    left_out_in_words,
    nothing_to_read,
)
from sheepop.data.pipeline.shuffle import Assignment, Encode, Gather, Scatter, decide_assignment, place_split, texts_in
from sheepop.data.pipeline.workplace import (
    DISCOVERED,
    Inventory,
    Query,
    StageTimes,
    announce,
    clear,
    find_inputs,
    fingerprint_in,
    locked_workplace,
    take_inventory,
)
from sheepop.data.report import REPORT_HTML, write_failure, write_reports
from sheepop.data.shards import FILE_PREFIX, token_type
from sheepop.data.split import SPLITS, SplitName
from sheepop.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer, train_tokenizer
from sheepop.tokenizer.vocabulary import LittleTextError

_Files = dict[SplitName, list[int]]
"""The gathered buckets of each split."""


def build_corpus(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    output: str | Path,
    *,
    seed: int,
    console: Console | None = None,
    overwrite: bool = False,
    engine: Engine | None = None,
    query: Query | None = None,
    shrinks: bool = False,
    failed: Path | None = None,
) -> Corpus:
    """Builds the corpus directory `output` from ``config.paths`` and, if given, the rows of `query`.

    With `shrinks` a text that is too short for the vocabulary gets a smaller one, and a warning. A build that ends with
    an error of its text leaves its report and lists in the directory `failed`, if one is given.

    The same call resumes a build that was stopped. If `output` already is a corpus from the same input and settings,
    it is returned; `overwrite` replaces it; any other one raises `DataError`, as do inputs without text and a split
    that would be empty.
    """
    console, output = console or Console.silent(), Path(output)
    engine = engine or LocalEngine(config.num_workers)
    _check_places(config, output, query)
    with locked_workplace(output) as workplace:
        request = BuildRequest(config, tokenizer_config, seed, query, shrinks)
        build = _Build(request, workplace, console, engine, failed)
        try:
            inventory = build.take_inventory(output)
        finally:
            close_extraction()
        if not overwrite and output.exists() and any(output.iterdir()):
            clear(workplace)
            if fingerprint_in(output / BUILD) != inventory.fingerprint:
                raise DataError(
                    f"{output} already exists, but was built from different input, with different settings or by "
                    "another version. Replace it with --overwrite, or choose another output directory."
                )
            console.info(f"{output} is up to date: nothing in its input or settings has changed.")
        else:
            try:
                build.run(inventory)
            finally:
                engine.release()
                close_extraction()
            publish_directory(build.corpus, output)
            clear(workplace)
            if failed is not None:
                remove_tree(failed)
    return Corpus.open(output, verify=False)


def _check_places(config: DataConfig, output: Path, query: Query | None) -> None:
    if not config.paths and query is None:
        raise DataError("There is no text to build a corpus from. Set data.paths to files or folders with text.")
    for path in config.paths:
        if is_corpus(path):
            raise DataError(
                f"{printable(path)} is already a finished corpus. Use it as it is, or give the text it was built from."
            )
    is_empty = output.is_dir() and not any(output.iterdir())
    if output.exists() and not is_empty and not is_corpus(output):
        raise OutputError(f"{output} already exists and is not a corpus. Choose another output directory.")


@dataclass
class _Build:
    """One build in its workplace; `run` shows the order of the stages."""

    request: BuildRequest
    workplace: Path
    console: Console
    engine: Engine
    failed: Path | None
    given: Tokenizer | None = None

    def __post_init__(self) -> None:
        names = ("corpus", "scattered", "gathered", "encoded")
        self.corpus, self.scattered, self.gathered, self.encoded = map(self.workplace.joinpath, names)

    def take_inventory(self, output: Path) -> Inventory:
        """Lists the inputs; keeps the finished parts of a stopped build with the same inputs and removes others."""
        self.given = self._given_tokenizer()
        inputs = find_inputs(self.request.config, self.request.query, leave_out=(output, self.workplace))
        cut = partial(spans_of, self.workplace, self.request.config.extract)
        inventory, goes_on = take_inventory(self.workplace, inputs, self.request.settings(self.given), cut)
        if goes_on and any(self.workplace.glob("pass-*")):
            self.console.info(f"Resuming the build that was stopped in {self.workplace}.")
        return inventory

    def run(self, inventory: Inventory) -> None:
        """Runs every stage, up to the finished corpus directory in the workplace."""
        config, seed = self.request.config, self.request.seed
        times = StageTimes(self.workplace)
        announce(inventory, self.console)
        with times.stage("extract and clean"):
            passes = clean_documents(inventory, config, self.request.query, seed, self.engine, self.console)
        assignment = decide_assignment(finished_parts(passes[-1], len(inventory.parts)), config, seed)
        if assignment.splitter.documents == 0:
            words = nothing_to_read(config, inventory, added_accounts(_each_part(passes, inventory)))
            error = self._accounted(DataError(words), passes, inventory)
            clear(self.workplace)
            raise error
        try:
            with times.stage("shuffle"):
                files = self._shuffle(inventory, passes[-1], assignment)
        except DataError as problem:
            error = self._accounted(problem, passes, inventory)
            clear(self.workplace)  # the text cannot be split as requested, so no part can be reused
            raise error from None
        remove_tree(self.corpus)
        for name in (DOCUMENTS, TOKENS):
            (self.corpus / name).mkdir(parents=True)
        tokenizer = self.given
        if tokenizer is None:
            try:
                with times.stage("tokenizer"):
                    tokenizer = self._trained_tokenizer(files["train"])
            except TokenizerError as problem:
                raise self._accounted(problem, passes, inventory) from None
        tokenizer.save(self.corpus / TOKENIZER)
        with times.stage("tokenize"):
            tokens = self._tokenize(tokenizer, files, sum(assignment.buckets))
        self._write_lists(self.corpus, passes, [*passes, self.scattered], inventory)
        account = added_accounts(_each_part([*passes, self.scattered], inventory))
        contents = added_accounts(part_path(self.gathered, bucket) for split in SPLITS for bucket in files[split])
        files_of_sets = self._evaluation_files()
        record = BuildRecord(self.request, inventory, account, contents, assignment, tokenizer, tokens, files_of_sets)
        self._finish(record, times.seconds)

    def _shuffle(self, inventory: Inventory, cleaned: Path, assignment: Assignment) -> _Files:
        """Shuffles and splits the documents; returns the files of each split."""
        work, what, num_buckets = Scatter(cleaned, assignment), "Splitting and shuffling", sum(assignment.buckets)
        run_pass(self.engine, self.scattered, work, inventory.megabytes, self.console, what, is_light=True)
        gather = Gather(self.scattered, len(inventory.parts), num_buckets, self.request.seed)
        megabytes = [assignment.splitter.num_bytes / num_buckets / 1e6] * num_buckets
        run_pass(self.engine, self.gathered, gather, megabytes, self.console, "Writing documents", is_light=True)
        files: _Files = {split: [] for split in SPLITS}
        for bucket in range(num_buckets):
            if self._gathered(bucket)["documents"]:
                files["train" if bucket < assignment.buckets[0] else "validation"].append(bucket)
        return files

    def _gathered(self, bucket: int) -> dict[str, Any]:
        return added_accounts([part_path(self.gathered, bucket)])

    def _given_tokenizer(self) -> Tokenizer | None:
        """The configured tokenizer, if any; raises `TokenizerError` if it lacks a special token that is needed."""
        if self.request.tokenizer_config.path is None:
            return None
        tokenizer = load_tokenizer(self.request.tokenizer_config.path)
        for note in tokenizer.notes:
            self.console.info(note)
        _ = tokenizer.eos_id
        if self.request.config.extract.pair is not None:
            _ = tokenizer.bos_id
        if self.request.config.infilling.rate:
            sentinel_ids(tokenizer)
        return tokenizer

    def _trained_tokenizer(self, files: list[int]) -> Tokenizer:
        """A tokenizer trained on the training split only, so that held-out text stays unseen."""
        directory = self.workplace / TOKENIZER
        if not directory.is_dir():
            special_tokens = SENTINELS if self.request.config.infilling.rate else ()
            config, trained = self.request.tokenizer_config, None
            while trained is None:
                try:
                    texts = texts_in(self.gathered, files)
                    trained = train_tokenizer(config, texts, special_tokens=special_tokens, console=self.console)
                except LittleTextError as error:
                    if not self.request.shrinks:
                        raise
                    config = config.replace(vocab_size=error.possible)
            if config is not self.request.tokenizer_config:
                self.console.warn(
                    f"The vocabulary has {config.vocab_size:,} tokens instead of the usual "
                    f"{self.request.tokenizer_config.vocab_size:,}, because there is little text. "
                    "tokenizer.vocab_size sets another size."
                )
            with atomic_directory(directory) as staging:
                trained.save(staging)
        return load_tokenizer(directory)

    def _tokenize(self, tokenizer: Tokenizer, files: _Files, num_buckets: int) -> dict[str, Any]:
        """Writes documents and token shards of both splits; returns the manifest entry ``tokens``."""
        dtype, config = token_type(tokenizer.vocab_size), self.request.config.infilling
        infilling = Infilling(config, self.request.seed) if config.rate else None
        unknown_id = tokenizer.special_id("unk")
        if unknown_id == tokenizer.special_id("eos"):  # as in GPT-2, which knows every byte
            unknown_id = None
        encoder = DocumentEncoder(str(self.corpus / TOKENIZER), tokenizer.fingerprint(), infilling)
        encode = Encode(self.gathered, encoder, dtype.str, unknown_id)
        megabytes = [self._gathered(bucket)["bytes"] / 1e6 for bucket in range(num_buckets)]
        run_pass(self.engine, self.encoded, encode, megabytes, self.console, "Tokenizing", is_light=True)
        splits: dict[str, Any] = {}
        for split in SPLITS:
            splits[split] = place_split(self.gathered, self.encoded, files[split], self.corpus, FILE_PREFIX[split])
            if unknown := splits[split]["unknown"]:
                self.console.warn(
                    f"{unknown:,} {'characters' if tokenizer.algorithm == 'char' else 'words or characters'} of the "
                    f"{split} split are not in the tokenizer's vocabulary and became its unknown token."
                )
        return {"type": np.dtype(dtype).name, "splits": splits}

    def _finish(self, record: BuildRecord, seconds: dict[str, float]) -> None:
        manifest = record.write_manifest(self.corpus)
        write_json(self.corpus / BUILD, {"fingerprint": record.inventory.fingerprint, "seconds": seconds})
        words = record.in_words() + left_out_in_words(self.corpus / QUARANTINE)
        write_reports(self.corpus, manifest, record.report(), words, seconds)
        self.console.info(words)
        for limit in record.account["source"]["limits"]:
            self.console.warn(f"A limit was reached, so another build may differ: {limit}")

    def _evaluation_files(self) -> list[EvaluationFile]:
        """The counts of the evaluation sets; warns about texts that are too short to match."""
        clean = self.request.config.clean
        if "decontamination" not in clean.stages or not clean.decontamination.paths:
            return []
        files = load_evaluation_sets(clean.decontamination).files
        for file in files:
            if file.too_short:
                self.console.warn(
                    f"{counted(file.too_short, 'text')} of the evaluation set {file.path} with fewer than "
                    f"{clean.decontamination.min_words} words could not be looked for."
                )
        return files

    def _write_lists(self, directory: Path, passes: list[Path], removing: list[Path], inventory: Inventory) -> None:
        """Writes the lists of unusable inputs and of documents that were removed in `removing`, in input order."""
        with (directory / QUARANTINE).open("wb") as file:
            file.write((self.workplace / DISCOVERED).read_bytes())
            for part in _each_part(passes[:1], inventory):
                file.write((part / QUARANTINE).read_bytes())
        with (directory / REMOVED).open("wb") as file:
            # Concatenated zstd files are one valid zstd file.
            for part in _each_part(removing, inventory):
                file.write((part / REMOVED).read_bytes())

    def _accounted(self, error: SheepOpError, passes: list[Path], inventory: Inventory) -> SheepOpError:
        """`error`, with the place of the report and the lists of this build, which it writes, if there is one."""
        if self.failed is None:
            return error
        with atomic_directory(self.failed, replace=True) as directory:
            self._write_lists(directory, passes, passes, inventory)
            account = added_accounts(_each_part(passes, inventory))
            write_failure(directory, str(error), counts_of_files(inventory, account))
        error.args = (f"{error} {self.failed / REPORT_HTML} shows what was read and what was left out.",)
        return error


def _each_part(passes: list[Path], inventory: Inventory) -> list[Path]:
    return [part_path(directory, rank) for directory in passes for rank in range(len(inventory.parts))]
