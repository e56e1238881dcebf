"""``report.html`` and ``plots/curves.png`` of a run: what was made, of what, how well it does, and how it went.

A report is written of every run, also of one that was stopped before its first step: what is missing is a dash.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sheepop.checkpoint import RunDirectory
from sheepop.core.config import read_config_file, validate
from sheepop.core.errors import ConfigError, DataError
from sheepop.data import is_corpus
from sheepop.data.manifest import read_manifest
from sheepop.generate import Completion
from sheepop.jobs.baselines import Baselines
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.resume import RunRecord
from sheepop.model import ModelConfig, Transformer
from sheepop.report import (
    Page,
    Sample,
    bits_per_byte_chart,
    data_size,
    duration,
    gradient_norm_chart,
    learning_rate_chart,
    loss_chart,
    number,
    save_png,
    shown,
    speed_chart,
    stage_times_chart,
    training_curves,
)
from sheepop.train import Scores

REPORT = "report.html"
CURVES = "curves.png"
_MOST_SAMPLES = 12
_SCORE_LABELS = {
    "bits_per_byte": "Bits per byte",
    "loss": "Loss (nats per token)",
    "perplexity": "Perplexity",
    "accuracy": "Next-token accuracy",
    "tokens": "Tokens predicted",
    "bytes": "Bytes predicted",
}


def write_run_report(
    run: RunDirectory,
    scores: Scores | None,
    record: RunRecord,
    *,
    baselines: Baselines | None = None,
    completions: Sequence[Completion] = (),
    seconds: Mapping[str, float] | None = None,
) -> None:
    """Writes the report of `run` from its files and from what is known of its end.

    `scores` are the best checkpoint's on the whole held-out text, None when nothing is held out or the run was
    stopped. Lines of the run's logs that cannot be read are left out and counted on the page. Raises
    `StorageError` when the place refuses the write.
    """
    metrics, samples = _Log.read(run.metrics_file), _Log.read(run.samples_file)
    save_png(training_curves(metrics.rows), run.plots / CURVES)
    config, config_text = _read_config(run)
    manifest = _read_manifest(run, config)
    page = Page(
        f"Training run {run.path.resolve().name}",
        footer=f"SheepOp {record.sheepop_version}, report written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
    )
    _add_overview(page, run, config, metrics, scores)
    _add_scores(page, metrics, scores, baselines)
    _add_completions(page, completions)
    _add_curves(page, metrics, baselines)
    _add_training_samples(page, samples)
    _add_model(page, config)
    _add_data(page, manifest)
    _add_stages(page, seconds)
    _add_machine(page, record)
    page.add_section("Settings")
    page.add_text("The configuration with everything that was derived or measured filled in.")
    page.add_source(config_text, run.config_file.name)
    page.write(run.path / REPORT)


@dataclass(frozen=True)
class _Log:
    """The rows of a JSON-lines file, and the number of its lines that hold none."""

    name: str
    rows: list[dict[str, Any]]
    num_unreadable: int

    @classmethod
    def read(cls, path: Path) -> _Log:
        rows, num_unreadable = [], 0
        for line in path.read_bytes().split(b"\n") if path.is_file() else ():
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                num_unreadable += 1
        return cls(path.name, rows, num_unreadable)

    def last(self, split: str) -> dict[str, Any]:
        """The last row of `split`, empty when there is none."""
        return next((row for row in reversed(self.rows) if row.get("split") == split), {})

    def add_note(self, page: Page) -> None:
        """Says on the page how many lines are left out, if any."""
        if self.num_unreadable:
            page.add_text(f"Lines of {self.name} that cannot be read and are left out: {self.num_unreadable:,}.")


def _read_config(run: RunDirectory) -> tuple[SheepOpConfig | None, str]:
    """The configuration, or None when it is not valid, and the text of its file in any case."""
    try:
        text = run.config_file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return None, f"{run.config_file.name} cannot be read: {error.strerror}."
    try:
        return validate(SheepOpConfig, read_config_file(run.config_file)), text
    except ConfigError:
        return None, text


def _read_manifest(run: RunDirectory, config: SheepOpConfig | None) -> dict[str, Any] | str:
    """The manifest of the run's own corpus, or of the finished one it was given; else why there is none."""
    given = [Path(path) for path in config.data.paths] if config else []
    found = next((path for path in (run.corpus, *given) if is_corpus(path)), None)
    if found is None:
        return "The corpus of this run is not here any more."
    try:
        return read_manifest(found)
    except DataError as error:
        return str(error)


