"""The section of a run's report about what it learnt from."""

from __future__ import annotations

from typing import Any

from sheepop.checkpoint import RunDirectory
from sheepop.core.errors import DataError
from sheepop.data.manifest import read_manifest
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.data import find_corpus
from sheepop.jobs.record_values import entry, text
from sheepop.posttrain.example_store import read_example_manifest
from sheepop.report import Page, data_size, number


def add_data(page: Page, run: RunDirectory, config: SheepOpConfig | None) -> None:
    """Adds what the run learns from: its examples, or its corpus."""
    page.add_section("Data")
    reads_examples = run.examples.is_dir()
    try:
        manifest = read_example_manifest(run.examples) if reads_examples else _corpus_manifest(run, config)
    except DataError as error:
        page.add_text(str(error))
        return
    if reads_examples:
        _add_examples(page, manifest)
    else:
        _add_corpus(page, manifest)


def _corpus_manifest(run: RunDirectory, config: SheepOpConfig | None) -> dict[str, Any]:
    """The manifest of the run's own corpus, or of the finished one it was given."""
    found = find_corpus(run, config)
    if found is None:
        raise DataError("The corpus of this run was not found.")
    return read_manifest(found)


def _add_examples(page: Page, manifest: dict[str, Any]) -> None:
    counts, tokens = entry(manifest, "examples"), entry(manifest, "tokens")
    page.add_facts(
        {
            "Inputs": list(entry(manifest, "inputs")),
            "Examples read": counts.get("read"),
            "To train on": counts.get("train"),
            "Held out": counts.get("validation"),
            "Too long, left out": counts.get("left_out"),
            "Too long, cut": counts.get("cut"),
            "Conversations among them": manifest.get("conversations"),
            "Tokens to train on": tokens.get("train"),
            "Tokens held out": tokens.get("validation"),
        }
    )


def _add_corpus(page: Page, manifest: dict[str, Any]) -> None:
    files, documents = entry(manifest, "files"), entry(manifest, "documents")
    page.add_facts(
        {
            "Inputs": manifest.get("inputs"),
            "Files found": files.get("found"),
            "Files read": files.get("read"),
            "Documents found": documents.get("in"),
            "Documents kept": documents.get("kept"),
            "Empty documents left out": documents.get("empty"),
            "Text": data_size(number(documents.get("bytes"))),
        }
    )
    removed = [(stage.replace("_", " "), count) for stage, count in entry(documents, "removed").items() if count]
    if removed:
        page.add_table(["Stage", "Documents removed"], removed, caption="Each one is listed in removed.jsonl.zst.")
    splits = entry(manifest, "tokens", "splits")
    names = {"train": "Training", "validation": "Held out"}
    columns = ("documents", "tokens", "bytes", "unknown")
    page.add_table(
        ["Split", "Documents", "Tokens", "Bytes", "Unknown tokens"],
        [(names.get(name, name), *(entry(splits, name).get(key) for key in columns)) for name in splits],
    )
    words = entry(manifest, "split").get("words")
    if words:
        page.add_text(text(words))
    skipped = [
        (kind, reason.replace("_", " "), count)
        for kind, key in (("files", "skipped"), ("folders", "folders_skipped"))
        for reason, count in entry(files, key).items()
    ]
    if skipped:
        page.add_table(["Skipped", "Reason", "Number"], skipped, caption="Each one is listed in quarantine.jsonl.")
