"""Writes ``report.json`` and ``report.html``: what went into a corpus, what was kept, removed or changed, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sheepop.core.facts import counted
from sheepop.core.files import write_json
from sheepop.data.clean.account import LITTLE_SHARE
from sheepop.data.corpus import QUARANTINE
from sheepop.report.formatting import data_size, duration
from sheepop.report.page import Page

REPORT_JSON, REPORT_HTML = "report.json", "report.html"
_SPLIT_NAMES = {"train": "Training", "validation": "Held out"}
_COUNTS = ("documents", "bytes", "tokens", "unknown")
_STAGE_COLUMNS = {
    "Stage": "stage",
    "Documents in": "documents_in",
    "Bytes in": "bytes_in",
    "Tokens in (approx.)": "tokens_in_about",
    "Removed": "removed_documents",
    "Changed": "changed_documents",
    "Documents out": "documents_out",
    "Bytes out": "bytes_out",
}
_MOST_BARS = 25


def write_reports(
    directory: Path, manifest: Mapping[str, Any], counted: Mapping[str, Any], words: str, seconds: Mapping[str, float]
) -> None:
    """Writes both reports into the corpus, the JSON without times; `words` is the summary of the build."""
    splits = manifest["tokens"]["splits"]
    num_bytes = sum(split["bytes"] for split in splits.values())
    tokens = sum(split["tokens"] - split["documents"] for split in splits.values())
    tokens_per_byte = tokens / num_bytes if num_bytes else 0.0
    report = {
        "files": manifest["files"],
        "documents": manifest["documents"],
        "reproducible": manifest["reproducible"],
        **counted,
        # The token counts of stages are estimates: bytes times the corpus's tokens per byte.
        "stages": [
            stage | {f"tokens_{end}_about": round(stage[f"bytes_{end}"] * tokens_per_byte) for end in ("in", "out")}
            for stage in counted["stages"]
        ],
        "tokens_per_byte": tokens_per_byte,
        "tokens": {name: {key: split[key] for key in _COUNTS} for name, split in splits.items()},
    }
    write_json(directory / REPORT_JSON, report)
    page = Page(f"Corpus: {', '.join(manifest['inputs']) or 'a query'}", footer="Made by sheepop data build.")
    _add_overview(page, report, manifest["tokenizer"]["vocab_size"], words, sum(seconds.values()))
    _add_left_out(page, report["files"], directory / QUARANTINE)
    _add_formats(page, report)
    _add_stages(page, report["stages"])
    _add_contents(page, report)
    _add_samples(page, "Kept documents", report["kept_samples"])
    _add_samples(page, "Removed documents", report["removed_samples"])
    if seconds:
        page.add_section("Time")
        page.add_bars({name: round(value, 1) for name, value in seconds.items()}, "Time by stage", unit="Seconds")
    page.write(directory / REPORT_HTML)


def write_failure(directory: Path, words: str, files: Mapping[str, Any]) -> None:
    """Writes both reports of a build that ended with the error `words`, beside its lists of what was left out."""
    write_json(directory / REPORT_JSON, {"error": words, "files": files})
    page = Page("A corpus that was not built", footer="Made by sheepop data build.")
    page.add_text(words)
    page.add_facts({"Files found": files["found"], "Files read": files["read"]})
    _add_left_out(page, files, directory / QUARANTINE)
    page.write(directory / REPORT_HTML)


def _add_overview(page: Page, report: Mapping[str, Any], vocab_size: int, words: str, seconds: float) -> None:
    files, documents = report["files"], report["documents"]
    page.add_section("Overview")
    page.add_text(words)
    page.add_facts(
        {
            "Files found": files["found"],
            "Files read": files["read"],
            "Input": data_size(report["input_bytes"]),
            "Documents found": documents["in"],
            "Documents kept": documents["kept"],
            "Text kept": data_size(documents["bytes"]),
            "Vocabulary": vocab_size,
            "Time": duration(seconds) if seconds else None,
        }
    )
    rows = [(_SPLIT_NAMES[name], *counts.values()) for name, counts in report["tokens"].items()]
    page.add_table(["Split", "Documents", "Bytes", "Tokens", "Unknown tokens"], rows)
    if report["mix"]:
        header, mix = ["Source", "Epochs", "Documents", "Bytes", "Bytes in the mixture"], report["mix"]
        page.add_table(header, [tuple(source.values()) for source in mix], caption="Mixture of the training text")
    if report["limits"]:
        page.add_text(
            "This build is not reproducible: a time or memory limit was reached at the files below, and may not be "
            "on another machine or day."
        )
        page.add_table(["Place"], [(limit,) for limit in report["limits"]])


def _add_left_out(page: Page, files: Mapping[str, Any], quarantine: Path) -> None:
    """Adds the number of inputs, or places in one, that could not be used, and a list of them all."""
    page.add_section("Left out")
    with quarantine.open(encoding="utf-8") as lines:
        left_out = [
            (record["file"], record.get("place", ""), record["reason"].replace("_", " "), record["detail"])
            for record in map(json.loads, lines)
        ]
    if not left_out:
        page.add_text("Every file that was found was read in full.")
        return
    kinds = (("file", "skipped"), ("folder", "folders_skipped"), ("place in a file", "refused_parts"))
    rows = [(kind, reason.replace("_", " "), count) for kind, key in kinds for reason, count in files[key].items()]
    page.add_table(["What", "Why it was left out", "Number"], rows)
    page.add_searched_table(["File", "Place", "Why", "Details"], left_out, "Every entry of quarantine.jsonl")


def _add_formats(page: Page, report: Mapping[str, Any]) -> None:
    """Adds how much text came from files of each suffix, and the files with the least text for their size."""
    page.add_section("Formats")
    rows = [
        (suffix or "none", found["files"], data_size(found["bytes"]), data_size(found["text_bytes"]))
        for suffix, found in sorted(report["formats"].items(), key=lambda item: -item[1]["bytes"])
    ]
    page.add_table(["Suffix", "Files", "Size", "Text"], rows)
    if little := report["little_text"]:
        caption = f"Little text for its size: less than {LITTLE_SHARE:.0%} of the file"
        files = [(found["file"], data_size(found["bytes"]), data_size(found["text_bytes"])) for found in little]
        page.add_table(["File", "Size", "Text"], files, caption=caption)


def _add_stages(page: Page, stages: Sequence[Mapping[str, Any]]) -> None:
    page.add_section("Stages")
    if not stages:
        page.add_text("No cleaning stage ran.")
        return
    shown = [{**s, "stage": _stage_name(s["stage"]), "removed_documents": sum(s["removed"].values())} for s in stages]
    page.add_table(
        list(_STAGE_COLUMNS),
        [[s[name] for name in _STAGE_COLUMNS.values()] for s in shown],
        caption="Documents at each stage, in order; tokens are bytes times the corpus's tokens per byte",
    )
    removed = [
        (s["stage"], reason, count, s["removed_bytes"][reason]) for s in shown for reason, count in s["removed"].items()
    ]
    if removed:
        header = ["Stage", "Why", "Documents", "Bytes"]
        page.add_table(header, removed, caption="Removed; each one is in removed.jsonl.zst")
    if changes := [(s["stage"], name, count) for s in shown for name, count in s["changes"].items()]:
        page.add_table(["Stage", "What", "Times"], changes, caption="Changed")


def _stage_name(stage: str) -> str:
    return "Personal data" if stage == "pii" else stage.replace("_", " ").capitalize()


def _add_contents(page: Page, report: Mapping[str, Any]) -> None:
    page.add_section("Contents")
    contents = report["contents"]
    lengths = {int(bits): count for bits, count in contents["lengths"].items()}
    span = range(min(lengths), max(lengths) + 1) if lengths else ()
    bars = {f"up to {data_size(2**bits)}": lengths.get(bits, 0) for bits in span}
    page.add_bars(bars, "Document lengths", unit="Documents", half=True)
    page.add_bars(_largest(contents["language_bytes"]), "Languages", unit="Bytes", half=True)
    encodings = sorted(report["files"]["encodings"].items(), key=lambda item: -item[1])
    if encodings:
        page.add_table(["Encoding", "Files"], encodings)
    kinds_in, kinds = report["kinds_in"], contents["kinds"]
    page.add_table(
        ["Kind", "Documents found", "In the corpus"],
        [(kind, kinds_in.get(kind, 0), kinds.get(kind, 0)) for kind in sorted(kinds_in.keys() | kinds.keys())],
    )


def _largest(counts: Mapping[str, int]) -> dict[str, int]:
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown, rest = ordered[:_MOST_BARS], ordered[_MOST_BARS:]
    others = {counted(len(rest), "other"): sum(count for _, count in rest)} if rest else {}
    return dict(shown) | others


def _add_samples(page: Page, title: str, samples: Sequence[Mapping[str, Any]]) -> None:
    page.add_section(title)
    if not samples:
        page.add_text("There are none.")
    for sample in samples:
        place = f", {sample['place']}" if sample["place"] else ""
        why = f" — {sample['stage']}: {sample['reason']}" if "reason" in sample else f" — {sample['kind']}"
        if sample.get("detail"):
            why += f" ({sample['detail']})"
        page.add_sample("", sample["excerpt"], label=f"{sample['file']}{place}, {sample['bytes']:,} bytes{why}")
