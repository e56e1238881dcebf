"""The page about a log: the figures of each model, day by day, what its users ask, and how it differs from the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sheepop.core.facts import counted
from sheepop.monitor.answered import Answered
from sheepop.monitor.drift import Drift
from sheepop.monitor.figures import SHARES, Alert, Figures
from sheepop.monitor.kinds import FEWEST_VOTED, Kind
from sheepop.report.charts import reliability_chart, shares_chart
from sheepop.report.page import Page
from sheepop.serve.conversation_log import LogFaults

_IN_CHART = ("bad", "unsure", "declined", "repetitive", "cut", "failed")
_LONGEST = 1200  # characters of a text that is shown


@dataclass(frozen=True)
class OfModel:
    """What a log says about a model: its figures, those of each day or week, the kinds of prompts that its users voted
    on, and the answers without votes of which it was the least sure.
    """

    figures: Figures
    over_time: dict[str, Figures]
    kinds: list[Kind]
    unsure: list[Answered]

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as plain data; of the unsure answers, their places in the log."""
        return {
            **asdict(self.figures),
            "over_time": {day: asdict(each) for day, each in self.over_time.items()},
            "kinds": [each.to_dict() for each in self.kinds],
            "least_sure": [each.place for each in self.unsure],
        }


@dataclass(frozen=True)
class Monitored:
    """What a log says about each model, the drift of its prompts by what they are compared by, the faults of the log,
    and the alerts that fire with the names of their models.
    """

    models: dict[str, OfModel]
    drift: dict[str, Drift]
    faults: LogFaults
    fired: list[tuple[str, Alert]]


def page_of(found: Monitored, log: str, against: str | None) -> Page:
    """The page about the log at `log`, whose prompts were compared with the data at `against`."""
    page = Page(f"Answers of {', '.join(found.models)}", footer=f"Made by sheepop monitor from {log}.")
    page.add_section("Overview")
    for name, alert in found.fired:
        page.add_text(f"Alert: {name} is beyond {alert} for certain.")
    if faults := str(found.faults):
        page.add_text(f"Lines of the log were left out: {faults}.")
    page.add_table(
        ("Share of answers", *found.models),
        [
            [words, *(_text(each.figures.shares[name]) for each in found.models.values())]
            for name, words in SHARES.items()
        ],
        "Each share with its 95 percent interval, and the number of answers that it could be of.",
    )
    if found.drift:
        _add_drift(page, found.drift, against or "")
    for name, of_model in found.models.items():
        page.add_section(name if len(found.models) > 1 else "Answers")
        _add_model(page, of_model)
    return page


def _add_drift(page: Page, found: Mapping[str, Drift], against: str) -> None:
    page.add_section("Prompts and training data")
    page.add_text(
        f"A classifier learnt to tell half of the prompts from half of the data in {against}. The table says how often "
        "it finds a prompt less like the data than a piece of the data, among those that it did not learn from: at 50% "
        "prompts and data are alike."
    )
    page.add_table(
        ("Compared by", "Told apart", "Drift", "Words of prompts"),
        [(name, str(each.told), _certain(each.is_certain), ", ".join(each.words)) for name, each in found.items()],
    )
    for name, each in found.items():
        page.add_heading(f"Prompts that are farthest from the data, by {name}")
        for prompt in each.farthest:
            page.add_sample("", _cut(prompt))


def _add_model(page: Page, found: OfModel) -> None:
    figures = found.figures
    lengths = {f"{name}, median and 95%": [round(each) for each in value] for name, value in figures.lengths.items()}
    times = {
        f"{name}, median and 95%": " s, ".join(f"{each:.2f}" for each in value) + " s"
        for name, value in figures.times.items()
    }
    page.add_facts(
        {"answers": figures.answers, **lengths, **times, "confidence tells votes": _text(figures.separation)}
    )
    if len(found.over_time) > 1:
        curves = {
            SHARES[name]: [
                (day, share.value, share.low, share.high)
                for day, each in found.over_time.items()
                if (share := each.shares[name]) is not None
            ]
            for name in _IN_CHART
        }
        shown = {name: points for name, points in curves.items() if any(value for _, value, *_ in points)}
        page.add_chart(shares_chart(shown), "Day by day, or week by week", half=figures.calibration is not None)
    if figures.calibration is not None:
        bins = figures.calibration.bins
        page.add_chart(
            reliability_chart([each.confidence for each in bins], [each.accuracy for each in bins]),
            "Good votes, by the chance that was expected",
            note=f"Expected calibration error {figures.calibration.ece:.3f}, on answers that were not fitted to.",
            half=len(found.over_time) > 1,
        )
    page.add_heading("Kinds of prompts")
    if found.kinds:
        page.add_table(
            ("Words", "Bad votes", "p value", "Worse than the others"),
            [(", ".join(each.words), str(each.bad), each.p, _certain(each.is_worse)) for each in found.kinds],
            "The p values are of all kinds together.",
        )
    else:
        page.add_text(f"With {counted(FEWEST_VOTED, 'vote')} or more, prompts are sorted into kinds here.")
    for kind in found.kinds:
        if kind.is_worse:
            page.add_sample("", "\n\n".join(map(_cut, kind.examples)), label=f"Such as: {', '.join(kind.words)}")
    if found.unsure:
        page.add_heading("Answers without votes that are the least likely to be liked")
        for each in found.unsure:
            page.add_sample(_cut(each.asked) + "\n", _cut(each.text), label=each.place)


def _certain(is_certain: bool) -> str:
    return "yes" if is_certain else "not for certain"


def _text(share: object) -> str | None:
    return None if share is None else str(share)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} [{len(text) - _LONGEST:,} more characters]"
