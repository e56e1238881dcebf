"""The training loop: one life of a run, from its first step to its last, for every objective.

Now and then log, now and then validate and evaluate, now and then sample, now and then save, and one step at a time. A
signal may come anywhere: what can be done again is left at once, what cannot is finished, and everything is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sheepop.core.console import Console
from sheepop.core.errors import Interrupted, SheepOpError, StorageError, TrainingError
from sheepop.core.interrupts import StopRequestedError, catch_interrupts
from sheepop.core.random import seed_torch
from sheepop.model import Transformer
from sheepop.train.agenda import EVALUATE, SAVE, VALIDATE, Agenda
from sheepop.train.checkpointer import Checkpointer
from sheepop.train.counters import TrainingState
from sheepop.train.journal import Journal
from sheepop.train.pace import Deadline
from sheepop.train.prefetch import Prefetch
from sheepop.train.profiler import AroundStep, unobserved
from sheepop.train.rescue import Rescue
from sheepop.train.schedule import Schedule
from sheepop.train.source import PreparedStep, StepSource
from sheepop.train.step import Outcome, StepRunner
from sheepop.train.trouble import Limits, TroubleConfig, find_trouble
from sheepop.train.validation import Scores


@dataclass
class Trainer:
    """A run about to start or go on. `validate`, `evaluate` and `sample` are handed in by whoever owns those stages.

    The last `keep_checkpoints` stay, beside the best and the milestones; with `saves_the_beginning` there is one of
    step 0. With a `deadline` the steps are made fewer or more on the way.
    """

    runner: StepRunner
    source: StepSource
    agenda: Agenda
    schedule: Schedule
    journal: Journal
    checkpointer: Checkpointer
    validate: Callable[[], Scores] | None  # None when nothing is held out
    sample: Callable[[int], list[dict[str, Any]]]
    seed: int
    keep_checkpoints: int
    trouble: TroubleConfig = field(default_factory=TroubleConfig)
    state: TrainingState = field(default_factory=TrainingState)
    deadline: Deadline | None = None
    around_step: AroundStep = unobserved
    console: Console = field(default_factory=Console.silent)
    saves_the_beginning: bool = False
    evaluate: Callable[[], Sequence[Mapping[str, Any]]] | None = None

    @property
    def model(self) -> Transformer:
        """The model with the weights that are trained."""
        return self.runner.placement.model

    def run(self) -> TrainingState:
        """Trains to the last step, or until patience ends.

        Raises `Interrupted`, with everything saved, when a signal asks for an end, and `TrainingError`, with
        everything saved, when the numbers are in trouble and the policy is to stop. Whatever else goes wrong comes out
        as it is, once everything up to the last whole step is saved.
        """
        total = self.agenda.total_steps
        self._saved: TrainingState | None = self.state if self.state.step else None
        self._is_whole = True
        self._ending = 0.0
        with (
            catch_interrupts() as self._interruption,
            Prefetch(self.source.prepare, self.source.ahead) as self._prefetch,
            self.console.progress("Training", total, "steps", done=self.state.step) as progress,
            closing(self.checkpointer),
        ):
            self.journal.begin(progress, total, self.state)
            self._prune(self.state.step)  # which a kill may have kept from being done
            self._save_the_beginning()
            try:
                self._do_what_is_due()
                while not self.runner.placement.greatest(self.agenda.is_over(self.state)):
                    self._heed_signals()
                    with self.around_step(self.state.step):
                        self._step()
                    self._do_what_is_due()
                    self._look_at_the_clock()
            except StopRequestedError:
                self.save()
            except Exception as error:
                self._save_after(error)
                raise
            self.checkpointer.wait()
        self._say_how_it_ended()
        return self.state

    def _step(self) -> None:
        """One optimizer step over the global batch, unless its numbers are in trouble."""
        self.checkpointer.check()
        state, rate = self.state, self.schedule(self.agenda.pace.place(self.state.step))
        scale = state.loss_scale
        with self._leaving():
            prepared = self._prefetch.take(state.batch_number)
            gradients = self.runner.gradients(
                prepared,
                loss_scale=scale.scale if scale else 1.0,
                before_forward=lambda number: seed_torch(self.seed, "dropout", state.step, number),
                verified=self.agenda.verifies(state.step + 1),
            )
        if gradients.differences:
            self.journal.corrupted(state, gradients.differences)  # only now: a step that is left is taken again
        limits = Limits.of(state.window, self.trouble)
        outcome = self.runner.update(gradients, limits, number=state.step, rate=rate)
        if scale:
            self.state = self.state.after(loss_scale=scale.after(finite=math.isfinite(outcome.norm)))
        if outcome.is_taken:
            window = state.window.after(outcome.objective, outcome.norm, self.trouble.window)
            self._go_on(prepared, outcome, rate, window=window, skips_in_a_row=0)
        elif scale and math.isfinite(outcome.objective) and not math.isfinite(outcome.norm):
            self._go_on(prepared, outcome, rate)  # the scaled gradients overflowed, and the scale is smaller now
        else:
            self._meet_trouble(outcome)

    def _go_on(self, prepared: PreparedStep, outcome: Outcome, rate: float, **changes: Any) -> None:
        """Counts a step, and logs it now and then."""
        step = self.state.step + 1
        # First of all, so that nothing that fails below leaves moved weights with the counters of before.
        self.state = self.state.after(
            step=step, tokens=self.state.tokens + prepared.num_reported, due=self.agenda.after(step), **changes
        )
        self.journal.step_done(prepared)
        if self.agenda.logs(step):
            measured = {**prepared.measured, **self.runner.objective.metrics(outcome.losses)}
            self.journal.log(self.state, outcome, prepared, learning_rate=rate, measured=measured)

    def _meet_trouble(self, outcome: Outcome) -> None:
        """Ends the run, passes over the batch, or goes back to before it, as the policy says."""
        trouble = find_trouble(outcome.objective, outcome.norm, self.state.window, self.trouble)
        assert trouble is not None  # the limits are those that it goes by
        before = self.state.step
        rescue = Rescue(self.trouble, self.checkpointer, self.console, self.source.describe)
        self.state = rescue.meet(trouble, self.state, self)
        if self.state.step > before:
            self.state = self.state.after(due=self.agenda.after(self.state.step))
        self.journal.moved(self.state.step - before)

    def _do_what_is_due(self) -> None:
        """Validates, samples and saves; what a signal leaves undone is remembered with the state."""
        started, validates = self.journal.seconds, VALIDATE in self.state.due
        while self.state.due:
            name, *rest = self.state.due
            if name == SAVE:
                self.state = self.state.after(due=tuple(rest))
                self.save()
            elif name == VALIDATE:
                self._validate(tuple(rest))
            elif name == EVALUATE:
                self._evaluate(tuple(rest))
            else:
                self._sample(tuple(rest))
        if validates:
            self._ending = self.journal.seconds - started

    def _look_at_the_clock(self) -> None:
        """Changes the steps that are left where the time that is left asks for it."""
        if self.deadline is None or self.agenda.is_over(self.state):
            return
        latest = self.runner.placement.greatest
        pace = self.deadline.revise(
            self.agenda.pace, self.state.step, latest(self.journal.seconds), latest(self._ending)
        )
        if pace is not None:
            self.deadline.record(pace)
            self.journal.paced(self.state, self.agenda.total_steps, pace.total_steps)
            self.agenda = replace(self.agenda, pace=pace)

    def _validate(self, rest: tuple[str, ...]) -> None:
        """Scores the held-out text and remembers the best; `rest` is what is due after it."""
        assert self.validate is not None
        with self._evaluating():
            scores = self.validate()
        self.state = self.agenda.after_validation(self.state.after(due=rest), scores.loss)
        # How much was read stands in the name, since it may be a sample.
        about = {"kind": "validation", "name": f"held out, {scores.extent}"}
        measured = scores.metrics().items()
        self.state = self.state.scored([{**about, "measure": name, "value": value} for name, value in measured])
        self.journal.validated(self.state, scores)

    def _evaluate(self, rest: tuple[str, ...]) -> None:
        """Measures what the model can do; `rest` is what is due after it."""
        scores: Sequence[Mapping[str, Any]] = ()
        if self.evaluate is not None:  # a run that goes on may have left it out
            with self._evaluating():
                scores = self.evaluate()
        self.state = self.state.after(due=rest)
        if scores:
            self.state = self.state.scored(scores)
            self.journal.evaluated(self.state, scores)

    def _sample(self, rest: tuple[str, ...]) -> None:
        """Lets the model write; `rest` is what is due after it."""
        with self._evaluating():
            rows = self.sample(self.state.step)
        self.state = self.state.after(due=rest)
        self.journal.sampled(self.state, rows)

    def save(self) -> None:
        """Starts writing a checkpoint of everything as it is now, unless that is written already."""
        if self._saved is not None and self._saved == self.state:
            return
        self.state = state = self.journal.recorded(self.state)

        def finish_pointers() -> None:
            if state.best_step == state.step:
                self.checkpointer.run.mark_best(state.step)
            self._prune(state.step)

        with self.journal.throughput.paused():
            self.checkpointer.save(state, before=self.journal.sync, after=finish_pointers)
        self._saved = state

    def go_back(self, step: int) -> TrainingState:
        """Restores the checkpoint of `step`; the logs are cut to what they were then, and later checkpoints go."""
        self._is_whole = False
        state = self.checkpointer.load(step)
        self.checkpointer.run.mark_latest(step)
        self.checkpointer.run.forget_after(step)
        state = self.checkpointer.with_best(state, self.console.warn)
        self.journal.go_back(state)
        self._is_whole = True
        return state

    def write_trouble(self, row: dict[str, Any]) -> None:
        """Writes down a step that was not taken."""
        self.journal.trouble(self.state, row)

    def _heed_signals(self) -> None:
        """Ends the run between two steps when a signal asked for it, on any rank."""
        number = int(self.runner.placement.greatest(self._interruption.signal_number or 0))
        if number:
            self._interruption.told(number)
            raise StopRequestedError

    def _leaving(self) -> AbstractContextManager[None]:
        """Work that a signal ends at once, where no other rank would wait for it in vain."""
        return self._interruption.leaving() if self.runner.placement.may_be_left else nullcontext()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model as it is judged, in time that is not that of steps."""
        with (
            self.journal.throughput.paused(),
            self.runner.evaluation.applied(),
            self.runner.placement.evaluating(),
            self._leaving(),  # innermost: taking weights in and out is never left half done
        ):
            yield

    def _prune(self, newest: int) -> None:
        self.checkpointer.run.prune(newest, self.keep_checkpoints, self.agenda.milestones)

    def _save_the_beginning(self) -> None:
        """Where a run may have to go back to it, or its weights are not made of the seed, step 0 is a checkpoint."""
        may_go_back = "rewind" in (self.trouble.non_finite, self.trouble.spike)
        if (may_go_back or self.saves_the_beginning) and not self.checkpointer.run.steps():
            self.save()

    def _save_after(self, error: Exception) -> None:
        """Saves the last whole step before `error` ends the run; never weights that are half changed."""
        if isinstance(error, StorageError):
            return  # where a line cannot be written, a checkpoint cannot
        if not self.runner.placement.may_be_left and not isinstance(error, TrainingError):
            self.checkpointer.give_up()  # other ranks may have no part in it
            return
        if self.runner.is_updating or not (self._is_whole and self.runner.evaluation.are_whole):
            with suppress(Exception):
                self.checkpointer.wait()
            latest = self.checkpointer.run.pointer("latest")
            holds = (
                "there is no checkpoint yet" if latest is None else f"the last checkpoint, step {latest:,}, is valid"
            )
            self.console.warn(f"The weights were being changed, so they are not saved; {holds}.")
            return
        try:
            self.save()
            self.checkpointer.wait()
        except Exception as failure:
            self.console.warn(f"Step {self.state.step:,} was not saved: {failure}")
        else:
            if not isinstance(error, SheepOpError):
                self.console.warn(f"Everything up to step {self.state.step:,} is saved.")

    def _say_how_it_ended(self) -> None:
        """Raises `Interrupted` after a signal; tells of a run that stopped early."""
        step, total = self.state.step, self.agenda.total_steps
        if self._interruption.signal_number is not None:
            raise Interrupted(
                f"Stopped after step {step:,} of {total:,}; everything is saved in {self.checkpointer.run.path}.",
                self._interruption.signal_number,
            )
        if step < total:
            self.console.info(
                f"Stopped early after step {step:,} of {total:,}: "
                f"{self.state.stale_validations} validations in a row brought no improvement."
            )
