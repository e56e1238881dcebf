"""Lists and compares runs from their directories alone: size, progress, scores, differing settings, curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import sheepop
from sheepop import model
from sheepop.checkpoint import RunDirectory
from sheepop.core.config import leaves
from sheepop.core.errors import CheckpointError, SheepOpError, UsageError
from sheepop.core.files import storage_errors, write_json
from sheepop.core.json_lines import read_json_lines
from sheepop.data.manifest import read_manifest
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.record import (
    RunRecord,
    ended_early,
    entry,
    find_corpus,
    tensorboard_command,
    text,
    view_run_config,
    whole,
)
from sheepop.report import (
    Curves,
    Page,
    comparison_chart,
    comparison_figure,
    duration,
    number,
    save_png,
    save_svg,
    scored,
    shown,
)

State = Literal["running", "finished", "stopped"]
SortKey = Literal["bits", "loss", "name", "steps", "tokens", "time"]
PAGE, PICTURE, RESULT = "comparison.html", "comparison", "comparison.json"
# It always differs and says nothing.
_NOT_COMPARED = {"output_dir"}
SCORES = (
    "Finished runs show the scores of their best checkpoint on all held-out text; the others show the best of all "
    "validations so far, some of them on a sample of that text."
)
# The field that a key sorts by, and -1 where the largest value comes first.
_ORDER = {
    "bits": ("bits_per_byte", 1), "loss": ("best_loss", 1), "steps": ("steps", -1), "tokens": ("tokens", -1),
    "time": ("seconds", -1),
}  # fmt: skip
HEADER = ("Run", "State", "Parameters", "Steps", "Tokens", "Time", "Best loss", "Bits per byte")


@dataclass(frozen=True)
class RunSummary:
    """One run; unknown values are None.

    A finished run has the scores of its best checkpoint on the whole held-out text; any other run has the best of its
    validations so far, which read only a part of that text if `is_sampled`.
    """

    name: str
    path: str
    state: State
    ended_early: bool
    parameters: int | None
    steps: int
    total_steps: int | None
    tokens: int | None
    seconds: float | None
    best_loss: float | None
    bits_per_byte: float | None
    is_sampled: bool
    last_train_loss: float | None

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class FoundRun:
    """A run with everything a comparison needs.

    `settings` are not nested; `held_out` names the text that the run is scored on, None if unknown; `sample` is the
    last text that it wrote.
    """

    summary: RunSummary
    settings: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    held_out: str | None = None
    sample: Mapping[str, Any] | None = None


def find_runs(paths: Sequence[Path]) -> tuple[list[FoundRun], dict[str, str]]:
    """The runs among `paths` and in the folders there, and the reason for each folder left out.

    Each run is found once; runs with the same name are named by their paths.
    """
    found, left_out = [], {}
    for path in {path.resolve(): path for path in _candidates(paths)}.values():
        try:
            found.append(read_run(path))
        except (SheepOpError, OSError) as error:
            left_out[str(path)] = str(error)
    names = Counter(run.summary.name for run in found)
    return [run if names[run.summary.name] == 1 else _called_by_path(run) for run in found], left_out


def _called_by_path(run: FoundRun) -> FoundRun:
    return replace(run, summary=replace(run.summary, name=run.summary.path))


def read_run(path: Path) -> FoundRun:
    """The run at `path`; raises `CheckpointError` or `ConfigError` if it is not a run or cannot be read."""
    run = RunDirectory(path)
    if not run.config_file.is_file() and not run.record_file.is_file():
        raise CheckpointError("not a run")
    config = view_run_config(run)
    metrics = read_json_lines(run.metrics_file)
    last, score = metrics.last("train"), metrics.last("score")
    steps = max([*run.steps(), whole(last.get("step")) or 0])
    judged = [score] if score else [row for row in metrics.rows if row.get("split") == "validation"]
    early = ended_early(run, config)
    state: State = "stopped"
    if run.is_running():
        state = "running"
    elif early or (config.training.max_steps is not None and steps >= config.training.max_steps):
        state = "finished"
    summary = RunSummary(
        name=path.resolve().name,
        path=str(path),
        state=state,
        ended_early=early,
        parameters=_num_parameters(run, config),
        steps=steps,
        total_steps=config.training.max_steps,
        tokens=whole(last.get("tokens")),
        seconds=number(last.get("seconds")),
        best_loss=_lowest(judged, "loss"),
        bits_per_byte=_lowest(judged, "bits_per_byte"),
        is_sampled=not score and bool(judged) and config.training.eval_tokens is not None,
        last_train_loss=number(last.get("loss")),
    )
    samples = [row for row in read_json_lines(run.samples_file).rows if "rewards" not in row]
    return FoundRun(
        summary,
        dict(leaves(config.model_dump(mode="json"))),
        metrics.rows,
        _held_out(run, config),
        samples[-1] if samples else None,
    )


def _held_out(run: RunDirectory, config: SheepOpConfig) -> str | None:
    """The checksums of the held-out documents, which do not depend on the tokenizer."""
    found = find_corpus(run, config)
    try:
        files = entry({} if found is None else read_manifest(found), "tokens", "splits", "validation").get("files")
    except SheepOpError:
        return None
    if not isinstance(files, list) or not files or not all(isinstance(file, Mapping) for file in files):
        return None
    return " ".join(text(file.get("sha256")) for file in files)


def _num_parameters(run: RunDirectory, config: SheepOpConfig) -> int | None:
    """The number in the record; for an older run it is counted, which loads torch."""
    try:
        recorded = RunRecord.read(run).num_parameters
    except CheckpointError:
        recorded = None
    if recorded is not None or config.model.vocab_size is None:
        return recorded
    return model.num_parameters(config.model)


def _candidates(paths: Sequence[Path]) -> Iterator[Path]:
    """Each path that is a run or has no folders; of any other its folders, except hidden ones."""
    for path in paths:
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory. Name a run, or a folder of runs.")
        folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        if RunDirectory(path).holds_run() or not folders:
            yield path
        else:
            yield from folders


def _lowest(metrics: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = (number(row.get(key)) for row in metrics)
    return min((value for value in values if value is not None), default=None)


@dataclass(frozen=True)
class Listing:
    """Runs in order, and the folders that hold none, each with the reason."""

    runs: list[FoundRun]
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The listing as plain data."""
        return {"runs": [run.summary.to_dict() for run in self.runs], "left_out": self.left_out}


