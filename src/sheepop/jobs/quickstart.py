"""A small model in a few minutes: corpus, vocabulary, training, scores, samples, report."""

from __future__ import annotations

import math
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError, UsageError
from sheepop.core.program import typed
from sheepop.data import Corpus, is_corpus
from sheepop.evaluate.baselines import Baselines, compress_validation
from sheepop.generate import Completion, GenerationConfig
from sheepop.jobs.config import read_settings
from sheepop.jobs.generate import load_generator
from sheepop.jobs.recipe import EXPORTABLE
from sheepop.jobs.run.open import OpenRun
from sheepop.jobs.run.record import RunRecord, StageTimes, repeat_command
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import TrainOutcome, train
from sheepop.jobs.task import Task
from sheepop.jobs.task.corpus_batches import open_corpus
from sheepop.jobs.task.samples import first_line, generate_command, held_out_prompts
from sheepop.train.validation import TokenScores

_MINUTES = 5.0
_SAMPLE_TOKENS = 100
_OURS, _OURS_WITH_MEMORY = "this model", "this model with its memory of the training text"
_RULE_WIDTH = 72
_ALL = 0.9
# Left out of the standard library's folder: installed packages, and tests, which are more data than text.
_NOT_THE_LIBRARY = (
    "site-packages/",
    "dist-packages/",
    "test/",
    "tests/",
    "idle_test/",
    "config-*/",
    "lib-dynload/",
    "ensurepip/",
    "LICENSE*",
)
LIBRARY_PROMPTS = (
    'def read_lines(path):\n    """',
    "class Stack:\n    def __init__(self",
    "import os\nimport sys\n\n",
)


def quickstart(
    output: str | Path,
    *,
    minutes: float | None = None,
    paths: Sequence[str | Path] = (),
    device: str = "auto",
    seed: int | None = None,
    exportable: bool = False,
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    command: str | None = None,
) -> TrainOutcome:
    """Trains a model on `paths`, or on the standard library of this Python, for `minutes`.

    `overrides` are ``key=value`` settings that win over those of the quickstart; an `exportable` model has no parts
    that only SheepOp computes. The defaults are five minutes and seed 0; a resumed run keeps its own values and refuses
    others. ``report.html`` in the run directory `output` shows the result.
    """
    console = console or Console.silent()
    output = Path(output)
    if minutes is not None and not (minutes > 0 and math.isfinite(minutes)):
        raise ConfigError(f"minutes = {minutes}: give a number above 0, for example --minutes 5.")
    is_new = not (resume and RunDirectory(output).config_file.is_file())
    if is_new and RunDirectory(output).holds_run() and not (resume or overwrite):
        raise UsageError(
            f"The output directory {output} already holds a run. Resume it (--resume), replace it (--overwrite), "
            "or choose another directory."
        )
    options = _options(output, minutes, paths, device, seed)
    if exportable:
        options["model"] = EXPORTABLE
    given = read_settings(None, overrides, base=_defaults(paths, console) if is_new else {}, options=options)
    request = RunRequest(
        given,
        resume=resume,
        overwrite=overwrite,
        command=command,
        resume_with=typed("quickstart", "--resume", "--output", output),
        console=console,
    )
    if request.settings.data.validation_fraction == 0:
        raise ConfigError("data.validation_fraction = 0: a quickstart scores its model, so some text must be held out.")
    compared: list[Baselines] = []

    def compare(task: Task, times: StageTimes) -> None:
        with times("Comparison"):
            compared.append(compress_validation(open_corpus(task.config, task.run, console), console))

    def conclude(run: OpenRun, outcome: TrainOutcome) -> TrainOutcome:
        if not compared:  # the run was resumed
            compare(run.task, run.times)
        return replace(outcome, baselines=compared[0], completions=_written(run))

    return train(request, conclude, compare)


