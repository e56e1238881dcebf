"""Trains a model: one request, one open run, one trainer. Every result is in the run directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sheepop.checkpoint import RunDirectory
from sheepop.core.errors import StorageError
from sheepop.core.files import read_json
from sheepop.core.interrupts import interrupts_advise
from sheepop.core.json_lines import JsonLines, read_json_lines
from sheepop.core.processor_time import ProcessorTime
from sheepop.data.discovery import require_paths
from sheepop.download.catalog import HUB
from sheepop.jobs.recipe import own_parts_words
from sheepop.jobs.run.record import RunRecord, read_run_config
from sheepop.jobs.run.request import RunRequest

if TYPE_CHECKING:
    from sheepop.data import Batches
    from sheepop.evaluate.baselines import Baselines
    from sheepop.generate import Completion
    from sheepop.jobs.run.open import OpenRun
    from sheepop.jobs.run.record import StageTimes
    from sheepop.jobs.task import Task
    from sheepop.model import Transformer
    from sheepop.train import Scores

_JOURNEY_TOKENS = 24  # in the picture of the report
_PARTS_OF_SCORE = 20  # one of which is timed first
_TOO_SLOW = 1.25  # times the seconds of the score


@dataclass(frozen=True)
class TrainOutcome:
    """The outcome of a finished run: its scores, and what a quickstart adds to its report."""

    run: Path
    steps: int
    tokens: int
    best_step: int
    ended_early: bool  # because the held-out loss stopped improving
    scores: Scores | None = None  # of the best checkpoint on the whole held-out split, if there is one
    with_memory: Scores | None = None  # the same with its memory of the training text, if it has one
    try_out: str | None = None  # the command that tries the model
    baselines: Baselines | None = None
    completions: Sequence[Completion] = ()
    journey: Mapping[str, Any] | None = None  # of a held-out text through the best checkpoint
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage

    @property
    def report(self) -> Path:
        """The report of the run."""
        return RunDirectory(self.run).report

    @property
    def before(self) -> Mapping[str, Any]:
        """The scores at step 0 of a run from a finished model; empty for other runs."""
        return read_json_lines(RunDirectory(self.run).metrics_file).at(0, "validation")

    @property
    def advice(self) -> list[str]:
        """What to know of the run, in sentences."""
        run = RunDirectory(self.run)
        only = own_parts_words(read_run_config(run))
        advice = RunRecord.read(run).advice(read_json_lines(run.metrics_file))
        return [*advice, *([] if only is None else [f"{only}."])]

    def to_dict(self) -> dict[str, Any]:
        """The run, its scores, baselines, samples, times and advice as plain data."""
        found = asdict(self)
        named = {name: found[name] for name in ("scores", "with_memory", "baselines", "completions", "seconds")}
        return {"run": str(self.run), **named, "advice": self.advice}


def train(
    request: RunRequest,
    conclude: Callable[[OpenRun, TrainOutcome], TrainOutcome] = lambda run, outcome: outcome,
    prepare: Callable[[Task, StageTimes], None] = lambda task, times: None,
) -> TrainOutcome:
    """Trains the requested run, from its data to its report, and returns its scores.

    A resumed run continues exactly from its last good checkpoint. `prepare` may do more with the data of a new run, and
    `conclude` may add to the outcome before the report is written. A run that fails gets a report, too, unless the disk
    refuses writes. Raises `Interrupted` after a signal, with everything saved, and `CheckpointError` if another process
    works on the run.
    """
    request.check()
    if request.ranks.is_first and not request.resumes:
        RunDirectory(request.path).require_place(request.replaces)
        paths = request.settings.data.paths
        require_paths(Path(place) for place in paths if "://" not in place and not place.startswith(HUB))
    # These load torch, which a refused request does not need.
    from sheepop.jobs.run.build import build_trainer
    from sheepop.jobs.run.open import open_run, with_local_data

    if request.ranks.is_first:
        request = with_local_data(request)
    # The first rank keeps other processes from working on the run.
    lock = RunDirectory(request.path).locked() if request.ranks.is_first else nullcontext(True)
    with lock as is_locked, interrupts_advise(f"Resume with: {request.resume_command}"):
        if not is_locked:
            request.console.warn(
                f"The file system of {request.path} does not support file locks. Make sure that no other process uses "
                "this run."
            )
        run, processor = open_run(request, prepare), ProcessorTime()
        try:
            with run.times("Training"), build_trainer(run) as trainer, processor.counted():
                trainer.run()
            if run.device == "cpu" and not request.ranks.are_several:
                run.record = replace(run.record, processor_share=processor.take())
            outcome = _scored(run, trainer.agenda.total_steps)
            if request.ranks.is_first:
                outcome = conclude(run, outcome)
        except StorageError:
            raise  # where a checkpoint cannot be written, a report cannot
        except Exception:
            _report_failure(run)
            raise
        _report(run, outcome)
    return replace(outcome, seconds=run.times.seconds)


def _scored(run: OpenRun, total_steps: int) -> TrainOutcome:
    """The outcome of a finished run; the first rank scores its best checkpoint on everything that is held out."""
    with run.times("Scoring"), run.request.ranks.together():
        from sheepop.checkpoint import load_model, resolve_model_directory
        from sheepop.checkpoint.memory_file import write_memory
        from sheepop.checkpoint.model_description import PROVENANCE

        path = run.directory.path
        best, last = resolve_model_directory(path), run.directory.steps()[-1]
        provenance = read_json(best / PROVENANCE)
        outcome = TrainOutcome(
            path,
            last,
            int(provenance["tokens"]),
            int(provenance["step"]),
            ended_early=last < total_steps,
            try_out=run.task.try_out(),
        )
        held_out, remembers = run.task.held_out(), run.config.training.memory is not None
        if (held_out is None and not remembers) or not run.request.ranks.is_first:
            return outcome
        model = load_model(path, run.device).model
        memory = run.task.memory(model)
        if memory is not None:
            write_memory(best, memory)
        if held_out is None:
            return outcome
        # Only language models are scored with a memory.
        ways: list[dict[str, Any]] = [{}] if memory is None else [{}, {"memory": memory}]

        def score(max_tokens: int | None, on_batch: Callable[[int], None] | None = None) -> list[Scores]:
            how: dict[str, Any] = {"max_tokens": max_tokens, "on_batch": on_batch}
            return [run.task.score(model, held_out, run.device, **how, **way) for way in ways]

        most = _scored_tokens(run, held_out, score)
        with run.console.progress("Scoring", len(ways) * held_out.num_samples, "samples") as progress:
            scores, *with_memory = score(most, progress.advance)
        remembered = with_memory[0] if with_memory else None
        # The scores are the last rows of the metrics; more steps will replace them.
        with closing(JsonLines(run.directory.metrics_file, run.directory.metrics_file.stat().st_size)) as log:
            log.append({"step": outcome.best_step, "split": "score", **scores.to_dict()})
            if remembered is not None:
                log.append({"step": outcome.best_step, "split": "score_with_memory", **remembered.to_dict()})
            log.sync()
        return replace(outcome, scores=scores, with_memory=remembered, journey=journey_of_run(run, model))


def _scored_tokens(run: OpenRun, held_out: Batches, score: Callable[[int], Any]) -> int | None:
    """Returns how many held-out tokens to score, None for all: as planned, or fewer if the machine is slower now.

    A small part of the score, which counts for nothing, shows how long the planned one would take.
    """
    from sheepop.train.budget import VALIDATION_SHARE

    deadline = run.record.deadline
    if deadline is None:
        return None
    whole = int(held_out.num_samples * held_out.tokens_per_sample)
    planned, allowed = deadline.scored_tokens or whole, deadline.score_seconds
    part = planned // _PARTS_OF_SCORE
    if allowed is None or part < held_out.tokens_per_sample:
        return deadline.scored_tokens
    left = allowed / VALIDATION_SHARE - run.times.elapsed
    allowed = min(allowed, max(left, deadline.after_seconds))
    start = time.perf_counter()
    score(part)
    needed = _PARTS_OF_SCORE * (time.perf_counter() - start)
    if needed <= _TOO_SLOW * allowed:
        return deadline.scored_tokens
    fewer = max(part, int(planned * allowed / needed))
    run.console.info(f"Slower than planned: the score reads {fewer:,} of {whole:,} held-out tokens.")
    run.record = replace(run.record, deadline=replace(deadline, scored_tokens=fewer))
    return fewer


def journey_of_run(run: OpenRun, model: Transformer) -> Mapping[str, Any] | None:
    """The numbers of the picture of the last tokens of the first sample prompt; None without one."""
    from sheepop.interpret.journey import journey_of
    from sheepop.interpret.trace import Trace

    prompts = run.task.sample_prompts()
    if not prompts or run.config.model.architecture != "decoder":
        return None
    trace = Trace.of(model, run.task.tokenizer(), prompts[0])
    return journey_of(trace, -1, max(0, trace.num_tokens - _JOURNEY_TOKENS)).to_dict(trace)


def _report(run: OpenRun, outcome: TrainOutcome | None) -> None:
    """Adds the times of this session to the record and writes the report."""
    if not run.request.ranks.is_first:
        return
    from sheepop.jobs.run.report import write_run_report

    try:
        run.record = run.record.with_times(run.times.seconds)
        run.record.write(run.directory)
        scores, baselines = (outcome.scores, outcome.baselines) if outcome else (None, None)
        completions, journey = (outcome.completions, outcome.journey) if outcome else ((), None)
        write_run_report(
            run.directory,
            run.config,
            scores,
            run.record,
            run.task.manifest,
            baselines=baselines,
            completions=completions,
            journey=journey,
        )
    except StorageError as error:
        if outcome is None:
            raise
        raise StorageError(
            f"{error} Training itself is finished and saved; to write the report: {run.request.resume_command}"
        ) from None


def _report_failure(run: OpenRun) -> None:
    """Writes the report of a run that ended with an error; a failure of the report must not hide that error."""
    try:
        _report(run, None)
    except Exception as error:
        run.console.warn(f"The report was not written: {error}")
