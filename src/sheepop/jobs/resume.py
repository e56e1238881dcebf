"""Resuming a run: where that is possible, and what may differ when it resumes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Protocol

from sheepop.checkpoint import RunDirectory
from sheepop.core.config import leaves, validate
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.core.facts import counted
from sheepop.core.keys import may_change
from sheepop.core.plugins import require_plugins
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run_record import RunRecord, StoredRun, read_run_config

_BUDGET = {"training.max_epochs", "training.max_tokens", "training.max_minutes"}


class Fingerprinted(Protocol):
    """Data that has a place and a checksum."""

    @property
    def directory(self) -> Path:
        """Where it lies."""

    @property
    def fingerprint(self) -> str:
        """The checksum of what it holds."""


def find_resumable(path: Path) -> StoredRun | None:
    """The run at `path`, or None when none was started there (an interrupted preparation is not a run yet).

    Raises `CheckpointError` for checkpoints without the configuration or the record that belongs to them, and for one
    that was edited or damaged.
    """
    run = RunDirectory(path)
    if not run.config_file.is_file():
        if run.steps() and not run.is_being_replaced():
            raise CheckpointError(
                f"{run.checkpoints} holds checkpoints, but {run.config_file} is missing, so the run cannot be resumed. "
                "Restore that file. " + _how_to_fork(run.checkpoint(run.steps()[-1]))
            )
        return None
    if not run.record_file.exists():
        read_run_config(run)
        raise CheckpointError(
            f"{run.record_file} is missing, so the run cannot be resumed. Restore that file. {_how_to_fork(path)}"
        )
    record = RunRecord.read(run)
    require_plugins(record.plugins)  # whose names the configuration may have
    return StoredRun(read_run_config(run), record, max(run.steps(), default=0))


def why_no_run(path: Path) -> str:
    """What to tell somebody who wants to go on with a run at `path`, where `find_resumable` finds none."""
    for folder in path.absolute().parents:
        if RunDirectory(folder).config_file.is_file():
            return (
                f"{path} is part of the run in {folder}. Give that directory; it resumes from its newest checkpoint. "
                "To start a new run from the weights of a checkpoint, use --fork."
            )
    return f"{path} does not hold a run that can be resumed. Use --resume auto to start one there."


def refuse_changes(stored: StoredRun, wanted: SheepOpConfig, data: Fingerprinted, path: Path) -> SheepOpConfig:
    """The resolved configuration with which the run at `path` resumes; `wanted` is what the user asks for now.

    Raises `ConfigError` naming every setting that would make it another run, and `CheckpointError` when the
    data is not what the run was started with.
    """
    if data.fingerprint != stored.record.corpus_fingerprint:
        raise CheckpointError(
            f"The data in {data.directory} is not what this run was started with "
            f"({data.fingerprint[:12]} instead of {stored.record.corpus_fingerprint[:12]}). " + _how_to_fork(path)
        )
    # A setting that the version which started the run did not know was at its default.
    usual = SheepOpConfig().model_dump(mode="json")
    before = {**dict(leaves(usual)), **dict(leaves(stored.record.asked))}
    after = dict(leaves(wanted.model_dump(mode="json")))
    if after["training.compile"] is None and before["training.compile"] is False:
        before["training.compile"] = None  # its default once, and what null means on a CPU
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    allowed = may_change(SheepOpConfig)
    refused = [key for key in changed if key not in allowed]
    if refused:
        what = "; ".join(f"{key} was {before.get(key)!r} and is now {after[key]!r}" for key in refused)
        longer = " To train for longer, raise training.max_steps." if _BUDGET.intersection(refused) else ""
        raise ConfigError(f"A resumed run keeps its settings, but {what}.{longer} {_how_to_fork(path)}")
    if "training.activation_checkpointing" in changed:  # the blocks that auto chose were those of its own mode
        changed["training.checkpointed_blocks"] = after["training.checkpointed_blocks"]
    if "training.max_steps" in changed:  # what the clock made of the former steps
        changed["training.pace"] = []
    tree = stored.config.model_dump(mode="json")
    for key, value in changed.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    config = validate(SheepOpConfig, tree)
    try:
        steps = config.training.resolved().total_steps
    except ValueError as error:
        raise ConfigError(
            f"A resumed run keeps the values it started with and derives none again, but these are {error}. Give a "
            "value, or leave the key out."
        ) from None
    if steps < stored.step:
        raise ConfigError(
            f"training.max_steps = {steps}, but the run has already taken {counted(stored.step, 'step')}. Give at "
            "least as many."
        )
    return config


def _how_to_fork(path: Path) -> str:
    return (
        "Start a new run with another --output; to start it from the weights of this one, add "
        f"--fork {shlex.quote(str(path))}."
    )