def render_outcome(outcome: TrainOutcome) -> list[tuple[str, str]]:
    """The samples and scores for a terminal: pieces of text, each with a Rich style, which may be empty."""
    pieces, rule = [], "-" * min(_RULE_WIDTH, shutil.get_terminal_size().columns)
    for completion in outcome.completions:
        pieces += [(f"\n{rule}\n", "dim"), (completion.prompt, "dim"), (f"{completion.text}\n", "bold")]
    baselines = outcome.baselines
    assert isinstance(outcome.scores, TokenScores) and baselines is not None
    bits = {**baselines.named, _OURS: outcome.scores.bits_per_byte}
    if isinstance(outcome.with_memory, TokenScores):
        bits[_OURS_WITH_MEMORY] = outcome.with_memory.bits_per_byte
    prompt = outcome.completions[0].prompt if outcome.completions else None
    width = max(map(len, bits))
    pieces += [
        (f"\n{rule}\n", "dim"),
        (f"Held-out text, bits per byte (lower is better), {_read(outcome.scores.bytes, baselines.bytes)}:\n", ""),
    ]
    for name, value in sorted(bits.items(), key=lambda item: -item[1]):
        mark, style = (">", "bold green") if name in (_OURS, _OURS_WITH_MEMORY) else (" ", "")
        pieces.append((f"{mark} {name:{width}}  {value:.3f}\n", style))
    lines = [
        "",
        *outcome.advice,
        "Time: " + ", ".join(f"{stage.lower()} {seconds:.0f} s" for stage, seconds in outcome.seconds.items()),
        f"Report: {RunDirectory(outcome.run).report}",
        f"Repeat: {repeat_command(outcome.run, RunRecord.read(RunDirectory(outcome.run)))}",
        f"Next:   {generate_command(outcome.run, prompt)}",
        f"        {typed('score', outcome.run, first_line(prompt))}",
        f"        {typed('ui', outcome.run)}   (looks inside, in the browser)",
    ]
    return [*pieces, ("\n".join(lines) + "\n", "")]


def _read(scored: int, compressed: int) -> str:
    """Says on how much text model and compressors are compared; the first token of a text has no prediction."""
    if scored > _ALL * compressed:
        return f"on the same {compressed:,} bytes"
    return f"on {compressed:,} bytes, of which the minutes allowed {scored:,} for this model"


def library_paths() -> tuple[list[str], tuple[str, ...]]:
    """The folder of this interpreter's standard library, and patterns of the files in it to leave out."""
    folder = Path(sysconfig.get_path("stdlib"))
    if not folder.is_dir():
        raise DataError(
            f"This Python keeps its standard library in {folder}, which is not a folder of files. "
            "Give your own files with --data PATH."
        )
    return [str(folder)], _NOT_THE_LIBRARY


def _options(
    output: Path, minutes: float | None, paths: Sequence[str | Path], device: str, seed: int | None
) -> dict[str, Any]:
    """The arguments of a quickstart as a tree of settings."""
    options: dict[str, Any] = {"device": device, "output_dir": str(output)}
    if minutes is not None:
        options["training"] = {"max_minutes": minutes}
    if paths:
        options["data"] = {"paths": [str(path) for path in paths]}
    if seed is not None:
        options["seed"] = seed
    return options


def _defaults(paths: Sequence[str | Path], console: Console) -> dict[str, Any]:
    """The default settings of a new quickstart that the recipe does not choose."""
    # Checkpoints are the largest part of a run's directory.
    training: dict[str, Any] = {
        "max_minutes": _MINUTES, "sample_tokens": 48, "keep_checkpoints": 1, "keep_milestones": False,
    }  # fmt: skip
    if paths:
        _require_held_out([str(path) for path in paths])
        console.info(f"Reading {', '.join(map(str, paths))}.")
        return {"training": training}
    inputs, ignore = library_paths()
    console.info(f"Reading the standard library of this Python, {inputs[0]}.")
    training["sample_prompts"] = [LIBRARY_PROMPTS[0]]
    return {"data": {"paths": inputs, "ignore": list(ignore)}, "training": training}


def _require_held_out(inputs: Sequence[str]) -> None:
    """Refuses a corpus without held-out text before time is spent on it."""
    for path in inputs:
        if is_corpus(path) and Corpus.open(Path(path)).validation.num_tokens == 0:
            raise DataError(
                f"The corpus {path} has no held-out text, so there is nothing to score a model on. Rebuild it with "
                "data.validation_fraction above 0."
            )


def _written(run: OpenRun) -> Sequence[Completion]:
    """What the trained model writes to a few prompts."""
    config = run.config
    with run.times("Writing"):
        settings = GenerationConfig(max_new_tokens=_SAMPLE_TOKENS, seed=config.seed)
        of_library = LIBRARY_PROMPTS[0] in (config.training.sample_prompts or ())
        corpus = open_corpus(config, run.directory, run.console)
        prompts = list(LIBRARY_PROMPTS) if of_library else held_out_prompts(corpus)
        return load_generator(run.directory.path, device=config.device).generate(prompts, settings)
