"""What a run writes down of itself: ``environment.json``, how it was made, and ``config.yaml``, what was resolved."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

import sheepop
from sheepop.checkpoint import RunDirectory
from sheepop.core.config import dump_config, dump_tree, parse_config, read_config_file, validate
from sheepop.core.errors import CheckpointError
from sheepop.core.files import read_json, write_atomic, write_json
from sheepop.core.machine import describe_machine
from sheepop.core.plugins import Plugin, loaded_plugins
from sheepop.core.program import typed
from sheepop.core.version_control import git_state
from sheepop.jobs.config import SheepOpConfig, with_current_keys

if TYPE_CHECKING:
    from sheepop.jobs.fork import Fork

# The first line, a comment. Runs of before do not have it.
_SEAL = "# Written by the run; checksum of what follows: "


@dataclass(frozen=True)
class Request:
    """How a run was asked for: what was typed, None for a program, and the settings that the recipe chose by key."""

    command: str | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """What a run that has minutes may spend: seconds of the loop, and steps where another budget limits them."""

    seconds: float
    most_steps: int | None


@dataclass(frozen=True)
class RunRecord:
    """Where and with what a run was started, and what was measured then.

    `git` is the commit of the working directory and whether tracked files differed from it; `compute` the device,
    the threads and the accelerator's libraries; `resumed` has an entry for every time the run went on.
    """

    sheepop_version: str
    corpus_fingerprint: str  # of whatever the run learns from
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
    deadline: Budget | None = None  # of a run that has minutes
    num_parameters: int | None = None  # trained numbers of the network, tied ones once
    nominal_peak_flops: float | None = None  # by the data sheet of the GPU
    command: str | None = None  # as it was typed, None for a run that a program started
    chosen: dict[str, Any] = field(default_factory=dict)  # the settings among those asked for that the recipe chose
    stage_seconds: dict[str, float] = field(default_factory=dict)  # by stage, of all sessions that came to an end
    plugins: list[Plugin] = field(default_factory=list)  # files of the user that were run before it
    resumed: list[dict[str, Any]] = field(default_factory=list)
    layout: str | None = None  # of several ranks, in words, as of the last start

    @classmethod
    def create(
        cls,
        data_fingerprint: str,
        tokenizer_fingerprint: str,
        *,
        asked: SheepOpConfig,
        step_seconds: float | None,
        deadline: Budget | None,
        matrix_peak_flops: float,
        nominal_peak_flops: float | None,
        device: str,
        num_parameters: int,
        request: Request,
        fork: Fork | None = None,
    ) -> RunRecord:
        """The record of a run that starts on this machine now."""
        return cls(
            sheepop_version=sheepop.__version__,
            corpus_fingerprint=data_fingerprint,
            tokenizer_fingerprint=tokenizer_fingerprint,
            matrix_peak_flops=matrix_peak_flops,
            step_seconds=step_seconds,
            deadline=deadline,
            asked=asked.model_dump(mode="json"),
            machine=describe_machine().to_dict(),
            forked_from=fork.as_record() if fork is not None else None,
            seed=asked.seed,
            started=_now(),
            git=git_state(),
            compute=_compute(device),
            num_parameters=num_parameters,
            command=request.command,
            chosen=dict(request.chosen),
            nominal_peak_flops=nominal_peak_flops,
            plugins=loaded_plugins(),
        )

    def going_on(
        self, *, asked: SheepOpConfig, step: int, device: str, keeps_steps: bool, request: Request
    ) -> RunRecord:
        """The record of a run that goes on from `step` on this machine now; with other steps it has no minutes."""
        session = {
            "step": step,
            "time": _now(),
            "command": request.command,
            "sheepop_version": sheepop.__version__,
            "git": git_state(),
            "compute": _compute(device),
            "machine": describe_machine().to_dict(),
        }
        deadline = self.deadline if keeps_steps else None
        return replace(self, asked=asked.model_dump(mode="json"), deadline=deadline, resumed=[*self.resumed, session])

    def with_times(self, seconds: Mapping[str, float]) -> RunRecord:
        """With the stages of a session that has ended added to those of the sessions before."""
        together = {**self.stage_seconds}
        for stage, taken in seconds.items():
            together[stage] = together.get(stage, 0.0) + taken
        return replace(self, stage_seconds=together)

    @property
    def identity(self) -> str:
        """A name for the run that no other has, the same however often it is resumed or moved."""
        what = f"{self.started} {self.corpus_fingerprint} {self.tokenizer_fingerprint} {self.seed}"
        return hashlib.blake2b(what.encode(), digest_size=8).hexdigest()

    def write(self, run: RunDirectory) -> None:
        """Writes ``environment.json`` into the run."""
        write_json(run.record_file, asdict(self))

    @classmethod
    def read(cls, run: RunDirectory) -> RunRecord:
        """Reads it back; raises `CheckpointError` when it is missing or not a record."""
        file = run.record_file
        found = read_json(file)
        known = {entry.name for entry in fields(cls)}
        added_later = {e.name for e in fields(cls) if e.default is not MISSING or e.default_factory is not MISSING}
        wrong = f"{file} is not the record of a run"
        if not isinstance(found, dict) or not known - added_later <= found.keys() <= known:
            raise CheckpointError(f"{wrong}. Restore that file.")
        try:
            record = TypeAdapter(cls).validate_python(found)
            return replace(record, asked=with_current_keys(record.asked))
        except ValidationError as error:
            place = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise CheckpointError(f"{wrong}: {place} has the wrong type. Restore that file.") from None

    def provenance(self) -> dict[str, Any]:
        """What a checkpoint says about its making."""
        return {
            "sheepop_version": self.sheepop_version,
            "corpus_fingerprint": self.corpus_fingerprint,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "run": {"kind": self.asked.get("tuning", {}).get("method") or "pre-training"},
        }


@dataclass(frozen=True)
class StoredRun:
    """A run found on disk: its resolved configuration, its record, and the step of its newest checkpoint."""

    config: SheepOpConfig
    record: RunRecord
    step: int


def write_run_config(run: RunDirectory, config: SheepOpConfig) -> None:
    """Writes the resolved configuration into the run, and its checksum with it."""
    text = dump_config(config)
    write_atomic(run.config_file, f"{_SEAL}{_checksum(text)}\n{text}")


def read_run_config(run: RunDirectory) -> SheepOpConfig:
    """Reads it back for the run to go on with; raises `CheckpointError` when it is not what the run wrote."""
    file = run.config_file
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is damaged: it is not text. Restore that file.") from None
    first, _, rest = text.partition("\n")
    if first.startswith(_SEAL) and first.removeprefix(_SEAL) != _checksum(rest):
        raise CheckpointError(
            f"{file} is not what the run wrote: it was edited or damaged. A run keeps its settings, so undo that; "
            "settings that may change go on the command line, for example training.max_steps=2000. To train with other "
            f"settings, start a new run with another --output and --config {shlex.quote(str(file))}."
        )
    config = validate(SheepOpConfig, with_current_keys(parse_config(text, where=str(file))))
    try:
        config.training.resolved()
    except ValueError as error:
        raise CheckpointError(
            f"{file} is not what a run writes: it has settings that are {error}. Restore that file."
        ) from None
    return config


def view_run_config(run: RunDirectory) -> SheepOpConfig:
    """The configuration as it stands in the run, to look at; raises `ConfigError` when it is not valid."""
    return validate(SheepOpConfig, with_current_keys(read_config_file(run.config_file)))


def repeat_command(path: Path, record: RunRecord) -> str:
    """What to type for a run that takes the same steps as the one at `path`, bit for bit on the same machine."""
    config = RunDirectory(path).config_file
    plugins = [part for plugin in record.plugins for part in ("--plugin", plugin.path)]
    origin = None if record.forked_from is None else record.forked_from["path"]
    method = record.asked.get("tuning", {}).get("method")
    verb, begins = ["train"], [] if origin is None else ["--fork", origin]
    if method is not None and origin is not None:
        verb, begins = ["tune", method, origin], []
    return typed(*verb, *plugins, "--config", config, *begins, "--output", path.with_name(f"{path.name}-again"))


def dump_asked(record: RunRecord) -> str:
    """The settings that were given and are not at their defaults, as YAML; those that the recipe chose are not."""
    usual = SheepOpConfig().model_dump(mode="json")
    return dump_tree(_differences(record.asked, usual, record.chosen))


def _differences(
    asked: Mapping[str, Any], usual: Mapping[str, Any], left_out: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in asked.items():
        default, key = usual.get(name), f"{path}{name}"
        if isinstance(value, dict):
            value = _differences(value, default or {}, left_out, f"{key}.") or default
        if value != default and key not in left_out:
            found[name] = value
    return found


def resume_command(path: str | Path) -> str:
    """What to type to go on with the run at `path`."""
    return typed("train", "--resume", path)


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _compute(device: str) -> dict[str, Any]:
    """What computes, beside the machine's own description."""
    import torch

    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if device == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,  # type: ignore[no-untyped-call]
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tensor_float_32": device == "cuda" and torch.get_float32_matmul_precision() != "highest",
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG") if device == "cuda" else None,
    }