@dataclass(frozen=True)
class Comparison:
    """Runs, and the settings in which they differ: name to the values of all runs."""

    listing: Listing
    settings: dict[str, list[Any]]

    @property
    def warning(self) -> str | None:
        """A warning about comparing the scores; None if all runs are known to be scored on the same text."""
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
    """The runs at `paths` and in the folders there, the best first; a run without the value comes last."""
    runs, left_out = find_runs(paths)
    return Listing(sorted(runs, key=lambda run: _rank(run.summary, sort)), left_out)


def compare_runs(paths: Sequence[Path], *, sort: SortKey = "bits") -> Comparison:
    """The runs at `paths` side by side; raises `UsageError` for fewer than two."""
    listing = list_runs(paths, sort=sort)
    if len(listing.runs) < 2:
        reasons = "".join(f" {path} is left out: {reason}" for path, reason in listing.left_out.items())
        found = "only one" if listing.runs else "none"
        raise UsageError(f"A comparison needs two runs, but {found} was found.{reasons}")
    return Comparison(listing, differing_settings(listing.runs))


def differing_settings(runs: Sequence[FoundRun]) -> dict[str, list[Any]]:
    """The settings in which the runs differ, in the order of the configuration."""
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


def _rank(run: RunSummary, sort: SortKey) -> tuple[Any, ...]:
    """The place of a run in the order of `sort`; a run without the value comes last."""
    if sort == "name":
        return (run.name,)
    name, sign = _ORDER[sort]
    value = getattr(run, name)
    return value is None, sign * (value or 0.0), run.name
