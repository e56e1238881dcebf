"""``report.html`` and ``plots/curves.png`` of a run: its scores, samples, curves, and how it was made.

Every run gets a report, also one that was stopped before its first step; missing values are dashes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from sheepop.checkpoint import RunDirectory
from sheepop.core.facts import counted
from sheepop.core.json_lines import Rows, read_json_lines
from sheepop.evaluate.baselines import Baselines
from sheepop.generate import Completion
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.record import (
    RunRecord,
    ended_early,
    entry,
    repeat_command,
    resume_command,
    tensorboard_command,
    text,
    whole,
)
from sheepop.jobs.run.report_facts import (
    add_data,
    add_layout,
    add_machine,
    add_model,
    add_request,
    add_stages,
    trained_parameters,
)
from sheepop.report import (
    MISSING,
    Drawing,
    Page,
    bits_per_byte_chart,
    divergence_chart,
    duration,
    evaluation_charts,
    expert_load_chart,
    gradient_norm_chart,
    learning_rate_chart,
    length_chart,
    loss_chart,
    number,
    order_chart,
    reward_chart,
    save_png,
    scored,
    shown,
    speed_chart,
    stability_chart,
    teacher_chart,
    training_curves,
)
from sheepop.serve.drawing import drawing_script, drawing_style
from sheepop.train import Scores

CURVES = "curves.png"
_MOST_SAMPLES = 12
_SCORE_LABELS = {
    "bits_per_byte": "Bits per byte",
    "loss": "Loss (nats per token)",
    "perplexity": "Perplexity",
    "accuracy": "Next-token accuracy",
    "tokens": "Tokens predicted",
    "bytes": "Bytes predicted",
    "pairs": "Pairs",
    "margin": "Reward of the chosen answer over the rejected one",
    "calibration_error": "Calibration error",
    "reward": "Reward",
    "divergence": "KL divergence from the model that it began with (nats per token)",
    "divergence_from_teacher": "Divergence from the teacher (nats per token)",
    "length": "Tokens of an answer",
    "truncated": "Cut off at the length limit",
    "repetition": "Repeated four-grams",
    "completions": "Answers",
}
_HEADLINES = {
    "bits_per_byte": "Bits per byte of held-out text",
    "reward": "Reward on held-out prompts",
    "divergence_from_teacher": "Divergence from the teacher on held-out prompts",
    "accuracy": "Held-out pairs in the right order",
}


def write_run_report(
    run: RunDirectory,
    config: SheepOpConfig,
    scores: Scores | None,
    record: RunRecord,
    manifest: Mapping[str, Any],
    *,
    baselines: Baselines | None = None,
    completions: Sequence[Completion] = (),
    journey: Mapping[str, Any] | None = None,
) -> None:
    """Writes the report of `run`, which has the resolved settings `config` and data with this `manifest`.

    `scores` are those of the best checkpoint on the whole held-out text, None if nothing is held out or the run was
    stopped. Lines of the logs that cannot be read are left out and counted on the page. Raises `StorageError` if the
    file system refuses the write. `journey` are the numbers of a picture of the network, see `interpret/journey.py`.
    """
    found = _Found(run, config, record, manifest, scores, baselines, completions)
    save_png(training_curves(found.metrics.rows, is_sampled=found.is_sampled), run.plots / CURVES)
    page = Page(
        f"Training run {run.path.resolve().name}",
        footer=f"SheepOp {record.sheepop_version}, report written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.",
    )
    _add_overview(page, found)
    _add_first_picture(page, found)
    _add_scores(page, found)
    _add_completions(page, found.completions)
    _add_journey(page, journey)
    _add_curves(page, found)
    _add_training_samples(page, found)
    add_model(page, found.config)
    add_data(page, found.manifest)
    add_layout(page, found.run, found.record)
    add_stages(page, found.record)
    add_machine(page, found.record)
    add_request(page, found.record)
    page.add_section("Settings")
    page.add_text(
        "The configuration with everything that was derived or measured filled in. It repeats the run, unless settings "
        f"were changed along the way: {repeat_command(run.path, found.record)}"
    )
    page.add_source(found.config_text, run.config_file.name)
    page.write(run.report)


@dataclass(frozen=True)
class _Found:
    """What a report shows: the record and the files of a run, and its `scores` on the whole held-out text, if any."""

    run: RunDirectory
    config: SheepOpConfig
    record: RunRecord
    manifest: Mapping[str, Any]
    scores: Scores | None
    baselines: Baselines | None
    completions: Sequence[Completion]

    @cached_property
    def metrics(self) -> Rows:
        """The rows of ``metrics.jsonl``."""
        return read_json_lines(self.run.metrics_file)

    @cached_property
    def samples(self) -> Rows:
        """The rows of ``samples.jsonl``."""
        return read_json_lines(self.run.samples_file)

    @property
    def config_text(self) -> str:
        """The text of ``config.yaml``."""
        try:
            return self.run.config_file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"{self.run.config_file.name} cannot be read: {error.strerror}."

    def texts(self, *, rewarded: bool) -> list[dict[str, Any]]:
        """The samples that have rewards, or the others."""
        return [row for row in self.samples.rows if ("rewards" in row) == rewarded]

    @property
    def is_sampled(self) -> bool:
        """Whether validations during training read only a part of the held-out text."""
        return self.config.training.eval_tokens is not None


def _add_overview(page: Page, found: _Found) -> None:
    run, config, scores = found.run, found.config, found.scores
    last, validation = found.metrics.last("train"), found.metrics.last("validation")
    steps = max([*run.steps(), int(number(last.get("step")) or 0)])
    total = config.training.max_steps
    if steps == 0:
        page.add_text("The run has no finished steps yet.")
    elif ended_early(run, config):
        patience = config.training.early_stopping
        page.add_text(
            f"The run is finished. It ended early, after step {steps:,} of {shown(total)}: "
            f"{counted(patience or 0, 'validation')} in a row brought no improvement."
        )
    elif total is not None and steps < total:
        page.add_text(f"The run stopped after step {steps:,} of {total:,}. Resume it with: {resume_command(run.path)}")
    judged = validation if scores is None else scores.to_dict()
    headline = next((key for key in _HEADLINES if key in judged), "bits_per_byte")
    is_sampled, before = scores is None and found.is_sampled and headline in judged, found.metrics.at(0, "validation")
    compared = {}
    if headline in before:
        compared["Before training"] = scored(_score(headline, before[headline]), is_sampled=found.is_sampled)
    page.add_facts(
        {
            _HEADLINES[headline]: scored(_score(headline, judged.get(headline)), is_sampled=is_sampled),
            **compared,
            "Parameters": trained_parameters(config),
            "Steps": f"{steps:,} of {shown(total)}",
            "Tokens trained on": whole(last.get("tokens")),
            "Training time": duration(number(last.get("seconds"))),
            "Best checkpoint": _step_words(run.pointer("best")),
        }
    )
    for words in found.record.advice(found.metrics):
        page.add_text(words)
    _add_note(page, found.metrics, run.metrics_file.name)


def _add_first_picture(page: Page, found: _Found) -> None:
    """Adds the curve of the loss, and the first and last continuations of the same prompt."""
    chart, samples = loss_chart(found.metrics.rows, is_sampled=found.is_sampled), found.texts(rewarded=False)
    if chart.data:
        page.add_chart(chart, "Loss")
    prompt = samples[-1].get("prompt") if samples else None
    written = [row for row in samples if row.get("prompt") == prompt]
    if len(written) > 1:
        for row in (written[0], written[-1]):
            page.add_sample(text(prompt), text(row.get("text")), label=_step_words(row.get("step")), half=True)


def _add_scores(page: Page, found: _Found) -> None:
    page.add_section("Held out")
    config, scores, baselines, row = found.config, found.scores, found.baselines, found.metrics.last("validation")
    values: Mapping[str, Any]
    if scores is not None:
        values = scores.to_dict()
        deadline = found.record.deadline
        most = None if deadline is None else deadline.scored_tokens
        part = "all" if most is None else "as much as the minutes allowed of all"
        page.add_text(f"The best checkpoint, scored on {part} that was held out from training.{_context(config)}")
    elif row:
        # The tokens of such a row are those trained on so far.
        values = {key: value for key, value in row.items() if key != "tokens"}
        sampled = config.training.eval_tokens
        on = "" if sampled is None else f", on a sample of about {sampled:,} held-out tokens"
        page.add_text(f"The last validation during training, at {_step_words(row.get('step'))}{on}.")
    else:
        page.add_text("There are no scores yet, or nothing is held out.")
        return
    remembered = found.metrics.last("score_with_memory") if scores is not None else {}
    labels = _SCORE_LABELS
    if "pairs" in values or "completions" in values:  # rates of pairs and of completions, not of tokens
        labels = {**labels, "loss": "Loss", "accuracy": "In the right order", "tokens": "Tokens written"}
    page.add_facts([(label, _score(key, values[key])) for key, label in labels.items() if key in values])
    if remembered:
        page.add_text("The same model with its memory of the training text, which corrects what it predicts:")
        page.add_facts([(label, _score(key, remembered[key])) for key, label in labels.items() if key in remembered])
    if baselines is not None:
        bits = {**baselines.named, "▸ this model": number(values.get("bits_per_byte"))}
        if remembered:
            bits["▸ this model with its memory of the training text"] = number(remembered.get("bits_per_byte"))
        page.add_table(
            ["Predictor", "Bits per byte"],
            [
                (name, _score("bits_per_byte", value))
                for name, value in sorted(bits.items(), key=lambda item: -(item[1] or 0.0))
            ],
            caption=f"Lower is better. The compressors read all {baselines.bytes:,} held-out bytes, one of them after "
            f"{baselines.training_bytes:,} bytes of the training text.",
        )


def _context(config: SheepOpConfig) -> str:
    """Says how much context each token has if rows overlap."""
    stride = config.training.eval_stride
    if stride is None:
        return ""
    length = config.training.eval_length or config.data.max_length or config.model.max_seq_len
    return (
        f" Rows overlap, so each token is predicted from at least {length - stride:,} tokens before it, or from all "
        "there are."
    )


def _add_completions(page: Page, completions: Sequence[Completion]) -> None:
    if not completions:
        return
    page.add_section("What the model writes")
    page.add_text("The prompt is shaded; the rest is the model's.")
    for done in completions:
        ending = {"length": "at the length limit", "stop": "by the model", "abort": "on request"}
        label = f"{counted(len(done.token_ids), 'token')}, stopped {ending[done.finish_reason]}, seed {done.seed}"
        page.add_sample(done.prompt, done.text, label=label)


def _add_journey(page: Page, journey: Mapping[str, Any] | None) -> None:
    if journey is None:
        return
    page.add_section("Inside the model")
    page.add_text(
        "A text on its way through the best checkpoint. Each token is a ribbon, its residual stream, which every block "
        "changes twice. Arcs are attention weights, wedges what a part adds to the likeliest next token. Point at a "
        "token to see where it looks, and click on a block to unfold it."
    )
    page.add_journey(journey, Drawing(drawing_script(), drawing_style()))


def _add_curves(page: Page, found: _Found) -> None:
    page.add_section("Training curves")
    references = found.baselines.named if found.baselines else None
    rows, is_sampled = found.metrics.rows, found.is_sampled
    charts = (
        (bits_per_byte_chart(rows, references, is_sampled=is_sampled), "Bits per byte of held-out text", False),
        (
            reward_chart(rows, is_sampled=is_sampled),
            "Reward, on prompts to learn from and on held-out ones",
            False,
        ),
        (order_chart(rows, is_sampled=is_sampled), "Pairs in the right order", False),
        (divergence_chart(rows), "Divergence from the model that the run began with", True),
        (teacher_chart(rows, is_sampled=is_sampled), "Divergence from the teacher", True),
        (length_chart(rows, is_sampled=is_sampled), "Length of answers", True),
        (learning_rate_chart(rows), "Learning rate", True),
        (gradient_norm_chart(rows), "Gradient norm before clipping", True),
        (stability_chart(rows), "Sharpness of the loss against what the optimizer bears", False),
        (speed_chart(rows), "Speed", False),
        (expert_load_chart(rows), "Load of the experts: the most and the least loaded in any layer", False),
        *(
            (figure, f"What it can do: {measure.replace('_', ' ')}", True)
            for measure, figure in evaluation_charts(rows).items()
        ),
    )
    drawn = [chart for chart in charts if chart[0].data]
    if not drawn:
        page.add_text("Nothing has been logged yet.")
    for figure, title, half in drawn:
        page.add_chart(figure, title, half=half)
    if command := tensorboard_command({found.run.path.name: found.run.path}):
        page.add_text(f"The same curves in TensorBoard: {command}")


def _add_training_samples(page: Page, found: _Found) -> None:
    """Adds the last texts that the model wrote to the sample prompts, and those that it was rewarded for."""
    file = found.run.samples_file.name
    for title, rewarded in (("Samples during training", False), ("Answers and their rewards", True)):
        rows, is_damaged = found.texts(rewarded=rewarded), bool(found.samples.num_unreadable) and not rewarded
        if not rows and not is_damaged:
            continue
        page.add_section(title)
        if len(rows) > _MOST_SAMPLES:
            page.add_text(f"The last {_MOST_SAMPLES} of {len(rows):,}; all of them are in {file}.")
        if is_damaged:
            _add_note(page, found.samples, file)
        for row in rows[-_MOST_SAMPLES:]:
            page.add_sample(text(row.get("prompt")), text(row.get("text")), label=_sample_words(row))


def _sample_words(row: Mapping[str, Any]) -> str:
    """The step of a sample, and its rewards and advantage if it has any."""
    parts, numbers = entry(row, "rewards"), {key: row[key] for key in ("reward", "advantage") if key in row}
    numbers |= parts if len(parts) > 1 else {}
    values = {name: number(each) for name, each in numbers.items()}
    words = [f"{name} {MISSING if value is None else f'{value:.4g}'}" for name, value in values.items()]
    return ", ".join([_step_words(row.get("step")), *words])


def _add_note(page: Page, log: Rows, file: str) -> None:
    """Adds the number of lines left out, if any."""
    if log.num_unreadable:
        page.add_text(f"Unreadable lines of {file}, left out here: {log.num_unreadable:,}.")


def _score(key: str, value: Any) -> str:
    """A score with its significant digits."""
    if key == "perplexity" and value == math.inf:
        return shown(value)
    found = number(value)
    if found is None:
        return MISSING
    formats = {
        **dict.fromkeys(("tokens", "bytes", "pairs", "completions"), "{:,.0f}"),
        **dict.fromkeys(("accuracy", "truncated", "repetition"), "{:.1%}"),
        "perplexity": "{:,.2f}",
        "length": "{:,.1f}",
    }
    return formats.get(key, "{:.4f}").format(found)


def _step_words(step: Any) -> str:
    found = number(step)
    return MISSING if found is None else f"step {found:,.0f}"
