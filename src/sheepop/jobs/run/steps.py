"""Which text a training step of a run reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.run_directory import read_counters
from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.facts import counted
from sheepop.data.corpus import Origin, trace_tokens
from sheepop.jobs.data import corpus_of_run
from sheepop.jobs.run.open import task_of
from sheepop.jobs.run.record import view_run_config
from sheepop.jobs.task.corpus_batches import build_schedule
from sheepop.jobs.task.examples import ExampleTask
from sheepop.train import TrainingState


def show_step(directory: Path, step: int, console: Console | None = None) -> Iterator[tuple[int, Origin]]:
    """Each sequence of a training step, by its row in the batch, with the origins of its tokens.

    For a step after the latest checkpoint it says that this may still change. Raises `UsageError` for a step that the
    run does not have, and for a run that learns from answers it writes itself.
    """
    run = RunDirectory.open(directory)
    config = view_run_config(run)
    if step < 1:
        raise UsageError(f"--step counts from 1, got {step}.")
    total = config.training.resolved().total_steps
    if step > total:
        raise UsageError(f"The run in {run.path} has {counted(total, 'step')}, but --step is {step:,}.")
    if config.tuning.method in ("ppo", "grpo"):
        raise UsageError(
            f"The run in {run.path} learns from answers that the model writes during training, not from stored text. "
            f"{run.samples_file.name} has samples of them."
        )
    task = task_of(config, run, Console.silent())
    latest = run.pointer("latest")
    state = TrainingState() if latest is None else TrainingState.from_record(read_counters(run.checkpoint(latest)))
    if step > state.step and console is not None:
        console.info(
            f"The latest checkpoint is from step {state.step:,}. Step {step:,} will read this unless batches before it "
            "are left out."
        )
    # Batches that the run left out after trouble are skipped here too.
    number = state.after(step=step - 1).batch_number
    if isinstance(task, ExampleTask):
        yield from _of_examples(task, number)
        return
    corpus = corpus_of_run(run, config)
    schedule = build_schedule(config, corpus, run, Console.silent(), store=False)
    for row, ranges in enumerate(schedule.token_ranges(number)):
        for start, stop in ranges:
            for origin in trace_tokens(corpus, "train", start, stop):
                yield row, origin


def _of_examples(task: ExampleTask, number: int) -> Iterator[tuple[int, Origin]]:
    """The examples in batch `number` of the schedule; their tokens are counted in the stored split."""
    split, tokenizer, rows = task.store.train, task.tokenizer(), task.rows(task.store.train)
    for row, sample in enumerate(task.schedule.rows(number).samples.tolist()):
        for example in rows.examples(sample):
            ids = split.example(example).ids
            stop = int(split.ends[example])
            place, text = f"example {example + 1}", tokenizer.decode(ids.tolist())
            yield (
                row,
                Origin("train", stop - len(ids), stop, example, "examples", 0, place, (), "example", "", {}, text),
            )
