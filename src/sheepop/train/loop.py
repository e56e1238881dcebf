"""The training loop of every objective: it takes steps, logs, validates, evaluates, samples and saves.

A signal may arrive anywhere: work that can be repeated is abandoned at once, other work is finished, and everything is
saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sheepop.core.console import Console
from sheepop.core.errors import Interrupted, SheepOpError, StorageError, TrainingError, first_few
from sheepop.core.interrupts import Interruption, StopRequestedError, catch_interrupts
from sheepop.core.random import seed_torch
from sheepop.model import Transformer
from sheepop.train.agenda import EVALUATE, SAVE, VALIDATE, Agenda
from sheepop.train.checkpointer import Checkpointer
from sheepop.train.counters import TrainingState
from sheepop.train.journal import Journal
from sheepop.train.prefetch import Prefetch
from sheepop.train.profiler import AroundStep, unobserved
from sheepop.train.schedule import Deadline, Schedule
from sheepop.train.source import PreparedStep, StepSource
from sheepop.train.step import Outcome, StepRunner
from sheepop.train.trouble import Limits, TroubleConfig, final_words, find_trouble
from sheepop.train.validation import Scores

_NAMED_DOCUMENTS = 20

Measure = Callable[[], Mapping[str, Any]]
"""Measures a step that was taken; returns a row of metrics."""
Observe = Callable[[int, PreparedStep], Measure | None]
"""Called with the number of steps taken and the data of the next one, before that moves the weights.

