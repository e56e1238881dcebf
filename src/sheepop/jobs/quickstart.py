"""The whole life of a small model in a few minutes: corpus, vocabulary, training, scores, samples, report."""

from __future__ import annotations

import math
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
from sheepop.evaluate.baselines import compress_validation
from sheepop.generate import GenerationConfig
from sheepop.jobs.config import read_settings
from sheepop.jobs.generate import load_generator
from sheepop.jobs.run.open import OpenRun
from sheepop.jobs.run.record import RunRecord, repeat_command
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import TrainOutcome, train
from sheepop.jobs.task.corpus_batches import open_corpus
from sheepop.jobs.task.samples import generate_command, held_out_prompts
from sheepop.train.validation import TokenScores

_MINUTES = 5.0
_SAMPLE_TOKENS = 100
_OURS = "this model"
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
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    command: str | None = None,
) -> TrainOutcome:
    """Trains a model on `paths`, or on the standard library of this Python, for `minutes`.

    `overrides` are ``key=value`` settings that win over those of the quickstart. The defaults are five minutes and seed
    0; a resumed run keeps its own values and refuses others. ``report.html`` in the run directory `output` shows the
    result.
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
    return train(request, _concluded)


def render_outcome(outcome: TrainOutcome) -> str:
    """The samples and scores, for a terminal."""
    lines = []
    for completion in outcome.completions:
        lines += ["", "-" * 72, completion.prompt + completion.text]
    baselines = outcome.baselines
    assert isinstance(outcome.scores, TokenScores) and baselines is not None
    bits = {**baselines.named, _OURS: outcome.scores.bits_per_byte}
    prompt = outcome.completions[0].prompt if outcome.completions else None
    width = max(map(len, bits))
    lines += [
        "",
        "-" * 72,
        f"Held-out text, bits per byte (lower is better), on the same {baselines.bytes:,} bytes:",
        *(
            f"{'>' if name == _OURS else ' '} {name:{width}}  {value:.3f}"
            for name, value in sorted(bits.items(), key=lambda item: -item[1])
        ),
        "",
        "Time: " + ", ".join(f"{stage.lower()} {seconds:.0f} s" for stage, seconds in outcome.seconds.items()),
        f"Report: {RunDirectory(outcome.run).report}",
        f"Repeat: {repeat_command(outcome.run, RunRecord.read(RunDirectory(outcome.run)))}",
        f"Next:   {generate_command(outcome.run, prompt)}",
        f"        {typed('score', outcome.run, 'def read(path):')}",
        f"        {typed('ui', outcome.run)}   (looks inside, in the browser)",
    ]
    return "\n".join(lines)


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
    training: dict[str, Any] = {"max_minutes": _MINUTES, "sample_tokens": 48}
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


def _concluded(run: OpenRun, outcome: TrainOutcome) -> TrainOutcome:
    """Adds the scores of compressors on the held-out text, and samples, to the outcome."""
    config, corpus = run.config, open_corpus(run.config, run.directory, run.console)
    with run.times("Comparison"):
        baselines = compress_validation(corpus, run.console)
    with run.times("Writing"):
        settings = GenerationConfig(max_new_tokens=_SAMPLE_TOKENS, seed=config.seed)
        of_library = LIBRARY_PROMPTS[0] in (config.training.sample_prompts or ())
        prompts = list(LIBRARY_PROMPTS) if of_library else held_out_prompts(corpus)
        completions = load_generator(run.directory.path, device=config.device).generate(prompts, settings)
    return replace(outcome, baselines=baselines, completions=completions)
