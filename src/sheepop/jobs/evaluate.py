"""Evaluates models, compares their scores, writes a report, and records the scores with the models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

import sheepop
from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.model_card import record_scores
from sheepop.checkpoint.model_source import resolve_model_directory
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.errors import CheckpointError, ConfigError, OutputError, StorageError, UsageError
from sheepop.data import Corpus, is_corpus
from sheepop.evaluate.report import ModelResults, read_report, write_report
from sheepop.evaluate.results import Compared, Evaluation, compare, scores_of
from sheepop.generate import Generator
from sheepop.jobs.generate import Loader
from sheepop.jobs.run.record import view_run_config
from sheepop.parallel.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Place:
    """A model on disk: its name, its directory, and the run and step that it comes from."""

    name: str
    directory: Path
    run: RunDirectory | None = None
    step: int | None = None

    def corpus(self) -> Corpus | None:
        """The corpus that its run was trained on, if it still exists."""
        if self.run is None:
            return None
        if is_corpus(self.run.corpus):
            return Corpus.open(self.run.corpus, verify=False)
        try:
            paths = view_run_config(self.run).data.paths
        except (ConfigError, OSError):
            return None
        return Corpus.open(paths[0], verify=False) if len(paths) == 1 and is_corpus(paths[0]) else None

    def about(self) -> dict[str, Any]:
        """The facts about the model that the report shows."""
        run = None if self.run is None else str(self.run.path)
        return {"directory": str(self.directory), "run": run, "step": self.step}


@dataclass(frozen=True)
class Subject:
    """A loaded model to evaluate."""

    place: Place
    generator: Generator


Evaluate = Callable[[Subject], Sequence[Evaluation]]


@dataclass(frozen=True)
class How:
    """How models are loaded, and where the results go.

    `checkpoints` evaluates every checkpoint of a run instead of its best one. `records` writes the scores into the
    model directories: ``provenance.json`` and the model card. `tensor_parallel` is the number of processes that each
    model is split over. `requested` is shown in the report.
    """

    output: Path | None = None
    device: str = "auto"
    dtype: str | None = None
    adapters: Sequence[str | Path] = ()
    checkpoints: bool = False
    records: bool = True
    tensor_parallel: int = 1
    requested: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The scores, the comparisons, and the directory of the report."""

    results: list[ModelResults]
    compared: list[Compared]
    directory: Path

    def to_dict(self) -> dict[str, Any]:
        """The scores and differences as plain data, without the single items."""
        return {
            "models": {
                result.model: [evaluation.to_dict() for evaluation in result.evaluations] for result in self.results
            },
            "compared": [asdict(found) for found in self.compared],
        }


def run_evaluations(
    models: Sequence[str | Path], evaluate: Evaluate, how: How, console: Console, ranks: Ranks = ALONE
) -> Outcome:
    """Evaluates every model, compares each pair of them, and writes the report.

    Several `ranks` call this with the same arguments and share the requests to each model; the first one compares and
    writes. Raises `UsageError` for a model that is given twice, `OutputError` for an output that exists, and whatever
    `evaluate` raises.
    """
    if ranks.are_several and how.tensor_parallel > 1:
        raise UsageError(
            "--tensor-parallel starts its own processes, so it cannot be combined with several ranks. Choose one."
        )
    output, results = output_of(how), list[ModelResults]()
    ranks.connect(resolve_device(how.device))
    load = Loader(how.adapters, device=how.device, dtype=how.dtype, tensor_parallel=how.tensor_parallel)
    try:
        for place in found_models(models, console, checkpoints=how.checkpoints):
            console.info(f"Evaluating {place.name}")
            loaded = load(place.directory)
            generator = Generator(loaded.model, loaded.tokenizer, end_ids=loaded.end_ids, ranks=ranks)
            evaluations = list(evaluate(Subject(place, generator)))
            results.append(ModelResults(place.name, evaluations, place.about()))
            generator.close()
            if how.records and not how.adapters and ranks.is_first:
                _record(place.directory, evaluations, console)
    except BaseException:
        if results and ranks.is_first:
            finished(results, output, how)
            console.warn(f"The results so far are in {output}.")
        raise
    with ranks.together():
        return finished(results, output, how) if ranks.is_first else Outcome(results, [], output)


def compare_reports(directories: Sequence[Path], how: How) -> Outcome:
    """Compares the models of existing reports; raises `UsageError` if they have only one model."""
    output = output_of(how)
    results = [result for directory in directories for result in read_report(directory)]
    names = [result.model for result in results]
    if len(set(names)) < 2:
        raise UsageError("These reports have only one model, so there is nothing to compare. Give another report.")
    about = {result.model: result.about for result in results}
    merged = [
        ModelResults(
            name, [each for result in results if result.model == name for each in result.evaluations], about[name]
        )
        for name in dict.fromkeys(names)
    ]
    return finished(merged, output, how)


def output_of(how: How) -> Path:
    """The directory of the report; raises `OutputError` if it exists."""
    output = how.output or Path("evaluations") / datetime.now(UTC).astimezone().strftime("%Y-%m-%d-%H%M%S")
    if output.exists():
        raise OutputError(f"{output} already exists. Choose another --output, or remove it.")
    return output


def finished(results: list[ModelResults], output: Path, how: How) -> Outcome:
    """Compares all pairs of models and writes the report."""
    compared = [
        found
        for one, other in combinations(results, 2)
        if one.about.get("run") is None or one.about["run"] != other.about["run"]
        for found in compare(one.model, one.evaluations, other.model, other.evaluations)
    ]
    about = {
        **how.requested,
        "version": f"SheepOp {sheepop.__version__}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    write_report(output, results, compared, about)
    return Outcome(results, compared, output)


def found_models(models: Sequence[str | Path], console: Console, *, checkpoints: bool = False) -> list[Place]:
    """The given models on disk, or all `checkpoints` of given runs; raises `UsageError` for one given twice."""
    found = [place for model in models for place in _places(Path(model), console, checkpoints=checkpoints)]
    names = [place.name for place in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"{sorted(twice)[0]} is given twice. Give each model once.")
    return found


def _places(model: Path, console: Console, *, checkpoints: bool) -> list[Place]:
    directory = resolve_model_directory(model, console)
    inside = directory.parent.parent
    run = RunDirectory(inside) if directory.parent == RunDirectory(inside).checkpoints else None
    if not checkpoints:
        return [Place(str(model), directory, run, None if run is None else _step(run, directory))]
    if run is None or not RunDirectory(model).holds_run():
        raise UsageError(f"{model} is not a run, so it has no checkpoints to evaluate. Leave out --checkpoints.")
    return [Place(f"{model} step {step:,}", run.checkpoint(step), run, step) for step in run.steps()]


def _step(run: RunDirectory, directory: Path) -> int | None:
    return next((step for step in run.steps() if run.checkpoint(step) == directory), None)


def _record(directory: Path, evaluations: Sequence[Evaluation], console: Console) -> None:
    """Writes scores into a model directory; warns if that fails."""
    try:
        record_scores(directory, [score for evaluation in evaluations for score in scores_of(evaluation)])
    except (CheckpointError, StorageError) as error:
        console.warn(f"The scores were not recorded with the model: {error}")
