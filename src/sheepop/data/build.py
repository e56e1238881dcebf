"""The build: inputs become documents, documents a tokenizer and tokens, and all of it one corpus directory.

Everything streams through passes over parts of the input (see `sheepop.data.pipeline`), each task of which leaves its
result on disk. The result depends on the input, the configuration and the seed only; not on the engine, the number
of workers, or how often the build was stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sheepop.core.console import Console
from sheepop.core.errors import DataError, OutputError
from sheepop.core.facts import counted
from sheepop.core.files import atomic_directory, publish_directory, remove_tree, write_json
from sheepop.data.clean.decontamination import EvaluationFile, load_evaluation_sets
from sheepop.data.config import DataConfig
from sheepop.data.corpus import DOCUMENTS, QUARANTINE, REMOVED, TOKENIZER, TOKENS, Corpus
from sheepop.data.discovery import printable
from sheepop.data.encoding import SENTINELS, DocumentEncoder, Infilling, sentinel_ids
from sheepop.data.extract.pair import KIND
from sheepop.data.manifest import is_corpus
from sheepop.data.mixing import Mixture
from sheepop.data.pipeline.account import Account
from sheepop.data.pipeline.assignment import SPLITS, Assignment, decide_assignment
from sheepop.data.pipeline.contents import Contents
from sheepop.data.pipeline.engine import Engine, LocalEngine, run_pass
from sheepop.data.pipeline.inventory import Plan, Query
from sheepop.data.pipeline.parts import FinishedPart, part_path
from sheepop.data.pipeline.passes import Cleaned, clean_documents
from sheepop.data.pipeline.record import BUILD, BuildRecord, built_fingerprint, plan_settings
from sheepop.data.pipeline.removals import kept_masks
from sheepop.data.pipeline.shuffle import Gather, Scatter
from sheepop.data.pipeline.source import SourceSettings, close_extraction
from sheepop.data.pipeline.tokens import Encode, documents_in, place_documents, place_tokens
from sheepop.data.pipeline.workplace import (
    DISCOVERED,
    Found,
    StageTimes,
    announce,
    clear,
    find_inputs,
    locked_workplace,
    take_inventory,
)
from sheepop.data.report import write_reports
from sheepop.data.shards import FILE_PREFIX, token_type
from sheepop.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer, train_tokenizer


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
) -> Corpus:
    """Makes the corpus directory `output` from what ``config.paths`` name, and from the rows of `query` if given.

    `output` appears whole when everything is done. A build that is stopped leaves its finished parts in a hidden
    directory beside `output`, and the same call goes on with them. A corpus already at `output` is returned when it
    was made of the same input by the same settings, replaced with `overwrite`, and in the way otherwise. Raises
    `DataError` when there is nothing to read or when a split would be empty.
    """
    console, output = console or Console.silent(), Path(output)
    engine = engine or LocalEngine(config.num_workers)
    _check_places(config, output, query)
    with locked_workplace(output) as workplace:
        build = _Build(config, tokenizer_config, seed, workplace, console, engine, query)
        plan = build.plan(output)
        if not overwrite and output.exists() and any(output.iterdir()):
            clear(workplace)
            if built_fingerprint(output) != plan.fingerprint:
                raise DataError(
                    f"{output} already exists, but was built from different input, with different settings or by "
                    "another version. Replace it with --overwrite, or choose another output directory."
                )
            console.info(f"{output} is up to date: nothing in its input or settings has changed.")
        else:
            try:
                build.run(plan)
            finally:
                engine.release()
                close_extraction()
            publish_directory(build.corpus, output)
            clear(workplace)
    return Corpus.open(output, verify=False)


def _check_places(config: DataConfig, output: Path, query: Query | None) -> None:
    if not config.paths and query is None:
        raise DataError("There is no text to build a corpus from. Set data.paths to files or folders with text.")
    for path in config.paths:
        if is_corpus(path):
            raise DataError(
                f"{printable(path)} is already a finished corpus. Use it as it is, or give the text it was built from."
            )
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists() and not is_corpus(output):
        raise OutputError(f"{output} already exists and is not a corpus. Choose another output directory.")


class _Build:
    """One build in its workplace; `run` is the order of the stages."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer_config: TokenizerConfig,
        seed: int,
        workplace: Path,
        console: Console,
        engine: Engine,
        query: Query | None,
    ) -> None:
        self._config, self._tokenizer_config, self._seed = config, tokenizer_config, seed
        self._workplace, self._console, self._engine, self._query = workplace, console, engine, query
        self._found = Found()
        self._mixture = Mixture(config.mix)
        self._account = Account(config.clean.stages)
        self.corpus = workplace / "corpus"

    def plan(self, output: Path) -> Plan:
        """What there is to do; finished parts of a stopped build with the same plan stay, others are removed."""
        self._given = self._given_tokenizer()
        settings = plan_settings(self._config, self._tokenizer_config, self._given, self._seed, self._query)
        inputs = find_inputs(self._config, self._query, leave_out=(output, self._workplace))
        plan, goes_on = take_inventory(self._workplace, inputs, settings, self._found)
        if goes_on and any(self._workplace.glob("pass-*")):
            self._console.info(f"Resuming the build that was stopped in {self._workplace}.")
        return plan

    def run(self, plan: Plan) -> None:
        """Every stage, from the plan to the finished directory in the workplace."""
        self._times = StageTimes(self._workplace)
        announce(plan, self._found, self._engine.num_workers, self._workplace, self._console)
        cleaned = self._timed("extract and clean", self._clean, plan)
        assignment = self._assign(cleaned)
        if assignment.census.documents == 0:
            clear(self._workplace)
            raise DataError(self._nothing_to_read())
        try:
            files, splits = self._timed("shuffle", self._shuffle, plan, cleaned, assignment)
        except DataError:
            clear(self._workplace)  # the text cannot be split as it was asked for: nothing here is worth keeping
            raise
        remove_tree(self.corpus)
        for name in (DOCUMENTS, TOKENS):
            (self.corpus / name).mkdir(parents=True)
        tokenizer = self._given or self._timed("tokenizer", self._trained_tokenizer, files["train"])
        tokenizer.save(self.corpus / TOKENIZER)
        tokens = self._timed("tokenize", self._tokenize, tokenizer, files)
        self._finish(plan, cleaned, assignment, files, splits, tokenizer, tokens)

    def _clean(self, plan: Plan) -> Cleaned:
        source = SourceSettings(self._config.extract, self._config.documents, self._query)
        return clean_documents(plan, self._config, source, self._seed, self._engine, self._account, self._console)

    def _assign(self, cleaned: Cleaned) -> Assignment:
        return decide_assignment(
            cleaned.parts,
            list(kept_masks(cleaned.parts, cleaned.removals)),
            self._mixture,
            mode=self._config.split,
            fraction=self._config.validation_fraction,
            shuffle=self._config.clean.shuffle,
            seed=self._seed,
        )

    def _shuffle(
        self, plan: Plan, cleaned: Cleaned, assignment: Assignment
    ) -> tuple[dict[str, list[int]], dict[str, Any]]:
        """Puts the documents in their order; returns the files that each split consists of, and what was counted."""
        scattered, gathered = self._workplace / "scattered", self._workplace / "gathered"
        sizes = [max(part.size, 1) / 1e6 for part in plan.parts]
        scatter = Scatter(cleaned.directory, cleaned.removals, assignment, self._seed)
        run_pass(self._engine, scattered, scatter, sizes, self._console, "Splitting and shuffling", is_light=True)
        accounts = [FinishedPart(part_path(scattered, rank)).account() for rank in range(len(sizes))]
        for account in accounts:
            self._account.add(account)
        num_buckets = sum(assignment.buckets)
        gather = Gather(scattered, len(sizes), num_buckets, self._seed)
        megabytes = [assignment.census.num_bytes / num_buckets / 1e6] * num_buckets
        run_pass(self._engine, gathered, gather, megabytes, self._console, "Writing documents", is_light=True)
        filled = [b for b in range(num_buckets) if FinishedPart(part_path(gathered, b)).account()["documents"]]
        first = assignment.buckets[0]
        files = {"train": [b for b in filled if b < first], "validation": [b for b in filled if b >= first]}
        return files, _joined(accounts)

    def _given_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that the configuration names; it must have an ``<eos>``, and a ``<bos>`` for pairs."""
        if self._tokenizer_config.path is None:
            return None
        tokenizer = load_tokenizer(self._tokenizer_config.path)
        _ = tokenizer.eos_id
        if self._config.extract.pair is not None:
            _ = tokenizer.bos_id
        if self._config.infilling.rate:
            sentinel_ids(tokenizer)
        return tokenizer

    def _trained_tokenizer(self, files: list[int]) -> Tokenizer:
        """A tokenizer trained on the training documents only, so that the held-out text stays unseen."""
        directory = self._workplace / TOKENIZER
        if not directory.is_dir():
            texts = documents_in(self._workplace / "gathered", files)
            with atomic_directory(directory) as staging:
                self._train(texts).save(staging)
        return load_tokenizer(directory)

    def _train(self, texts: Iterator[str]) -> Tokenizer:
        special_tokens = SENTINELS if self._config.infilling.rate else ()
        return train_tokenizer(self._tokenizer_config, texts, special_tokens=special_tokens, console=self._console)

    def _tokenize(self, tokenizer: Tokenizer, files: dict[str, list[int]]) -> dict[str, Any]:
        """Writes documents and token shards of both splits; returns the entry of the tokens in the manifest."""
        gathered, encoded = self._workplace / "gathered", self._workplace / "encoded"
        buckets = (*files["train"], *files["validation"])
        dtype = token_type(tokenizer.vocab_size)
        infilling = Infilling(self._config.infilling, self._seed) if self._config.infilling.rate else None
        encoder = DocumentEncoder(str(self.corpus / TOKENIZER), infilling)
        unknown_id = tokenizer.special_id("unk")
        if unknown_id == tokenizer.special_id("eos"):  # as in GPT-2, which leaves nothing unknown
            unknown_id = None
        encode = Encode(gathered, buckets, encoder, dtype.str, unknown_id)
        megabytes = [FinishedPart(part_path(gathered, b)).account()["bytes"] / 1e6 for b in buckets]
        run_pass(self._engine, encoded, encode, megabytes, self._console, "Tokenizing", is_light=True)
        splits: dict[str, Any] = {}
        first = 0
        for split in SPLITS:
            prefix, ranks = FILE_PREFIX[split], range(first, first + len(files[split]))
            splits[split] = place_tokens(encoded, ranks, self.corpus / TOKENS, prefix)
            splits[split]["files"] = place_documents(gathered, files[split], self.corpus / DOCUMENTS, prefix)
            first += len(files[split])
            if unknown := splits[split]["unknown"]:
                self._console.warn(
                    f"{unknown:,} {'characters' if tokenizer.algorithm == 'char' else 'words or characters'} of the "
                    f"{split} split are not in the tokenizer's vocabulary and became its unknown token."
                )
        return {"type": np.dtype(dtype).name, "splits": splits}

    def _finish(
        self,
        plan: Plan,
        cleaned: Cleaned,
        assignment: Assignment,
        files: dict[str, list[int]],
        splits: dict[str, Any],
        tokenizer: Tokenizer,
        tokens: dict[str, Any],
    ) -> None:
        contents = Contents(self._seed)
        for bucket in (*files["train"], *files["validation"]):
            contents.merge(FinishedPart(part_path(self._workplace / "gathered", bucket)).account())
        self._write_lists(cleaned, len(plan.parts))
        record = BuildRecord(
            self._config,
            self._tokenizer_config,
            self._seed,
            self._found,
            self._account,
            assignment,
            splits,
            contents,
            tokenizer,
            tokens,
            self._query,
            self._evaluation_files(),
        )
        manifest = record.write_manifest(self.corpus)
        seconds = self._times.seconds
        write_json(self.corpus / BUILD, {"fingerprint": plan.fingerprint, "seconds": seconds})
        words = record.in_words()
        write_reports(self.corpus, manifest, record.report(), words, seconds)
        self._console.info(words)
        for limit in self._account.source.limits:
            self._console.warn(f"A limit was reached, so another build may differ: {limit}")

    def _evaluation_files(self) -> list[EvaluationFile]:
        """What was read of the evaluation sets; texts too short to be looked for are spoken of."""
        clean = self._config.clean
        if "decontamination" not in clean.stages or not clean.decontamination.paths:
            return []
        files = load_evaluation_sets(clean.decontamination).files
        for file in files:
            if file.too_short:
                self._console.warn(
                    f"{counted(file.too_short, 'text')} of the evaluation set {file.path} with fewer than "
                    f"{clean.decontamination.min_words} words could not be looked for."
                )
        return files

    def _write_lists(self, cleaned: Cleaned, num_parts: int) -> None:
        """The inputs that could not be used and the documents that were removed, in the order of the input."""
        first = [FinishedPart(part_path(self._workplace / "pass-0", rank)) for rank in range(num_parts)]
        with (self.corpus / QUARANTINE).open("wb") as file:
            file.write((self._workplace / DISCOVERED).read_bytes())
            for part in first:
                file.write((part.path / QUARANTINE).read_bytes())
        passes = [*sorted(self._workplace.glob("pass-*")), self._workplace / "scattered"]
        with (self.corpus / REMOVED).open("wb") as file:
            # Compressed files one after the other are one compressed file.
            for directory in passes:
                for rank in range(num_parts):
                    file.write((part_path(directory, rank) / REMOVED).read_bytes())

    def _timed(self, name: str, work: Any, *arguments: Any) -> Any:
        with self._times.stage(name):
            return work(*arguments)

    def _nothing_to_read(self) -> str:
        places = ", ".join(printable(path) for path in self._config.paths) or "the rows of the query"
        source, found = self._account.source, self._found
        reasons = found.skipped + source.skipped
        words = f"{counted(found.files, 'file')} found, {source.read:,} read"
        for name, counter in (
            ("files left out", reasons),
            ("folders left out", found.folders_skipped),
            ("refused in files", source.refused),
        ):
            if counter:
                words += f"; {name}: " + ", ".join(f"{reason} {count:,}" for reason, count in sorted(counter.items()))
        removed = sum(stage.removed.total() for stage in self._account.stages.values())
        dropped = f", {counted(source.empty, 'empty document')}" if source.empty else ""
        dropped += f", {counted(removed, 'document')} removed by data.clean" if removed else ""
        return (
            f"There is no text in {places}: {words}{dropped}. {self._what_to_give()}; files over "
            f"data.max_file_bytes ({self._config.max_file_bytes:,}) are skipped, and hidden or ignored files are "
            "read only when you name them."
        )

    def _what_to_give(self) -> str:
        if (pair := self._config.extract.pair) is not None:
            return (
                "An encoder-decoder learns from pairs: give JSON lines, or another file of records, with the "
                f"fields {pair[0]!r} and {pair[1]!r} (data.extract.pair), each a non-empty text"
            )
        if self._account.source.refused[KIND]:
            return (
                "Pairs of source and target are for model.architecture=encoder_decoder; for a decoder, set "
                "data.extract.template to make one text from each record"
            )
        return "Give files or folders with text"


def _joined(accounts: list[dict[str, Any]]) -> dict[str, Any]:
    """What splitting and mixing counted, added up over the parts."""
    total: dict[str, Any] = {"splits": {name: {} for name in SPLITS}, "mixed": {}, "cut_documents": 0}
    for account in accounts:
        total["cut_documents"] += account["cut_documents"]
        for split, counts in account["splits"].items():
            for key, value in counts.items():
                total["splits"][split][key] = total["splits"][split].get(key, 0) + value
        for number, counts in account["mixed"].items():
            total["mixed"][number] = [a + b for a, b in zip(total["mixed"].get(number, [0, 0, 0]), counts, strict=True)]
    return total
