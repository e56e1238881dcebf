"""A branch of a run: a second run that continues from one of its checkpoints, with other settings from there on."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.run_directory import read_counters
from sheepop.core.config import apply_overrides, validate, value_text
from sheepop.core.files import link_or_copy
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.record import StoredRun, write_run_config
from sheepop.train.config import TrainingConfig


def changed(tree: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a tree of settings with others, which are named by their keys, such as ``training.learning_rate``."""
    return apply_overrides(tree, [f"{key}={value_text(value)}" for key, value in settings.items()])


def write_branch(
    stored: StoredRun, run: RunDirectory, step: int, settings: Mapping[str, Any], target: RunDirectory
) -> None:
    """Fills the new directory `target` with a run that resumes as `run` at its checkpoint of `step`.

    It has the weights, the state of the optimizer, the data and the logs of that step; files that no run changes are
    shared. Without `settings` it continues as `run` did, bit for bit. With another batch size, the steps until then
    keep theirs, so that the next ones read the rows that follow. It has no budget in minutes, which would change its
    steps.
    """
    settings = {**settings, "output_dir": str(target.path)}
    if "training.global_batch_size" in settings:
        settings["training.batch_size_warmup"] = _sizes_until(step, stored.config.training)
    trees = stored.config.model_dump(mode="json"), stored.record.requested
    config, requested = (validate(SheepOpConfig, changed(tree, settings)) for tree in trees)
    best = read_counters(run.checkpoint(step)).get("best_step")
    checkpoints = [run.checkpoint(each) for each in run.steps() if each in (step, best)]
    for source in (run.corpus, run.examples, run.base, run.difficulty, *checkpoints):
        _share(source, target.path / source.relative_to(run.path))
    for log in (run.metrics_file, run.samples_file):  # which grow
        if log.exists():
            shutil.copyfile(log, target.path / log.name)
    record = replace(stored.record, requested=requested.model_dump(mode="json"), deadline=None, command=None)
    replace(record, stage_seconds={}).write(target)
    write_run_config(target, config)


def _sizes_until(step: int, training: TrainingConfig) -> list[list[int]]:
    """The warm-up of the batch size that keeps the sizes of the first `step` steps."""
    stages = [list(stage) for stage in training.batch_size_warmup if stage[0] < step]
    return [*stages, [step, training.batch_sizes().at(step - 1)]] if step else stages


def _share(source: Path, target: Path) -> None:
    """Links or copies a file, or all files of a directory; nothing if there is none."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=lambda file, place: link_or_copy(Path(file), Path(place)))
    elif source.exists():
        link_or_copy(source, target)
