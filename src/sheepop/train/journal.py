"""The log of a run while it trains: metrics, samples and speed, to files, sinks, and the live view."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console, Progress
from sheepop.core.facts import counted
from sheepop.core.json_lines import JsonLines, NoLines
from sheepop.train.counters import TrainingState
from sheepop.train.live_view import LEGEND, LiveView, memory_in_use
from sheepop.train.sinks import RunDescription, Sink, open_sinks
from sheepop.train.source import PreparedStep
from sheepop.train.step import Outcome
from sheepop.train.validation import Scores

# Texts that steps learn from are added to the log of samples up to this length.
_MOST_SAMPLE_BYTES = 2**26


def is_verification(row: Mapping[str, Any]) -> bool:
    """Whether a row of the metrics reports silent corruption; a repeated step may not show it again."""
    return row.get("split") == "verification"


class Throughput:
    """Training speed: tokens and operations of steps per second since the last `take`, without time for other work.

    `flops_of` gives the operations of a step. `peak_flops` is the measured peak of the machine in FLOP/s, raised to
    what steps reach; `nominal_flops` is that of its data sheet, or None if it is unknown.
    """

    _since: float
    _tokens: int
    _flops: float

    def __init__(
        self,
        flops_of: Callable[[PreparedStep], float],
        peak_flops: float,
        nominal_flops: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peak_flops, self.nominal_flops = peak_flops, nominal_flops
        self.flops_of, self._clock = flops_of, clock
        self.restart()

    def restart(self) -> None:
        """Sets the counts to 0."""
        self._begin(self._clock())

    def count(self, step: PreparedStep) -> None:
        """Counts the tokens and operations of a step."""
        self._tokens += step.num_computed
        self._flops += self.flops_of(step)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time within the block out."""
        started = self._clock()
        try:
            yield
        finally:
            self._since += self._clock() - started

    def take(self) -> dict[str, float]:
        """Returns tokens per second and the shares of the peaks since the last call, and sets the counts to 0."""
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        flops = self._flops / seconds
        self.peak_flops = max(flops, self.peak_flops)  # which was then measured on a busy machine
        rates = {"tokens_per_second": self._tokens / seconds, "mfu": flops / self.peak_flops}
        if self.nominal_flops is not None:
            rates["mfu_nominal"] = flops / self.nominal_flops
        self._begin(now)
        return rates

    def _begin(self, now: float) -> None:
        self._since, self._tokens, self._flops = now, 0, 0.0


class Machine:
    """A run's use of its machine: memory, and the processor cores that were busy on average."""

    def __init__(
        self, device: str, clock: Callable[[], float] = time.monotonic, busy: Callable[[], float] = time.process_time
    ) -> None:
        self._device, self._clock, self._busy = device, clock, busy
        self._since, self._busy_before = clock(), busy()

    def take(self) -> dict[str, float]:
        """Returns the bytes in use and the mean number of busy cores since the last call."""
        now, busy = self._clock(), self._busy()
        cores = (busy - self._busy_before) / max(now - self._since, 1e-9)
        self._since, self._busy_before = now, busy
        return {"memory_bytes": memory_in_use(self._device)[1], "busy_cores": cores}


