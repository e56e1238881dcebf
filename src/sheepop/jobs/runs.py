"""Lists runs and compares them: a table, the settings in which they differ, their curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import sheepop
from sheepop.core.errors import UsageError
from sheepop.core.files import storage_errors, write_json
from sheepop.jobs.record_values import text
from sheepop.jobs.run_summary import FoundRun, RunSummary, find_runs, tensorboard_command
from sheepop.report import (
    Curves,
    Page,
    comparison_chart,
    comparison_figure,
    duration,
    save_png,
    save_svg,
    scored,
    shown,
)

SortKey = Literal["bits", "loss", "name", "steps", "tokens", "time"]
PAGE, PICTURE, RESULT = "comparison.html", "comparison", "comparison.json"
# What always differs and says nothing.
_NOT_COMPARED = {"output_dir"}
SCORES = (
    "Finished runs show the scores of their best checkpoint on all held-out text; the others show the best of all "
    "validations so far, some of them on a sample of that text."
)
HEADER = ("Run", "State", "Parameters", "Steps", "Tokens", "Time", "Best loss", "Bits per byte")


@dataclass(frozen=True)
class Listing:
    """Runs in order, and the folders beside them that hold none, each with the reason."""

    runs: list[FoundRun]
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The listing as plain data."""
        return {"runs": [run.summary.to_dict() for run in self.runs], "left_out": self.left_out}


@dataclass(frozen=True)
class Comparison:
    """Settings that differ, name to the value of every run, and the runs they belong to."""

    listing: Listing
    settings: dict[str, list[Any]]

    @property
    def warning(self) -> str | None:
        """What to know before scores are compared; None where all runs are known to be scored on the same text."""
        texts = [run.held_out for run in self.listing.runs]
        if None in texts:
            return "Not every run says which text it holds out, so the scores may be for different texts."
        if len(set(texts)) > 1:
            return "The runs hold out different texts, so their scores say little about which run is better."
        return None

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {**self.listing.to_dict(), "settings": self.settings, "warning": self.warning}


def list_runs(paths: Sequence[Path], *, sort: SortKey = "bits") -> Listing:
    """The runs at `paths` and in the folders among them, the best first; a run without the value comes last."""
    runs, left_out = find_runs(paths)
    return Listing(sorted(runs, key=lambda run: _ORDER[sort](run.summary)), left_out)


def compare_runs(paths: Sequence[Path], *, sort: SortKey = "bits") -> Comparison:
    """The runs at `paths` side by side; raises `UsageError` for fewer than two."""
    listing = list_runs(paths, sort=sort)
    if len(listing.runs) < 2:
        reasons = "".join(f" {path} is left out: {reason}" for path, reason in listing.left_out.items())
        found = "only one" if listing.runs else "none"
        raise UsageError(f"A comparison needs two runs, but {found} was found.{reasons}")
    return Comparison(listing, differing_settings(listing.runs))


def differing_settings(runs: Sequence[FoundRun]) -> dict[str, list[Any]]:
    """The settings in which not all runs agree, in the order of the configuration."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in _NOT_COMPARED)
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: row for name, row in values.items() if any(value != row[0] for value in row)}


def write_comparison(comparison: Comparison, directory: Path) -> Path:
    """Writes page, pictures and numbers into `directory`; returns the page."""
    runs = comparison.listing.runs
    curves = [
        Curves(run.summary.name, run.metrics, is_sampled=run.settings["training.eval_tokens"] is not None)
        for run in runs
    ]
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    figure = comparison_figure(curves)
    save_png(figure, directory / f"{PICTURE}.png")
    save_svg(figure, directory / f"{PICTURE}.svg")
    write_json(directory / RESULT, comparison.to_dict())
    page = Page(
        f"{len(runs)} runs compared",
        footer=f"SheepOp {sheepop.__version__}, written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
    )
    page.add_section("Scores")
    page.add_table(HEADER, [row(run.summary) for run in runs], caption=SCORES)
    if warning := comparison.warning:
        page.add_text(warning)
    page.add_section("Held-out text, bits per byte")
    page.add_chart(comparison_chart(curves, "validation", over="step"), "By step")
    page.add_chart(comparison_chart(curves, "validation", over="seconds"), "By training time")
    page.add_section("Training loss")
    page.add_chart(comparison_chart(curves, "train", over="step"), "By step, smoothed")
    page.add_chart(comparison_chart(curves, "train", over="seconds"), "By training time, smoothed")
    _add_samples(page, runs)
    places = {run.summary.name: Path(run.summary.path) for run in runs}
    if command := tensorboard_command(places):
        page.add_text(f"The same curves in TensorBoard: {command}")
    page.add_section("Settings")
    if comparison.settings:
        page.add_text("The settings in which the runs differ.")
        names = [run.summary.name for run in runs]
        page.add_table(["Setting", *names], [[name, *map(shown, row)] for name, row in comparison.settings.items()])
    else:
        page.add_text("All settings are the same.")
    page.write(directory / PAGE)
    return directory / PAGE


def _add_samples(page: Page, runs: Sequence[FoundRun]) -> None:
    """The last text of every run, side by side."""
    written = [(run.summary.name, run.sample) for run in runs if run.sample is not None]
    if not written:
        return
    page.add_section("What the runs write")
    for name, sample in written:
        label = f"{name}, step {shown(sample.get('step'))}"
        page.add_sample(text(sample.get("prompt")), text(sample.get("text")), label=label, half=True)


def row(run: RunSummary) -> tuple[str, ...]:
    """The cells of a run under `HEADER`."""
    return (
        run.name,
        f"{run.state}, early" if run.ended_early and run.state == "finished" else run.state,
        _short(run.parameters),
        f"{run.steps:,} of {shown(run.total_steps)}",
        _short(run.tokens),
        duration(run.seconds),
        _score(run.best_loss, run),
        _score(run.bits_per_byte, run),
    )


def _score(value: float | None, run: RunSummary) -> str:
    return shown(None) if value is None else scored(f"{value:.4f}", is_sampled=run.is_sampled)


def _short(count: int | None) -> str:
    """A large number in three digits: ``1.07M``."""
    if count is None:
        return shown(None)
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def _rising(value: float | None) -> tuple[bool, float]:
    return value is None, value or 0.0


def _falling(value: float | None) -> tuple[bool, float]:
    return value is None, -(value or 0.0)


_ORDER: Mapping[str, Callable[[RunSummary], tuple[Any, ...]]] = {
    "bits": lambda run: (*_rising(run.bits_per_byte), run.name),
    "loss": lambda run: (*_rising(run.best_loss), run.name),
    "name": lambda run: (run.name,),
    "steps": lambda run: (*_falling(run.steps), run.name),
    "tokens": lambda run: (*_falling(run.tokens), run.name),
    "time": lambda run: (*_falling(run.seconds), run.name),
}
