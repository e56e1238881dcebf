"""How long a build may take and how much room it needs, said before it starts."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path, PurePath

from sheepop.core.console import Console
from sheepop.data.pipeline.engine import Engine
from sheepop.data.pipeline.inventory import Plan
from sheepop.data.pipeline.workplace import Found

# Megabytes of file that one process gets through in a second, from reading to tokens (bench/data_speed.py).
_SPEEDS = {
    **dict.fromkeys((".pdf",), 1.0),
    **dict.fromkeys((".html", ".htm", ".xhtml", ".warc", ".epub"), 0.8),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp", ".gif", ".heic", ".avif"), 0.05),
    **dict.fromkeys((".docx", ".pptx", ".xlsx", ".xlsb", ".xls", ".odt", ".odp", ".ods", ".doc", ".ppt"), 0.5),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tgz", ".parquet"), 0.8),
}
_TEXT_SPEED = 2.5
# Of every byte of text: compressed documents twice, the shuffle's plain copy, tokens twice, checked against builds.
_ROOM = 2.5
_SHOWN_FROM_BYTES = 10**8


def estimated_seconds(plan: Plan, workers: int) -> float:
    """About how long the build will take on this kind of machine with `workers` processes."""
    sizes: Counter[str] = Counter()
    for number in range(len(plan.parts)):
        for entry in plan.entries(number):
            sizes[PurePath(entry.source).suffix.lower()] += entry.size
    work = sum(size / 1e6 / _SPEEDS.get(suffix, _TEXT_SPEED) for suffix, size in sizes.items())
    return work / max(1, workers)


def announce(plan: Plan, found: Found, engine: Engine, workplace: Path, console: Console) -> None:
    """Says what will be read, about how long it takes and what room it needs; warns when there is less."""
    room = int(found.num_bytes * _ROOM)
    free = shutil.disk_usage(workplace).free
    if found.num_bytes >= _SHOWN_FROM_BYTES:
        seconds = estimated_seconds(plan, engine.num_workers)
        console.info(
            f"{found.num_bytes / 1e6:,.0f} MB in {sum(part.entries for part in plan.parts):,} inputs: about "
            f"{_in_words(seconds)} and {room / 1e9:,.1f} GB of room, most of it until the build is done "
            f"({free / 1e9:,.1f} GB is free)."
        )
    if room > free:
        console.warn(
            f"{workplace.parent} has {free / 1e9:,.1f} GB free, and the build may need {room / 1e9:,.1f} GB. If it "
            "fills up, free some space and run the same command again: it continues from what is done."
        )


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60):,} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
