"""A plan of a run: what would end it, what it needs, how long it takes and what it costs; as text, data and a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sheepop.core.budget import Budget
from sheepop.core.config import value_text
from sheepop.core.facts import counted
from sheepop.plan.findings import Disk, Finding
from sheepop.plan.layout import Laid
from sheepop.plan.memory import MemoryParts
from sheepop.plan.timing import Course, Interval
from sheepop.report import Page, data_size, duration

_SHOWN_LAYOUTS = 5
_SUMS = ("preparation", "step", "tensors", "peak")  # of memory, which are no parts of it


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run on a `machine`. A part is None, or empty, if it was not found out.

    Of the `memory` on one device, `usable` bytes are free; `tensors` is the measured peak of its tensors in two steps,
    and `process` that of the process in the first steps and the report.
    `layouts` are for a machine that is not here, the fastest first.
    """

    machine: str
    parameters: int | None
    findings: Sequence[Finding]
    memory: MemoryParts | None = None
    usable: float | None = None
    tensors: int | None = None
    process: int | None = None
    rows: int | None = None
    largest_rows: int | None = None
    disk: Disk | None = None
    course: Course | None = None
    budget: Budget | None = None
    layouts: Sequence[Laid] = ()
    assumed: Sequence[str] = field(default_factory=list)

    @property
    def ends(self) -> bool:
        """Whether something would end the run."""
        return any(finding.ends for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data: bytes, seconds, operations and US dollars."""
        course, memory = self.course, self.memory
        return {
            "machine": self.machine,
            "parameters": self.parameters,
            "ends": self.ends,
            "findings": [asdict(finding) for finding in self.findings],
            "memory": None if memory is None else memory.to_dict(),
            "measured_tensors": self.tensors,
            "measured_process": self.process,
            "usable_memory": self.usable,
            "micro_batch": self.rows,
            "largest_micro_batch": self.largest_rows,
            "disk": None if self.disk is None else {**asdict(self.disk), "needed": self.disk.needed},
            "time": None if course is None else _time(course),
            "budget": None if course is None else self._within(course),
            "layouts": [_layout(laid) for laid in self.layouts],
            "assumed": list(self.assumed),
        }

    def _within(self, course: Course) -> dict[str, Any] | None:
        if self.budget is None:
            return None
        steps = course.steps_within(self.budget)
        return {
            "given": self.budget.words,
            "steps": steps,
            "tokens": None if steps is None else [round(count * course.tokens) for count in steps],
        }

    def lines(self) -> Iterator[str]:
        """The plan as lines of text."""
        size = "" if self.parameters is None else f", {self.parameters:,} parameters"
        yield f"Plan for {self.machine}{size}"
        for finding in self.findings:
            yield f"{'Would end the run' if finding.ends else 'To know'} ({finding.check}): {finding.words}"
        if not self.findings:
            yield "Nothing was found that would end the run." if not self.layouts else "A layout fits this machine."
        yield from (f"{name}: {words}" for name, words in self._facts())
        for number, laid in enumerate(self.layouts[:_SHOWN_LAYOUTS], start=1):
            yield f"Layout {number}: {duration_of(laid.seconds)} a step. {laid.plan}"
            yield f"  {' '.join(f'{key}={value_text(value)}' for key, value in laid.settings.items())}"
        yield from (f"Assumed: {words}" for words in self.assumed)

    def _facts(self) -> Iterator[tuple[str, str]]:
        """Names and words of what the run needs."""
        if (memory := self.memory) is not None:
            peak = f"{data_size(memory.peak)} at the peak"
            free = "" if self.usable is None else f"; {data_size(self.usable)} are free"
            parts = ", ".join(f"{name} {data_size(size)}" for name, size in self._parts())
            if memory.preparation == memory.peak:
                peak += ", before the first step"
            yield "Memory", f"{peak}; by part {parts}{free}"
            if self.tensors is not None:
                seen = f"{data_size(self.tensors)} of tensors, counted {data_size(memory.tensors)}"
                yield "Measured", f"{seen}, in two steps with the longest rows"
            if self.process:
                yield "Process", f"{data_size(self.process)}, measured in the first steps and the report"
        if self.rows is not None:
            most = "none fits" if self.largest_rows is None else f"at most {self.largest_rows:,} fit"
            yield "Micro-batch", f"{counted(self.rows, 'row')}; {most}"
        if self.disk is not None:
            kept = f"{counted(self.disk.checkpoints, 'checkpoint')} of {data_size(self.disk.checkpoint)}"
            free = f"{data_size(self.disk.free)} are free"
            yield "Disk", f"{data_size(self.disk.needed)}, with {kept} at a time; {free}"
        if (course := self.course) is None:
            return
        yield "Step", f"{duration_of(course.step)}, {course.tokens:,.0f} tokens, {course.flops:.3g} operations"
        if course.steps:
            yield "Run", f"{counted(course.steps, 'step')} in {duration_of(course.seconds)}"
            rest = ", ".join(f"{name} {duration(value)}" for name, value in course.besides.items() if value)
            if rest:
                yield "Besides steps", rest
            if course.usd is not None:
                yield "Cost", f"{course.usd.middle:,.2f} USD ({course.usd.low:,.2f} to {course.usd.high:,.2f})"
        if self.budget is not None and (steps := course.steps_within(self.budget)) is not None:
            fewest, middle, highest = steps
            tokens = f"{middle * course.tokens:,.0f} tokens"
            yield f"In {self.budget.words}", f"{counted(middle, 'step')} ({fewest:,} to {highest:,}), {tokens}"

    def _parts(self) -> list[tuple[str, float]]:
        assert self.memory is not None
        parts = self.memory.to_dict()
        return [(name, size) for name, size in parts.items() if size and name not in _SUMS]

    def page(self) -> Page:
        """The plan as a page."""
        page = Page(f"Plan for {self.machine}", footer="Written by sheepop plan.")
        page.add_section("What would end the run")
        if self.findings:
            header = ("Check", "Ends the run", "What to do")
            page.add_table(header, [(each.check, each.ends, each.words) for each in self.findings])
        else:
            page.add_text("Nothing was found.")
        page.add_section("What it needs")
        page.add_facts({"Parameters": self.parameters, **dict(self._facts())})
        if self.memory is not None:
            bars = {name: size / 1e6 for name, size in self._parts()}
            page.add_bars(bars, "Memory by part", unit="MB")
        if self.layouts:
            page.add_section("Layouts")
            columns = ("Layout", "Settings", "Rows", "Peak, GB", "Sent a step, GB", "Step, s", "from", "to")
            page.add_table(columns, [_row(laid) for laid in self.layouts])
            for laid in self.layouts[:1]:
                page.add_bars({name: size / 1e9 for name, size in laid.plan.held.items()}, "Held by a rank", unit="GB")
                page.add_bars({name: size / 1e9 for name, size in laid.plan.sent.items()}, "Sent in a step", unit="GB")
        if self.assumed:
            page.add_section("Assumed")
            for words in self.assumed:
                page.add_text(words)
        return page


def duration_of(seconds: Interval) -> str:
    """An interval of seconds in words."""
    if seconds.high < 1:
        middle, low, high = (f"{value * 1000:,.3g} ms" for value in (seconds.middle, seconds.low, seconds.high))
    else:
        middle, low, high = (duration(value) for value in (seconds.middle, seconds.low, seconds.high))
    return f"{middle} ({low} to {high})"


def _time(course: Course) -> dict[str, Any]:
    usd = course.usd
    return {
        "steps": course.steps,
        "step_seconds": asdict(course.step),
        "besides_seconds": dict(course.besides),
        "processor_share": course.quiet,
        "seconds": asdict(course.seconds) if course.steps else None,
        "usd": asdict(usd) if usd is not None and course.steps else None,
        "tokens_per_step": course.tokens,
        "flops_per_step": course.flops,
    }


def _layout(laid: Laid) -> Mapping[str, Any]:
    return {
        "settings": laid.settings,
        "words": laid.plan.layout.words,
        "micro_batches": laid.micro_batches,
        "held": dict(laid.plan.held),
        "sent": dict(laid.plan.sent),
        "peak": laid.plan.peak,
        "step_seconds": asdict(laid.seconds),
    }


def _row(laid: Laid) -> Sequence[Any]:
    settings = " ".join(f"{key}={value_text(value)}" for key, value in laid.settings.items())
    peak, sent = laid.plan.peak / 1e9, sum(laid.plan.sent.values()) / 1e9
    times = (laid.seconds.middle, laid.seconds.low, laid.seconds.high)
    return (laid.plan.layout.words, settings, laid.rows, peak, sent, *times)