Returns what measures the step once it is taken, or None. Neither may change weights, gradients, the state of the
optimizers or random numbers.
"""


def overlooked(step: int, prepared: PreparedStep) -> None:
    """Measures nothing."""


@dataclass
class Trainer:
    """A run that is about to start or to resume. The caller supplies `validate`, `evaluate` and `sample`.

    The run keeps the last `keep_checkpoints` checkpoints, the best one and the milestones; with `saves_the_beginning`
    it also saves step 0. With a `deadline` it changes the number of steps on the way, to end in time.
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
    observe: Observe = overlooked
    console: Console = field(default_factory=Console.silent)
    saves_the_beginning: bool = False
    evaluate: Callable[[], Sequence[Mapping[str, Any]]] | None = None
    _interruption: Interruption = field(init=False, repr=False)  # while `run` runs
    _prefetch: Prefetch[PreparedStep] = field(init=False, repr=False)  # while `run` runs
    _saved: TrainingState | None = field(default=None, init=False)  # that of the newest checkpoint
    _is_whole: bool = field(default=True, init=False)  # whether weights, optimizer and state belong to one step
    _ending: float = field(default=0.0, init=False)  # seconds of the last validation and the work due with it

    @property
    def model(self) -> Transformer:
        """The model whose weights are trained."""
        return self.runner.placement.model

    def run(self) -> TrainingState:
        """Trains to the last step, or until early stopping ends the run.

        Raises `Interrupted` after a signal, and `TrainingError` if a step is in trouble and the policy is to stop; both
        after saving everything. After any other error it saves the last whole step and raises that error.
        """
        total = self.agenda.total_steps
        self._saved = self.state if self.state.step else None
        with (
            catch_interrupts() as self._interruption,
            Prefetch(self.source.prepare, self.source.ahead) as self._prefetch,
            self.console.progress("Training", total, "steps", done=self.state.step) as progress,
            closing(self.checkpointer),
        ):
            self.journal.begin(progress, total, self.state)
            self._prune(self.state.step)  # a killed session may not have done so
            self._save_the_beginning()
            try:
                self._do_what_is_due()
                while not self.runner.placement.greatest(self.agenda.is_over(self.state)):
                    self._check_signals()
                    with self.around_step(self.state.step):
                        self._step()
                    self._do_what_is_due()
                    self._adjust_pace()
            except StopRequestedError:
                self.save()
            except Exception as error:
                self._save_after(error)
                raise
            self.checkpointer.wait()
        self._report_early_end()
        return self.state

    def _step(self) -> None:
        """Takes one optimizer step over the global batch, unless its numbers are in trouble."""
        self.checkpointer.check()
        state, rate = self.state, self.schedule(self.agenda.pace.place(self.state.step))
        scale = state.loss_scale
        with self._abandoned_on_signal():
            prepared = self._prefetch.take(state.batch_number)
            gradients = self.runner.gradients(
                prepared,
                loss_scale=scale.scale if scale else 1.0,
                before_forward=lambda number: seed_torch(self.seed, "dropout", state.step, number),
                verified=self.agenda.verifies(state.step + 1),
            )
        if gradients.differences:
            self.journal.corrupted(state, gradients.differences)  # not above: an abandoned step is taken again
        limits = Limits.of(state.window, self.trouble)
        measure = self.observe(state.step, prepared)
        outcome = self.runner.update(gradients, limits, number=state.step, rate=rate)
        if scale:
            self.state = self.state.after(loss_scale=scale.after(finite=math.isfinite(outcome.norm)))
        if outcome.is_taken:
            window = state.window.after(outcome.objective, outcome.norm, self.trouble.window)
            self._count_step(prepared, outcome, rate, window=window, skips_in_a_row=0)
            if measure is not None:
                with self.journal.throughput.paused():
                    self.journal.analysed(self.state, measure())
        elif scale and math.isfinite(outcome.objective) and not math.isfinite(outcome.norm):
            self._count_step(prepared, outcome, rate)  # the scaled gradients overflowed, and the scale is smaller now
        else:
            self._meet_trouble(outcome)

    def _count_step(self, prepared: PreparedStep, outcome: Outcome, rate: float, **changes: Any) -> None:
        """Counts a step, and logs it if that is due."""
        step = self.state.step + 1
        # The counters change first, so that after an error below they still match the weights.
        self.state = self.state.after(
            step=step, tokens=self.state.tokens + prepared.num_reported, due=self.agenda.after(step), **changes
        )
        self.journal.step_done(prepared)
        if self.agenda.logs(step):
            measured = {**prepared.measured, **self.runner.objective.metrics(outcome.losses)}
            self.journal.log(self.state, outcome, prepared, learning_rate=rate, measured=measured)

    def _meet_trouble(self, outcome: Outcome) -> None:
        """Applies the policy: ends the run, skips the batch, or goes back to an earlier checkpoint.

        Raises `TrainingError`, after saving, if the policy ends the run.
        """
        state = self.state
        config: TroubleConfig = self.trouble
        trouble = find_trouble(outcome.objective, outcome.norm, state.window, config)
        assert trouble is not None  # `Limits.of` and `find_trouble` agree
        documents = self.source.describe(state.batch_number)
        row = {
            "kind": trouble.kind,
            "policy": trouble.policy,
            "words": trouble.words,
            "at_step": state.step + 1,
            "batch": state.batch_number,
            "documents": documents,
        }
        self.console.warn(
            f"Step {state.step + 1:,}: {trouble.words} ({trouble.kind}). Policy: {trouble.policy}. The batch "
            f"contained {first_few(documents, _NAMED_DOCUMENTS) or 'documents that cannot be named'}."
        )
        back_to = self._step_to_go_back_to() if trouble.policy == "rewind" else None
        if trouble.policy == "skip" and state.skips_in_a_row < config.max_skips:
            self.journal.trouble(state, row)
            step = state.step + 1
            self.state = state.after(step=step, skips_in_a_row=state.skips_in_a_row + 1, due=self.agenda.after(step))
        elif back_to is not None:
            left_out = tuple(sorted({*state.left_out, state.batch_number}))
            self.state = self.go_back(back_to).after(left_out=left_out, rewinds=state.rewinds + 1, rewound_to=back_to)
            self.journal.trouble(state, {**row, "back_to": back_to})  # only now, because going back cuts the logs
            self.console.warn(f"Went back to step {back_to:,}; this batch is left out from now on.")
        else:
            self.journal.trouble(state, row)
            self.save()
            self.checkpointer.wait()
            raise TrainingError(final_words(trouble, state.step + 1, state.skips_in_a_row, state.rewinds))
        self.journal.moved(self.state.step - state.step)

    def _step_to_go_back_to(self) -> int | None:
        """The newest undamaged checkpoint, or the one before if the run went back to it already; None to give up."""
        config: TroubleConfig = self.trouble
        if self.state.rewinds >= config.max_rewinds:
            return None
        self.checkpointer.wait()
        run, rewound_to = self.checkpointer.run, self.state.rewound_to
        in_vain = rewound_to is not None and run.steps()[-1:] == [rewound_to]
        return run.latest_good(self.console.warn, before=rewound_to if in_vain else None)

    def _do_what_is_due(self) -> None:
        """Validates, evaluates, samples and saves; the state keeps the names of work that a signal prevented."""
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

    def _adjust_pace(self) -> None:
        """Changes the number of remaining steps if the remaining time requires it."""
        if self.deadline is None or self.agenda.is_over(self.state):
            return
        latest = self.runner.placement.greatest
        pace = self.deadline.revise(
            self.agenda.pace, self.state.step, latest(self.journal.seconds), latest(self._ending)
        )
        if pace is not None:
            self.deadline.record(pace)
            self.journal.paced(pace.total_steps)
            self.agenda = replace(self.agenda, pace=pace)

    def _validate(self, rest: tuple[str, ...]) -> None:
        """Scores the held-out text and remembers the best score; `rest` names the work that is still due."""
        assert self.validate is not None
        with self._evaluating():
            scores = self.validate()
        self.state = self.agenda.after_validation(self.state.after(due=rest), scores.loss)
        # The name says how much was read, because it may be a sample.
        about = {"kind": "validation", "name": f"held out, {scores.extent}"}
        measured = scores.metrics().items()
        self.state = self.state.scored([{**about, "measure": name, "value": value} for name, value in measured])
        self.journal.validated(self.state, scores)

    def _evaluate(self, rest: tuple[str, ...]) -> None:
        """Runs the evaluations; `rest` names the work that is still due."""
        scores: Sequence[Mapping[str, Any]] = ()
        if self.evaluate is not None:  # a resumed run may no longer have evaluations
            with self._evaluating():
                scores = self.evaluate()
        self.state = self.state.after(due=rest)
        if scores:
            self.state = self.state.scored(scores)
            self.journal.evaluated(self.state, scores)

    def _sample(self, rest: tuple[str, ...]) -> None:
        """Generates and logs samples; `rest` names the work that is still due."""
        with self._evaluating():
            rows = self.sample(self.state.step)
        self.state = self.state.after(due=rest)
        self.journal.sampled(self.state, rows)

    def save(self) -> None:
        """Starts writing a checkpoint of the current state, unless there is one already."""
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
        """Restores the checkpoint of `step`, cuts the logs to their lengths at that step, deletes later checkpoints."""
        self._is_whole = False
        state = self.checkpointer.load(step)
        self.checkpointer.run.mark_latest(step)
        self.checkpointer.run.forget_after(step)
        state = self.checkpointer.with_best(state, self.console.warn)
        self.journal.go_back(state)
        self._is_whole = True
        return state

    def _check_signals(self) -> None:
        """Ends the run between two steps if any rank got a signal."""
        number = int(self.runner.placement.greatest(self._interruption.signal_number or 0))
        if number:
            self._interruption.told(number)
            raise StopRequestedError

    def _abandoned_on_signal(self) -> AbstractContextManager[None]:
        """Lets a signal end the block at once, unless other ranks would then wait for this one forever."""
        return self._interruption.leaving() if self.runner.placement.may_be_left else nullcontext()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Within the block the model has its evaluation weights, and the clock of training speed is paused."""
        with (
            self.journal.throughput.paused(),
            self.runner.evaluation.applied(),
            self.runner.placement.evaluating(),
            self._abandoned_on_signal(),  # innermost, so that a swap of weights is never abandoned halfway
        ):
            yield

    def _prune(self, newest: int) -> None:
        self.checkpointer.run.prune(newest, self.keep_checkpoints, self.agenda.milestones)

    def _save_the_beginning(self) -> None:
        """Saves step 0 if the run may rewind to it, or if `saves_the_beginning`."""
        may_go_back = "rewind" in (self.trouble.non_finite, self.trouble.spike)
        if (may_go_back or self.saves_the_beginning) and not self.checkpointer.run.steps():
            self.save()

    def _save_after(self, error: Exception) -> None:
        """Saves the last whole step before `error` ends the run, but never weights that are half changed."""
        if isinstance(error, StorageError):
            return  # a checkpoint could not be written either
        if not self.runner.placement.may_be_left and not isinstance(error, TrainingError):
            self.checkpointer.give_up()  # other ranks may not take part in saving
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

    def _report_early_end(self) -> None:
        """Raises `Interrupted` after a signal; prints a line about a run of other steps than planned."""
        step, total, planned = self.state.step, self.agenda.total_steps, self.agenda.pace.planned
        if self._interruption.signal_number is not None:
            raise Interrupted(
                f"Stopped after step {step:,} of {total:,}; everything is saved in {self.checkpointer.run.path}.",
                self._interruption.signal_number,
            )
        if step < total:
            self.console.info(
                f"Stopped early after step {step:,} of {total:,}: "
                f"the loss did not improve in {self.state.stale_validations} validations in a row."
            )
        elif total != planned:
            self.console.info(f"{'Slower' if total < planned else 'Faster'} than planned: {total:,} steps.")
