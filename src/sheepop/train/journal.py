"""What a run tells while it trains: its metrics, samples, speed and seconds, to files, sinks and whoever looks on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sheepop.core.console import Console, Progress
from sheepop.core.facts import counted
from sheepop.train.counters import TrainingState
from sheepop.train.live_view import LEGEND, LiveView, memory_in_use
from sheepop.train.metrics import EVALUATION, VERIFICATION, JsonLines
from sheepop.train.sinks import Sink
from sheepop.train.source import PreparedStep
from sheepop.train.step import Outcome
from sheepop.train.validation import Scores


class Throughput:
    """Counts tokens and operations of steps against the time since the last look, less what was spent on other work.

    `flops_per_token` gives the operations of a token by the length of its row, which a run may vary. `peak_flops` is
    what the machine was measured to do in a second, `nominal_flops` what its data sheet says, None where it is not
    known.
    """

    def __init__(
        self,
        flops_per_token: Callable[[int], float],
        peak_flops: float,
        nominal_flops: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peak_flops, self.nominal_flops = peak_flops, nominal_flops
        self._flops_per_token, self._clock = flops_per_token, clock
        self.restart()

    def restart(self) -> None:
        """Forgets what was counted."""
        self._begin(self._clock())

    def count(self, step: PreparedStep) -> None:
        """Counts a step that was taken."""
        self._tokens += step.num_computed
        self._flops += step.num_computed * self._flops_per_token(step.row_length)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time within the block is not that of steps."""
        started = self._clock()
        try:
            yield
        finally:
            self._since += self._clock() - started

    def take(self) -> dict[str, float]:
        """Tokens per second and the shares of the peaks since the last look; counting begins anew."""
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        flops = self._flops / seconds
        rates = {"tokens_per_second": self._tokens / seconds, "mfu": flops / self.peak_flops}
        if self.nominal_flops is not None:
            rates["mfu_nominal"] = flops / self.nominal_flops
        self._begin(now)
        return rates

    def _begin(self, now: float) -> None:
        self._since, self._tokens, self._flops = now, 0, 0.0


class Machine:
    """What a run takes of its machine: memory, and processor cores on average since the last look."""

    def __init__(
        self, device: str, clock: Callable[[], float] = time.monotonic, busy: Callable[[], float] = time.process_time
    ) -> None:
        self._device, self._clock, self._busy = device, clock, busy
        self._since, self._busy_before = clock(), busy()

    def take(self) -> dict[str, float]:
        """Bytes in use, and how many cores computed on average; counting begins anew."""
        now, busy = self._clock(), self._busy()
        cores = (busy - self._busy_before) / max(now - self._since, 1e-9)
        self._since, self._busy_before = now, busy
        return {"memory_bytes": memory_in_use(self._device)[1], "busy_cores": cores}


class Journal:
    """Keeps the rows of a run. `begin` comes before all else; a row is in ``metrics.jsonl`` before anybody hears it.

    With `is_sampled`, validations read a part of what is held out. `measure` finds what else the rows of steps say.
    """

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

    def begin(self, progress: Progress, total_steps: int, state: TrainingState) -> None:
        """Starts the clocks and the live view of a run that stands at `state`."""
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
        if not self._console.is_live:
            self._console.info(f"Terms: {'; '.join(LEGEND)}")

    def recorded(self, state: TrainingState) -> TrainingState:
        """`state` with the time that the run has taken and the lengths of its logs, as a checkpoint needs them."""
        return state.after(seconds=self.seconds, metrics_bytes=self.metrics.length, samples_bytes=self.samples.length)

    def sync(self) -> None:
        """Waits until all rows are on the disk; another thread may do so."""
        self.metrics.sync()
        self.samples.sync()

    def close(self) -> None:
        """Closes the files."""
        self.metrics.close()
        self.samples.close()

    def step_done(self, prepared: PreparedStep) -> None:
        """Counts a step that was taken, or passed over with its data computed."""
        self.throughput.count(prepared)
        self._progress.advance()

    def paced(self, state: TrainingState, before: int, now: int) -> None:
        """Says that the run takes `now` steps in all, where it was to take `before`."""
        self._view.total_steps = now
        self._progress.resize(now)
        why = "finish in time" if now < before else "use the time that is left"
        self._console.info(f"Step {state.step:,}: {now:,} steps in total instead of {before:,}, to {why}.")

    def moved(self, steps: int) -> None:
        """Hears that the run stands `steps` further without having counted them; less than 0 for a way back."""
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
        """Writes the numbers of the step that was taken last, and what else was `measured` in it."""
        scale = state.loss_scale
        rates = self.throughput.take()
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

    def validated(self, state: TrainingState, scores: Scores) -> None:
        """Writes the scores on what is held out."""
        self._write(state, split="validation", **scores.metrics(), tokens=state.tokens, seconds=self.seconds)
        self._console.info(f"Step {state.step:,}: held out, {scores.extent}: {scores}")

    def evaluated(self, state: TrainingState, scores: Sequence[Mapping[str, Any]]) -> None:
        """Writes what evaluations found, each score under the name of its evaluation and its measure."""
        row = {f"{score['name']}/{score['measure']}": score["value"] for score in scores}
        self._write(state, split=EVALUATION, **row, tokens=state.tokens, seconds=self.seconds)
        firsts = {score["name"]: score for score in reversed(scores)}
        found = ", ".join(f"{name} {score['measure']} {score['value']:.3f}" for name, score in sorted(firsts.items()))
        self._console.info(f"Step {state.step:,}: evaluated, {found}")

    def sampled(self, state: TrainingState, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes down what the model wrote."""
        for row in rows:
            self.samples.append({"step": state.step, **row})
            self._view.sampled({"step": state.step, **row})
            lines = f"{row['prompt']}{row['text']}".splitlines()
            self._console.info(
                "\n".join([f"Step {state.step:,}, the model writes:", *(f"  | {line}" for line in lines)])
            )

    def trouble(self, state: TrainingState, row: Mapping[str, Any]) -> None:
        """Writes down a step that was not taken."""
        self._write(state, split="trouble", **row)

    def corrupted(self, state: TrainingState, differences: Sequence[str]) -> None:
        """Says what differed between two computations of one micro-batch of the step after `state`; the run goes on."""
        row = {"step": state.step, "split": VERIFICATION, "differences": list(differences)}
        if row not in self.metrics.kept:  # of a step that is taken anew
            self._write(state, **row)
        self._console.warn(
            f"Step {state.step + 1:,}: a micro-batch computed twice, or weights that ranks have alike, differ in "
            f"{counted(len(differences), 'place')}: {'; '.join(differences[:3])}. The memory or the processor may "
            "be faulty; on a GPU, some operations are repeatable only with deterministic=true."
        )

    def go_back(self, state: TrainingState) -> None:
        """Cuts the logs to what they were at `state`."""
        # What the steps to come will not say again: the batches that stay left out, and what the machine did wrong.
        self.metrics.cut(state.metrics_bytes, lambda row: row["split"] == VERIFICATION or row.get("policy") == "rewind")
        self.samples.cut(state.samples_bytes)
        self.throughput.restart()
        self._machine = Machine(self._device)
        self._view.best = state.best

    def _write(self, state: TrainingState, **row: Any) -> None:
        row = {"step": state.step, **row}
        self.metrics.append(row)
        self._view.heard(row)
        for sink in self._sinks:
            sink.write(row)

    @property
    def seconds(self) -> float:
        """The time that the run has taken, that of earlier sessions included."""
        return self._seconds_before + time.monotonic() - self._started
