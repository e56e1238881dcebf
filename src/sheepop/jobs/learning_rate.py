"""Finds a learning rate by a range test: trains a throw-away model on the batches of a real run."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sheepop.checkpoint import RunDirectory
from sheepop.core.errors import UsageError
from sheepop.core.files import storage_errors, write_json
from sheepop.jobs.run.open import task_of, with_local_data
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.resolve import prepare_process
from sheepop.jobs.run.step_memory import in_memory
from sheepop.jobs.task.interface import Task, with_training
from sheepop.jobs.throw_away import ThrowAway
from sheepop.report import range_test_figure, save_png
from sheepop.train.precision import candidates
from sheepop.train.rate_finder import RangeTest, find_learning_rate

LOWEST, HIGHEST, NUM_STEPS = 1e-6, 1.0, 120
RESULT, PICTURE = "learning-rate.json", "learning-rate.png"


@dataclass(frozen=True)
class FoundRate:
    """The result of a range test and where it was written."""

    directory: Path
    test: RangeTest


def find_rate(request: RunRequest) -> FoundRate:
    """Trains with the settings of `request` at increasing rates; writes a picture and the numbers to its directory.

    Starts and changes no run. Raises `UsageError` if the directory holds a run, or for several ranks.
    """
    if request.ranks.are_several:
        raise UsageError("--find-learning-rate runs in one process. Start it without sheepop launch or torchrun.")
    request.check()
    directory = Path("runs") / datetime.now(UTC).astimezone().strftime("learning-rate-%Y-%m-%d-%H%M%S")
    if request.settings.output_dir is not None:
        directory = request.path
    if RunDirectory(directory).holds_run():
        raise UsageError(f"{directory} holds a run. Choose another --output for the range test.")
    request = with_local_data(request)
    device = prepare_process(request.settings)  # before this machine is measured, as in a run
    config = request.completed().config
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=directory, prefix=".corpus-")
    with scratch as temporary:
        task = task_of(config, RunDirectory(Path(temporary)), request.console).prepared(request.given).settled()
        test = _test(task, device)
    write_json(directory / RESULT, test.to_dict())
    figure = range_test_figure(test.rates, test.losses, test.smoothed, test.suggestion, test.lowest)
    save_png(figure, directory / PICTURE)
    return FoundRate(directory, test)


def _test(task: Task, device: str) -> RangeTest:
    training = task.config.training.replace(precision=candidates(task.config.training.precision, device)[-1])
    training = in_memory(task, training, {}, device, chooses_rows=False)
    network = ThrowAway(task.with_config(with_training(task.config, training)), device)
    with task.console.progress("Range test", NUM_STEPS, "steps") as progress:

        def show(rate: float, loss: float) -> None:
            progress.advance()
            progress.describe(f"lr {rate:.2e}  loss {loss:.3f}")

        return find_learning_rate(network.step, start=LOWEST, end=HIGHEST, num_steps=NUM_STEPS, on_step=show)
