"""Asks the models of a family, or the checkpoints of a run, the questions of some tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import DataError, UsageError
from sheepop.core.files import read_json, write_json
from sheepop.data import Corpus
from sheepop.evaluate.choices import evaluate_choices
from sheepop.evaluate.questions import CLOZE, MADE, Question, is_own, questions_of
from sheepop.generate import Generator
from sheepop.jobs.generate import Loader
from sheepop.jobs.run.record import find_corpus, view_run_config
from sheepop.jobs.scale import finished_runs
from sheepop.model.accounting.cost import matrix_parameters
from sheepop.report import save_png
from sheepop.scale.emergence import PICTURE, RESULT, Point, TaskCourse, emergence_figure
from sheepop.scale.family import FAMILY, Family

_PROVENANCE = "provenance.json"


@dataclass(frozen=True)
class Emergence:
    """The courses of all tasks, and the directory with picture and numbers."""

    directory: Path
    courses: tuple[TaskCourse, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data, as ``emergence.json`` has it."""
        return {"tasks": [course.to_dict() for course in self.courses]}

    def lines(self) -> list[str]:
        """What was found, for a terminal."""
        found = []
        for course in self.courses:
            first, last = course.points[0], course.points[-1]
            found.append(
                f"{course.task}: accuracy {first.accuracy:.3f} to {last.accuracy:.3f}, bits of the answer "
                f"{first.bits:.3f} to {last.bits:.3f}: {course.verdict}"
            )
        return [*found, f"Picture: {self.directory / PICTURE}"]


def emergence(directory: Path, tasks: Sequence[str], limit: int | None, seed: int, console: Console) -> Emergence:
    """Scores the models by accuracy and by the probability of the right answer; writes picture and numbers.

    A task is one of `MADE`, ``cloze`` about the text that was held out, or a file of questions. Raises `UsageError` for
    an unknown one, and `DataError` for a directory without two models.
    """
    places, corpus, load = _models(directory), _corpus(directory), Loader()
    asked: dict[str, list[Question]] = {}
    for task in tasks:
        name = Path(task).stem
        if not is_own(task):
            raise UsageError(f"--tasks {task}: give {', '.join([*MADE, CLOZE])}, or a file of questions (.jsonl).")
        if name in asked:
            raise UsageError(f"--tasks {task}: another task is called {name}. Rename the file.")
        held_out = None if corpus is None else (document.text for document in corpus.documents("validation"))
        asked[name] = questions_of(task, limit, seed, held_out)
    if len(places) < 2:
        raise DataError(f"{directory} has {len(places)} finished models; a course needs two. Train more of them.")
    points: dict[str, list[Point]] = {name: [] for name in asked}
    with console.progress("Asking", len(places), "models") as progress:
        for name, place in places:
            loaded = load(place)
            generator = Generator(loaded.model, loaded.tokenizer, end_ids=loaded.end_ids)
            tokens = int(read_json(place / _PROVENANCE)["tokens"])
            flops = 6.0 * matrix_parameters(loaded.model.config) * tokens
            for task, questions in asked.items():
                found = evaluate_choices(generator, task, questions)
                accuracy, bits = (found.measure(each).value for each in ("accuracy", "bits_of_the_answer"))
                points[task].append(Point(name, flops, accuracy, bits))
            generator.close()
            progress.advance()
    courses = tuple(
        TaskCourse(task, tuple(sorted(found, key=lambda point: point.flops))) for task, found in points.items()
    )
    result = Emergence(directory, courses)
    write_json(directory / RESULT, result.to_dict())
    save_png(emergence_figure(courses), directory / PICTURE)
    return result


def _corpus(directory: Path) -> Corpus | None:
    """Returns the corpus of a family or a run; None if a run has none."""
    if (directory / FAMILY).is_file():
        return Corpus.open(Family.read(directory).corpus, verify=False)
    run = RunDirectory(directory)
    place = find_corpus(run, view_run_config(run)) if run.config_file.is_file() else None
    return None if place is None else Corpus.open(place, verify=False)


def _models(directory: Path) -> list[tuple[str, Path]]:
    """The last checkpoints of the finished runs of a family, or all checkpoints of a run, with their names."""
    if (directory / FAMILY).is_file():
        runs = {place.name: RunDirectory(place) for place in finished_runs(directory)}
        return [(name, run.checkpoint(run.steps()[-1])) for name, run in runs.items()]
    run = RunDirectory(directory)
    if not run.holds_run():
        raise DataError(f"{directory} is neither a family of sheepop scale nor a run.")
    return [(f"step {step:,}", run.checkpoint(step)) for step in run.steps() if step > 0]
