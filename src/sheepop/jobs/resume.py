"""Going on with a run: what was recorded when it started, and what may differ when it resumes."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

import sheepop
from sheepop.checkpoint import RunDirectory
from sheepop.core.config import leaves, validate
from sheepop.core.errors import CheckpointError, ConfigError, DataError
from sheepop.core.files import read_json, write_json
from sheepop.core.machine import describe_machine
from sheepop.core.version_control import git_state
from sheepop.data import Corpus, is_corpus
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.fork import Fork
from sheepop.jobs.run_config import read_run_config

RECORD = "environment.json"

# Settings that change nothing about the numbers of a step already taken.
_MAY_CHANGE = {
    "device",
    "output_dir",
    "training.max_steps",
    "training.micro_batch_size",
    "training.prefetch",
    "training.log_interval",
    "training.log_batch_hash",
    "training.sinks",
    "training.eval_interval",
    "training.eval_tokens",
    "training.early_stopping",
    "training.early_stopping_delta",
    "training.sample_interval",
    "training.sample_prompts",
    "training.sample_tokens",
    "training.checkpoint_interval",
    "training.keep_checkpoints",
    "training.trouble.non_finite",
    "training.trouble.spike",
    "training.trouble.threshold",
    "training.trouble.max_skips",
    "training.trouble.max_rewinds",
    "training.verify_interval",
    "training.activation_checkpointing",
    "training.checkpointed_blocks",
    "training.memory_budget",
    "data.paths",  # of a finished corpus, which may have been moved
    "data.num_workers",
}
_BUDGET = {"training.max_epochs", "training.max_tokens", "training.max_minutes"}


@dataclass(frozen=True)
class RunRecord:
    """Where and with what a run was started, and what was measured then.

    `git` is the commit of the working directory and whether tracked files differed from it; `compute` the device,
    the threads and the accelerator's libraries; `resumed` has an entry for every time the run went on.
    """

    sheepop_version: str
    corpus_fingerprint: str
    tokenizer_fingerprint: str
    matrix_peak_flops: float
    step_seconds: float | None
    asked: dict[str, Any]  # the configuration before anything was derived or measured, as of the last start
    machine: dict[str, Any]
    # Records written before these were kept do not hold them.
    forked_from: dict[str, Any] | None = None
    seed: int | None = None
    started: str | None = None  # ISO 8601, UTC
    git: dict[str, Any] | None = None
    compute: dict[str, Any] | None = None
    resumed: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        corpus: Corpus,
        *,
        asked: SheepOpConfig,
        step_seconds: float | None,
        matrix_peak_flops: float,
        device: str,
        fork: Fork | None = None,
    ) -> RunRecord:
        """The record of a run that starts on this machine now."""
        return cls(
            sheepop_version=sheepop.__version__,
            corpus_fingerprint=corpus.fingerprint,
            tokenizer_fingerprint=corpus.tokenizer().fingerprint(),
            matrix_peak_flops=matrix_peak_flops,
            step_seconds=step_seconds,
            asked=asked.model_dump(mode="json"),
            machine=describe_machine().to_dict(),
            forked_from=fork.as_record() if fork is not None else None,
            seed=asked.seed,
            started=_now(),
            git=git_state(),
            compute=_compute(device),
        )

    def going_on(self, *, asked: SheepOpConfig, step: int, device: str) -> RunRecord:
        """The record of a run that goes on from `step` on this machine now."""
        session = {
            "step": step,
            "time": _now(),
            "sheepop_version": sheepop.__version__,
            "git": git_state(),
            "compute": _compute(device),
            "machine": describe_machine().to_dict(),
        }
        return replace(self, asked=asked.model_dump(mode="json"), resumed=[*self.resumed, session])

    @property
    def identity(self) -> str:
        """A name for the run that no other has, the same however often it is resumed or moved."""
        what = f"{self.started} {self.corpus_fingerprint} {self.tokenizer_fingerprint} {self.seed}"
        return hashlib.blake2b(what.encode(), digest_size=8).hexdigest()

    def write(self, run: RunDirectory) -> None:
        """Writes ``environment.json`` into the run."""
        write_json(run.path / RECORD, asdict(self))

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """Reads it back; raises `CheckpointError` when it is missing or not a record."""
        if not (path / RECORD).exists():
            raise CheckpointError(
                f"{path / RECORD} is missing, so the run cannot go on. Restore that file. {_how_to_fork(path)}"
            )
        found = read_json(path / RECORD)
        known = {entry.name for entry in fields(cls)}
        added_later = {e.name for e in fields(cls) if e.default is not MISSING or e.default_factory is not MISSING}
        wrong = f"{path / RECORD} is not the record of a run"
        if not isinstance(found, dict) or not known - added_later <= found.keys() <= known:
            raise CheckpointError(f"{wrong}. Restore that file.")
        try:
            return TypeAdapter(cls).validate_python(found)
        except ValidationError as error:
            place = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise CheckpointError(f"{wrong}: {place} has the wrong type. Restore that file.") from None

    def provenance(self) -> dict[str, Any]:
        """What a checkpoint says about its making."""
        return {
            "sheepop_version": self.sheepop_version,
            "corpus_fingerprint": self.corpus_fingerprint,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
        }


@dataclass(frozen=True)
class StoredRun:
    """A run found on disk: its resolved configuration, its record, and the step of its newest checkpoint."""

    config: SheepOpConfig
    record: RunRecord
    step: int


def find_resumable(path: Path) -> StoredRun | None:
    """The run at `path`, or None when none was started there (an interrupted preparation is no run yet).

    Raises `CheckpointError` for checkpoints without the configuration that belongs to them, and for one that was
    edited or damaged.
    """
    run = RunDirectory(path)
    if not run.config_file.is_file():
        if run.steps() and not run.is_being_replaced():
            raise CheckpointError(
                f"{run.checkpoints} holds checkpoints, but {run.config_file} is missing, so the run cannot go on. "
                "Restore that file. " + _how_to_fork(run.checkpoint(run.steps()[-1]))
            )
        return None
    return StoredRun(read_run_config(run), RunRecord.read(path), max(run.steps(), default=0))


def why_no_run(path: Path) -> str:
    """What to tell somebody who wants to go on with a run at `path`, where `find_resumable` finds none."""
    for folder in path.absolute().parents:
        if RunDirectory(folder).config_file.is_file():
            return (
                f"{path} is a part of the run in {folder}. Give that one: it goes on from its newest checkpoint. To "
                "begin a new run with the weights of a checkpoint: --fork."
            )
    return f"{path} does not hold a run to go on with. Use --resume auto to start one there."


def corpus_settings(stored: StoredRun, wanted: SheepOpConfig) -> SheepOpConfig:
    """The configuration to open the corpus with, which may lie in another place by now.

    Raises `ConfigError` when `wanted` names other text: it would not be read.
    """
    before, now = tuple(stored.record.asked["data"]["paths"]), wanted.data.paths
    if now != before and not any(is_corpus(path) for path in now):
        raise ConfigError(
            f"A resumed run keeps its text, but data.paths was {list(before)}, now {list(now)}. Leave it out to go on "
            "with the text the run began with, or start a new run with another --output."
        )
    return stored.config.replace(data={**stored.config.data.model_dump(), "paths": now})


def require_text(run: RunDirectory, paths: Iterable[str]) -> None:
    """Raises `DataError` when the text of a run that goes on, and that has no corpus of its own, is not there."""
    missing = [path for path in paths if "://" not in path and not Path(path).exists()]
    if missing and not is_corpus(run.corpus):
        raise DataError(
            f"The run in {run.path} reads {missing[0]}, and that is not there, seen from {Path.cwd()}. Go on from the "
            "directory where the run was started, or say with --data where its corpus is now."
        )


def refuse_changes(stored: StoredRun, wanted: SheepOpConfig, corpus: Corpus, path: Path) -> SheepOpConfig:
    """The resolved configuration for the run at `path` to go on with, `wanted` being what the user asks for now.

    Raises `ConfigError` naming every setting that would make it another run, and `CheckpointError` when the
    corpus is not the one the run was started with.
    """
    if corpus.fingerprint != stored.record.corpus_fingerprint:
        raise CheckpointError(
            f"The corpus in {corpus.directory} is not the one this run was started with "
            f"({corpus.fingerprint[:12]} instead of {stored.record.corpus_fingerprint[:12]}). " + _how_to_fork(path)
        )
    # A setting that the version which started the run did not know was at its default.
    usual = SheepOpConfig().model_dump(mode="json")
    before = {**dict(leaves(usual)), **dict(leaves(stored.record.asked))}
    after = dict(leaves(wanted.model_dump(mode="json")))
    if after["training.compile"] is None and before["training.compile"] is False:
        before["training.compile"] = None  # its default once, and what null means on a CPU
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    refused = [key for key in changed if key not in _MAY_CHANGE and not key.startswith("generation.")]
    if refused:
        what = "; ".join(f"{key} was {before.get(key)!r}, now {after[key]!r}" for key in refused)
        longer = " To train for longer, raise training.max_steps." if _BUDGET.intersection(refused) else ""
        raise ConfigError(f"A resumed run keeps its settings, but {what}.{longer} {_how_to_fork(path)}")
    if "training.activation_checkpointing" in changed:  # the blocks that auto chose were those of its own mode
        changed["training.checkpointed_blocks"] = after["training.checkpointed_blocks"]
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
            f"A resumed run derives nothing anew, but these are {error}. Give a value, or leave the key out."
        ) from None
    if steps < stored.step:
        raise ConfigError(
            f"training.max_steps = {steps}, but the run has taken {stored.step} steps already. Give at least as many."
        )
    return config


def _how_to_fork(path: Path) -> str:
    return (
        "Start a new run with another --output; to begin it with what this one has learned, add "
        f"--fork {shlex.quote(str(path))}."
    )


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _compute(device: str) -> dict[str, Any]:
    """What computes, beside the machine's own description."""
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if device == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,  # type: ignore[no-untyped-call]
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tensor_float_32": device == "cuda" and torch.get_float32_matmul_precision() != "highest",
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG") if device == "cuda" else None,
    }