class Journal:
    """Writes the rows of a run, first to ``metrics.jsonl``, then to the live view and the sinks. Call `begin` first.

    `is_sampled` means that validations read only a part of the held-out text. `measure` returns further metrics for the
    rows of steps.
    """

    # `begin` makes these.
    _progress: Progress
    _machine: Machine
    _view: LiveView
    _seconds_before: float
    _started: float

    def __init__(
        self,
        metrics: JsonLines,
        samples: JsonLines,
        throughput: Throughput,
        *,
        device: str,
        precision: str,
        sinks: Sequence[Sink] = (),
        console: Console | None = None,
        is_sampled: bool = False,
        measure: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.metrics, self.samples, self.throughput = metrics, samples, throughput
        self._device, self._precision, self._sinks = device, precision, sinks
        self._console = console or Console.silent()
        self._is_sampled, self._measure = is_sampled, measure
        self._said_full = False

    @classmethod
    @contextmanager
    def opened(
        cls,
        run: RunDirectory,
        state: TrainingState,
        sinks: Sequence[str],
        description: RunDescription,
        console: Console,
        *,
        writes: bool = True,
        **options: Any,
    ) -> Iterator[Self]:
        """Yields the log of `run`, whose files are cut to what they were at `state`; closes it with its `sinks`.

        A rank that does not write discards all rows. `options` are further arguments of the class.
        """
        with ExitStack() as stack:
            opened = stack.enter_context(open_sinks(sinks if writes else (), description, console))
            metrics, samples = (
                (
                    JsonLines(run.metrics_file, state.metrics_bytes, is_verification),
                    JsonLines(run.samples_file, state.samples_bytes),
                )
                if writes
                else (NoLines(), NoLines())
            )
            stack.callback(metrics.close)
            stack.callback(samples.close)
            yield cls(metrics, samples, sinks=[opened], console=console, **options)

    def begin(self, progress: Progress, total_steps: int, state: TrainingState) -> None:
        """Starts the clocks and the live view of a run in `state`."""
        self._progress = progress
        self._seconds_before, self._started = state.seconds, time.monotonic()
        self.throughput.restart()
        self._machine = Machine(self._device)
        self._view = LiveView(
            progress,
            total_steps,
            state.step,
            self._device,
            self._precision,
            self.throughput.peak_flops,
            self.throughput.nominal_flops,
            best=state.best,
            is_sampled=self._is_sampled,
        )
        self._console.info(f"Terms: {LEGEND}")

    def recorded(self, state: TrainingState) -> TrainingState:
        """`state` with the run's seconds and the lengths of its logs, as a checkpoint needs them."""
        return state.after(seconds=self.seconds, metrics_bytes=self.metrics.length, samples_bytes=self.samples.length)

    def sync(self) -> None:
        """Waits until all rows are on the disk; may be called from another thread."""
        self.metrics.sync()
        self.samples.sync()

    def close(self) -> None:
        """Closes the files."""
        self.metrics.close()
        self.samples.close()

    def step_done(self, prepared: PreparedStep) -> None:
        """Counts a step that was taken, or skipped because its scaled gradients overflowed."""
        self.throughput.count(prepared)
        self._progress.advance()

    def paced(self, total_steps: int) -> None:
        """Shows that the run takes `total_steps` now."""
        self._view.total_steps = total_steps
        self._progress.resize(total_steps)

    def moved(self, steps: int) -> None:
        """Moves the progress bar by `steps`; negative after a rewind."""
        self._progress.advance(steps)

    def log(
        self,
        state: TrainingState,
        outcome: Outcome,
        prepared: PreparedStep,
        *,
        learning_rate: float,
        measured: Mapping[str, Any],
    ) -> None:
        """Writes the metrics of the last step, with those in `measured`, and the texts that it learnt from."""
        scale = state.loss_scale
        rates = self.throughput.take()
        self._view.peak_flops = self.throughput.peak_flops
        self._write(
            state,
            split="train",
            loss=outcome.loss,
            learning_rate=learning_rate,
            grad_norm=outcome.norm,
            tokens=state.tokens,
            **rates,
            **self._machine.take(),
            **self._measure(),
            seconds=self.seconds,
            **measured,
            **({"loss_scale": scale.scale, "skipped_steps": scale.skipped_steps} if scale else {}),
            **({} if prepared.batch_hash is None else {"batch_hash": prepared.batch_hash}),
        )
        if prepared.samples and self.samples.length > _MOST_SAMPLE_BYTES:
            if not self._said_full:
                self._console.warn(f"{self.samples.path} is full, so answers are no longer added to it.")
            self._said_full = True
            return
        for row in prepared.samples:
            self.samples.append({"step": state.step, **row})

    def validated(self, state: TrainingState, scores: Scores) -> None:
        """Writes the scores on the held-out split."""
        self._write(state, split="validation", **scores.metrics(), tokens=state.tokens, seconds=self.seconds)
        self._console.info(f"Step {state.step:,}: held out, {scores.extent}: {scores}")

    def evaluated(self, state: TrainingState, scores: Sequence[Mapping[str, Any]]) -> None:
        """Writes the scores of evaluations, each under the name of its evaluation and its measure."""
        row = {f"{score['name']}/{score['measure']}": score["value"] for score in scores}
        self._write(state, split="evaluation", **row, tokens=state.tokens, seconds=self.seconds)
        firsts = {score["name"]: score for score in reversed(scores)}
        found = ", ".join(f"{name} {score['measure']} {score['value']:.3f}" for name, score in sorted(firsts.items()))
        self._console.info(f"Step {state.step:,}: evaluated, {found}")

    def analysed(self, state: TrainingState, row: Mapping[str, Any]) -> None:
        """Writes what an analysis measured around the last step."""
        self._write(state, split="analysis", **row)

    def sampled(self, state: TrainingState, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes the samples."""
        for row in rows:
            self.samples.append({"step": state.step, **row})
            self._view.sampled({"step": state.step, **row})
            lines = f"{row['prompt']}{row['text']}".splitlines()
            self._console.info(
                "\n".join([f"Step {state.step:,}, the model writes:", *(f"  | {line}" for line in lines)])
            )

    def trouble(self, state: TrainingState, row: Mapping[str, Any]) -> None:
        """Writes a row about a step that was not taken."""
        self._write(state, split="trouble", **row)

    def corrupted(self, state: TrainingState, differences: Sequence[str]) -> None:
        """Writes and prints the differences between two computations of the step after `state`; the run goes on."""
        row = {"step": state.step, "split": "verification", "differences": list(differences)}
        if row not in self.metrics.kept:  # it is there already if the step is repeated
            self._write(state, **row)
        self._console.warn(
            f"Step {state.step + 1:,}: two computations of one step, or the copies of a weight on several ranks, "
            f"differ in {counted(len(differences), 'place')}: {'; '.join(differences[:3])}. The memory or the "
            "processor may be faulty; on a GPU, some operations are repeatable only with deterministic=true."
        )

    def go_back(self, state: TrainingState) -> None:
        """Cuts the logs to their lengths at `state`."""
        # Rows that the repeated steps will not write again: batches that stay skipped, and errors of the machine.
        self.metrics.cut(state.metrics_bytes, lambda row: is_verification(row) or row.get("policy") == "rewind")
        self.samples.cut(state.samples_bytes)
        self.throughput.restart()
        self._machine = Machine(self._device)
        self._view.best = state.best

    def _write(self, state: TrainingState, **row: Any) -> None:
        row = {"step": state.step, **row}
        self.metrics.append(row)
        self._view.update(row)
        for sink in self._sinks:
            sink.write(row)

    @property
    def seconds(self) -> float:
        """The duration of the run, including earlier sessions."""
        return self._seconds_before + time.monotonic() - self._started
