"""The report of evaluations: a page, JSON data, and the items, which later comparisons read."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sheepop.core.errors import DataError
from sheepop.core.facts import counted
from sheepop.core.files import atomic_directory, finite, read_json, write_json
from sheepop.evaluate.results import Compared, Evaluation, Item, Measure, Table
from sheepop.evaluate.statistics import Bin, Reliability
from sheepop.report import Page, course_chart, reliability_chart, save_png, shown
from sheepop.report.figures import blank_figure
from sheepop.report.palette import NEUTRAL, SCORE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT, PAGE, ITEMS = "report.json", "report.html", "items.jsonl"
FORMAT, FORMAT_VERSION = "sheepop-evaluation", 1
_MOST_SHOWN = 20


@dataclass(frozen=True)
class ModelResults:
    """All evaluations of one model; `model` is its name, `about` further facts for the report."""

    model: str
    evaluations: Sequence[Evaluation]
    about: Mapping[str, Any]


def write_report(
    directory: Path, results: Sequence[ModelResults], compared: Sequence[Compared], about: Mapping[str, Any]
) -> None:
    """Writes ``report.html``, ``report.json``, ``items.jsonl`` and pictures into a new `directory`, atomically.

    Raises `StorageError` if the directory exists.
    """
    with atomic_directory(directory) as place:
        models = [
            {"model": each.model, "about": dict(each.about), "evaluations": [one.to_dict() for one in each.evaluations]}
            for each in results
        ]
        found = {"format": FORMAT, "format_version": FORMAT_VERSION, "about": dict(about), "models": models}
        write_json(place / REPORT, finite({**found, "compared": [asdict(each) for each in compared]}))
        with (place / ITEMS).open("w", encoding="utf-8") as file:
            for result, evaluation in _all(results):
                origin = {"model": result.model, "kind": evaluation.kind, "name": evaluation.name}
                for item in evaluation.items:
                    row = finite({**origin, **asdict(item)})
                    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        for number, (result, evaluation) in enumerate(_all(results)):
            if evaluation.reliability is not None:
                name = f"reliability-{number}-{_file_name(result.model)}-{_file_name(evaluation.name)}.png"
                save_png(reliability_figure(evaluation.reliability), place / "plots" / name)
        _page(results, compared, about).write(place / PAGE)


def read_report(directory: str | Path) -> list[ModelResults]:
    """Reads a report with its items; raises `DataError` for anything that `write_report` did not write."""
    directory = Path(directory)
    found = read_json(directory / REPORT)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{directory / REPORT} is not the report of an evaluation.")
    if found["format_version"] > FORMAT_VERSION:
        raise DataError(f"{directory} was written by a newer SheepOp. Install that one.")
    items: dict[tuple[str, str, str], list[Item]] = defaultdict(list)
    try:
        with (directory / ITEMS).open(encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                item = Item(row["id"], row["values"], row["weight"], row["shown"])
                items[row["model"], row["kind"], row["name"]].append(item)
        results = []
        for result in found["models"]:
            name, evaluations = result["model"], result["evaluations"]
            read = [_evaluation(each, items[name, each["kind"], each["name"]]) for each in evaluations]
            results.append(ModelResults(name, read, result["about"]))
        return results
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"The evaluation in {directory} is damaged: {type(error).__name__} {error}.") from None


def _evaluation(found: dict[str, Any], items: Sequence[Item]) -> Evaluation:
    measures = [
        Measure(**{**measure, "interval": measure["interval"] and tuple(measure["interval"])})
        for measure in found["measures"]
    ]
    tables = [Table(**table) for table in found["tables"]]
    read = found["reliability"]
    reliability = None if read is None else Reliability(read["ece"], tuple(Bin(**each) for each in read["bins"]))
    return Evaluation(**{**found, "measures": measures, "tables": tables, "items": items, "reliability": reliability})


def _all(results: Sequence[ModelResults]) -> Iterator[tuple[ModelResults, Evaluation]]:
    return ((result, evaluation) for result in results for evaluation in result.evaluations)


def _page(results: Sequence[ModelResults], compared: Sequence[Compared], about: Mapping[str, Any]) -> Page:
    names = ", ".join(dict.fromkeys(str(result.about.get("run", result.model)) for result in results))
    page = Page(f"Evaluation of {names}", footer=f"{about.get('version', 'SheepOp')}, {about.get('date', '')}")
    page.add_text(
        "Every number has its definition beside it. A 95 % interval contains the true value in 95 of 100 repetitions "
        "with other items of the same kind. Two models differ only if a test says so."
    )
    page.add_facts(about)
    _add_overview(page, results)
    _add_courses(page, results)
    if compared:
        _add_compared(page, compared)
    for result, evaluation in _all(results):
        page.add_section(f"{evaluation.name}: {result.model}" if len(results) > 1 else evaluation.name)
        _add_evaluation(page, result, evaluation)
    return page


def _add_overview(page: Page, results: Sequence[ModelResults]) -> None:
    """Adds a table of the first measure of every evaluation, with one column for each model."""
    page.add_section("Overview")
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for result, evaluation in _all(results):
        first = evaluation.measures[0]
        rows.setdefault((evaluation.name, first.name), {})[result.model] = with_interval(first)
    page.add_table(
        ("Evaluation", "Measure", *(result.model for result in results)),
        [[name, measure, *(cells.get(result.model) for result in results)] for (name, measure), cells in rows.items()],
    )


def _add_courses(page: Page, results: Sequence[ModelResults]) -> None:
    """Adds charts of all measures over the checkpoints of a run, if there are more than two."""
    stepped = [result for result in results if isinstance(result.about.get("step"), int)]
    courses: dict[tuple[str, str], list[tuple[int, Measure]]] = {}
    for result, evaluation in _all(stepped):
        for measure in evaluation.measures:
            courses.setdefault((evaluation.name, measure.name), []).append((result.about["step"], measure))
    courses = {key: sorted(course, key=lambda entry: entry[0]) for key, course in courses.items() if len(course) > 2}
    if courses:
        page.add_section("Checkpoint by checkpoint")
        for (name, title), course in courses.items():
            steps, values = [step for step, _ in course], [found.value for _, found in course]
            page.add_chart(course_chart(steps, values, title), f"{name}: {title}", half=True)


def _add_compared(page: Page, compared: Sequence[Compared]) -> None:
    page.add_section("Compared item by item")
    page.add_table(
        ("Evaluation", "Measure", "First", "Second", "Difference", "95 % interval", "p value", "Test", "Better"),
        [
            [
                found.name,
                found.measure,
                found.first,
                found.second,
                found.difference.value,
                _interval(found.difference.interval),
                found.difference.p,
                found.test,
                found.better or "neither, as far as these items tell",
            ]
            for found in compared
        ],
    )
    page.add_text(
        "The p value is the probability of a difference as large between equal models. Between equal models, "
        f"{counted(len(compared), 'test')} at 0.05 would still find about {0.05 * len(compared):.1f} differences."
    )


def _add_evaluation(page: Page, result: ModelResults, evaluation: Evaluation) -> None:
    page.add_table(
        ("Measure", "Value", "95 % interval", "Items", "What it is"),
        [
            [measure.name, measure.value, _interval(measure.interval), measure.count, measure.definition]
            for measure in evaluation.measures
        ],
    )
    for note in evaluation.notes:
        page.add_text(f"Note: {note}")
    if evaluation.reliability is not None:
        bins = evaluation.reliability.bins
        page.add_chart(
            reliability_chart([each.confidence for each in bins], [each.accuracy for each in bins]),
            "How often the model is right, by its confidence",
            note="On the dashed line the model is well calibrated; below it, it is overconfident.",
        )
    for table in evaluation.tables:
        if table.rows:
            page.add_table(table.header, table.rows, table.title)
    shown_items = [item for item in evaluation.items if item.shown][:_MOST_SHOWN]
    if shown_items:
        text = "\n\n".join(
            f"{item.id}  {dict(item.values)}\n{json.dumps(dict(item.shown), indent=2, ensure_ascii=False)}"
            for item in shown_items
        )
        page.add_source(text, f"The first {len(shown_items)} of {len(evaluation.items)} items; all are in {ITEMS}")
    page.add_source(json.dumps(dict(evaluation.settings), indent=2, ensure_ascii=False), "Settings")


def with_interval(measure: Measure) -> str:
    """A value and its interval on one line."""
    return shown(measure.value) + (f" ({_interval(measure.interval)})" if measure.interval else "")


def reliability_figure(found: Reliability) -> Figure:
    """Bars of accuracy by confidence with the line of equality, above bars of the number of answers."""
    figure = blank_figure(5.2, 5.4, 2, 1, has_y_labels=True)
    above, below = figure.subplots(2, 1, height_ratios=[3, 1], sharex=True)
    middles = [(each.low + each.high) / 2 for each in found.bins]
    width = 0.92 / len(found.bins)
    above.bar(middles, [each.accuracy or 0.0 for each in found.bins], width, color=SCORE)
    above.plot([0, 1], [0, 1], color=NEUTRAL, linestyle="--", linewidth=1.2)
    above.set(xlim=(0, 1), ylim=(0, 1), ylabel="Share that was right")
    above.set_title(f"Calibration error {found.ece:.3f}", loc="left", fontsize=11)
    below.bar(middles, [each.count for each in found.bins], width, color=NEUTRAL)
    below.set(xlabel="Probability that the model gave", ylabel="Answers")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure


def _interval(interval: tuple[float, float] | None) -> str | None:
    return None if interval is None else f"{shown(interval[0])} to {shown(interval[1])}"


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()[-40:]
