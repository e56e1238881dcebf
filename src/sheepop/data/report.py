"""``report.json`` and ``report.html``: what went into a corpus, what became of it, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sheepop.core.facts import counted
from sheepop.core.files import write_json
from sheepop.data.corpus import QUARANTINE
from sheepop.report.formatting import data_size, duration
from sheepop.report.page import Page

REPORT_JSON, REPORT_HTML = "report.json", "report.html"
_SPLIT_NAMES = {"train": "Training", "validation": "Held out"}
_MOST_BARS = 25
_WORDS = {
    "formatting": "Formatting",
    "language": "Language",
    "quality": "Quality",
    "toxicity": "Toxicity",
    "pii": "Personal data",
    "secrets": "Secrets",
    "decontamination": "Decontamination",
    "exact_duplicates": "Exact duplicates",
    "near_duplicates": "Near duplicates",
}


def write_reports(
    directory: Path,
    manifest: Mapping[str, Any],
    counted: Mapping[str, Any],
    words: str,
    seconds: Mapping[str, float],
) -> None:
    """Writes both reports into the corpus; the JSON holds no times and is the same for the same input.

    `words` say what became of the input. The page names every input that the corpus's quarantine does.
    """
    tokens_per_byte = _tokens_per_byte(manifest)
    stages = [_with_tokens(stage, tokens_per_byte) for stage in counted["stages"]]
    report = {
        "files": manifest["files"],
        "documents": manifest["documents"],
        "reproducible": manifest["reproducible"],
        **counted,
        "stages": stages,
        "tokens_per_byte": tokens_per_byte,
        "tokens": {name: _counts(split) for name, split in manifest["tokens"]["splits"].items()},
    }
    write_json(directory / REPORT_JSON, report)
    page = _page(manifest, report, words, seconds, list(_left_out(directory / QUARANTINE)))
    page.write(directory / REPORT_HTML)


def _left_out(quarantine: Path) -> Iterator[tuple[str, str, str, str]]:
    """Every input, or place in one, that could not be used: its name, the place, why, and details."""
    with quarantine.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            yield record["file"], record.get("place", ""), record["reason"].replace("_", " "), record["detail"]


def _tokens_per_byte(manifest: Mapping[str, Any]) -> float:
    splits = manifest["tokens"]["splits"].values()
    num_bytes = sum(split["bytes"] for split in splits)
    return sum(split["tokens"] - split["documents"] for split in splits) / num_bytes if num_bytes else 0.0


def _with_tokens(stage: Mapping[str, Any], tokens_per_byte: float) -> dict[str, Any]:
    """Tokens before the end of the build are bytes times the corpus's own tokens per byte."""
    about = {name: round(stage[f"bytes_{name}"] * tokens_per_byte) for name in ("in", "out")}
    return {**stage, "tokens_in_about": about["in"], "tokens_out_about": about["out"]}


def _counts(split: Mapping[str, Any]) -> dict[str, int]:
    return {name: split[name] for name in ("documents", "bytes", "tokens", "unknown")}


def _page(
    manifest: Mapping[str, Any],
    report: Mapping[str, Any],
    words: str,
    seconds: Mapping[str, float],
    left_out: Sequence[tuple[str, str, str, str]],
) -> Page:
    page = Page(f"Corpus: {', '.join(manifest['inputs']) or 'a query'}", footer="Made by sheepop data build.")
    _add_overview(page, manifest, report, words, seconds)
    _add_left_out(page, report, left_out)
    _add_stages(page, report)
    _add_contents(page, report)
    _add_samples(page, "Kept documents", report["kept_samples"])
    _add_samples(page, "Removed documents", report["removed_samples"])
    if seconds:
        page.add_section("Time")
        times = {name: round(value, 1) for name, value in seconds.items()}
        page.add_bars(times, "Time by stage", unit="Seconds")
    return page


def _add_overview(
    page: Page, manifest: Mapping[str, Any], report: Mapping[str, Any], words: str, seconds: Mapping[str, float]
) -> None:
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
            "Vocabulary": manifest["tokenizer"]["vocab_size"],
            "Time": duration(sum(seconds.values())) if seconds else None,
        }
    )
    rows = [(_SPLIT_NAMES[name], *_counts(split).values()) for name, split in manifest["tokens"]["splits"].items()]
    page.add_table(["Split", "Documents", "Bytes", "Tokens", "Unknown tokens"], rows)
    if report["mix"]:
        page.add_table(
            ["Source", "Epochs", "Documents", "Bytes", "Bytes in the mixture"],
            [(m["pattern"], m["epochs"], m["documents"], m["bytes"], m["bytes_after"]) for m in report["mix"]],
            caption="Mixture of the training text",
        )
    if report["limits"]:
        page.add_text(
            "This build is not reproducible: a time or memory limit was reached at the files below, and may not be "
            "on another machine or day."
        )
        page.add_table(["Place"], [(limit,) for limit in report["limits"]])


def _add_stages(page: Page, report: Mapping[str, Any]) -> None:
    page.add_section("Stages")
    if not report["stages"]:
        page.add_text("No cleaning stage ran.")
        return
    page.add_table(
        [
            "Stage",
            "Documents in",
            "Bytes in",
            "Tokens in (approx.)",
            "Removed",
            "Changed",
            "Documents out",
            "Bytes out",
        ],
        [
            (
                _WORDS[s["stage"]],
                s["documents_in"],
                s["bytes_in"],
                s["tokens_in_about"],
                sum(s["removed"].values()),
                s["changed_documents"],
                s["documents_out"],
                s["bytes_out"],
            )
            for s in report["stages"]
        ],
        caption="Documents at each stage, in order; tokens are bytes times the corpus's tokens per byte",
    )
    removed = [
        (_WORDS[s["stage"]], reason, count, s["removed_bytes"][reason])
        for s in report["stages"]
        for reason, count in s["removed"].items()
    ]
    if removed:
        page.add_table(
            ["Stage", "Why", "Documents", "Bytes"], removed, caption="Removed; each one is in removed.jsonl.zst"
        )
    changes = [(_WORDS[s["stage"]], name, count) for s in report["stages"] for name, count in s["changes"].items()]
    if changes:
        page.add_table(["Stage", "What", "Times"], changes, caption="Changed")


def _add_left_out(page: Page, report: Mapping[str, Any], left_out: Sequence[tuple[str, str, str, str]]) -> None:
    page.add_section("Left out")
    if not left_out:
        page.add_text("Every file that was found was read in full.")
        return
    files = report["files"]
    kinds = (("file", "skipped"), ("folder", "folders_skipped"), ("place in a file", "refused_parts"))
    rows = [(kind, reason.replace("_", " "), count) for kind, key in kinds for reason, count in files[key].items()]
    page.add_table(["What", "Why it was left out", "Number"], rows)
    page.add_searched_table(["File", "Place", "Why", "Details"], left_out, "Each one, as quarantine.jsonl has it")


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