def _add_overview(
    page: Page, run: RunDirectory, config: SheepOpConfig | None, metrics: _Log, scores: Scores | None
) -> None:
    last, validation = metrics.last("train"), metrics.last("validation")
    steps = max([*run.steps(), int(number(last.get("step")) or 0)])
    total = config.training.max_steps if config else None
    if steps == 0:
        page.add_text("The run was stopped before the first step was logged.")
    elif total is not None and steps < total:
        page.add_text(f"The run was stopped after step {steps:,} of {total:,}. sheepop train --resume goes on with it.")
    bits = scores.bits_per_byte if scores else number(validation.get("bits_per_byte"))
    page.add_facts(
        {
            "Bits per byte, held out": bits,
            "Parameters": _num_parameters(config.model) if config else None,
            "Steps": f"{steps:,} of {shown(total)}",
            "Tokens trained on": last.get("tokens"),
            "Training time": duration(number(last.get("seconds"))),
            "Best checkpoint": _step_words(run.pointer("best")),
        }
    )
    metrics.add_note(page)


def _add_scores(page: Page, metrics: _Log, scores: Scores | None, baselines: Baselines | None) -> None:
    page.add_section("Held-out text")
    validation = metrics.last("validation")
    if scores is not None:
        values: Mapping[str, Any] = scores.to_dict()
        page.add_text("The best checkpoint on all text that was held out from training.")
    elif validation:
        values = validation
        page.add_text(
            f"Measured while training, {_step_words(validation.get('step'))}; `tokens` there count training tokens."
            if False
            else f"Measured while training, at {_step_words(validation.get('step'))}."
        )
        values = {key: value for key, value in validation.items() if key != "tokens"}
    else:
        page.add_text("There are no scores on held-out text yet.")
        return
    page.add_facts([(label, _score(key, values[key])) for key, label in _SCORE_LABELS.items() if key in values])
    if baselines is not None:
        rows = [("gzip -9", baselines.gzip), ("xz -9", baselines.xz), ("this model", number(values["bits_per_byte"]))]
        page.add_table(
            ["", "Bits per byte"],
            [(name, None if bits is None else round(bits, 4)) for name, bits in rows],
            caption=f"Fewer is better. The compressors read the same {baselines.bytes:,} bytes.",
        )


def _add_completions(page: Page, completions: Sequence[Completion]) -> None:
    if not completions:
        return
    page.add_section("What the model writes")
    page.add_text("Shaded: the prompt. The rest is the model's.")
    page.add_samples(
        Sample(done.prompt, done.text, f"{_reason(done)}, {len(done.token_ids):,} tokens, seed {done.seed}")
        for done in completions
    )


def _add_curves(page: Page, metrics: _Log, baselines: Baselines | None) -> None:
    page.add_section("Course of training")
    references = {"gzip -9": baselines.gzip, "xz -9": baselines.xz} if baselines else None
    charts = (
        (loss_chart(metrics.rows), "Loss", False),
        (bits_per_byte_chart(metrics.rows, references), "Bits per byte of held-out text", False),
        (learning_rate_chart(metrics.rows), "Learning rate", True),
        (gradient_norm_chart(metrics.rows), "Gradient norm before clipping", True),
        (speed_chart(metrics.rows), "Speed", False),
    )
    drawn = [chart for chart in charts if chart[0].data]
    if not drawn:
        page.add_text("Nothing has been logged yet.")
    for figure, title, half in drawn:
        page.add_chart(figure, title, half=half)


def _add_training_samples(page: Page, samples: _Log) -> None:
    if not samples.rows and not samples.num_unreadable:
        return
    page.add_section("Samples while training")
    rows = samples.rows[-_MOST_SAMPLES:]
    if len(rows) < len(samples.rows):
        page.add_text(f"The last {len(rows)} of {len(samples.rows):,}; all of them are in {samples.name}.")
    samples.add_note(page)
    page.add_samples(
        Sample(shown(row.get("prompt", "")), shown(row.get("text")), _step_words(row.get("step"))) for row in rows
    )
