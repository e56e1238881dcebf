"""The record of a run: ``environment.json`` says how it was made, ``config.yaml`` holds its resolved settings."""

from __future__ import annotations

import hashlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

import sheepop
from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.model_kind import BASE
from sheepop.checkpoint.run_directory import read_counters
from sheepop.core.config import dump_config, dump_tree, parse_config, read_config_file
from sheepop.core.errors import CheckpointError, SheepOpError
from sheepop.core.facts import counted
from sheepop.core.files import read_json, write_atomic, write_json
from sheepop.core.json_lines import Rows
from sheepop.core.machine import describe_machine
from sheepop.core.plugins import Plugin
from sheepop.core.processor_time import QUIET
from sheepop.core.program import typed, typed_beside
from sheepop.core.version_control import git_state
from sheepop.data import is_corpus
from sheepop.interpret.control.advice import advice_of
from sheepop.jobs.config import SheepOpConfig, stored_config, with_current_keys
from sheepop.report import number, shown

_RISEN = 0.01  # a held-out loss that rose by a larger share shows that the model overfits
LAYOUT = "layout.png"  # among the plots of a run
# The first line, a comment; older runs do not have it.
_SEAL = "# Written by the run; checksum of what follows: "
# Names of fields in the file that differ from those here.
_STORED_AS = {"requested": "asked"}


@dataclass(frozen=True)
class Budget:
    """The budget of a run in minutes: seconds for the loop, and the most steps if another budget limits them.

    The score at the end reads all held-out tokens, or `scored_tokens` of them; it may take `score_seconds`. All that
    comes after the loop takes `after_seconds` at the planned speed. Older records have neither.
    """

    seconds: float
    most_steps: int | None
    scored_tokens: int | None = None
    score_seconds: float | None = None
    after_seconds: float = 0.0


@dataclass(frozen=True)
class RunRecord:
    """Where and with what a run was started, and what was measured then.

    `git` is the commit of the working directory and whether tracked files differed from it; `compute` the device,
    the threads and the accelerator's libraries; `resumed` has an entry for each time the run was resumed.
    """

    sheepop_version: str
    corpus_fingerprint: str  # of the data, also if they are examples
    tokenizer_fingerprint: str
    matrix_peak_flops: float
    step_seconds: float | None
    requested: dict[str, Any]  # the configuration of the last start, before anything was derived or measured
    machine: dict[str, Any]
    # Older records do not have the following.
    forked_from: dict[str, Any] | None = None
    seed: int | None = None
    started: str | None = None  # ISO 8601, UTC
    git: dict[str, Any] | None = None
    compute: dict[str, Any] | None = None
    deadline: Budget | None = None  # if the budget is in minutes
    num_parameters: int | None = None  # trained parameters of the network, tied ones once
    nominal_peak_flops: float | None = None  # from the data sheet of the GPU
    command: str | None = None  # as it was typed; None if a program started the run
    chosen: dict[str, Any] = field(default_factory=dict)  # the requested settings that the recipe chose, by key
    stage_seconds: dict[str, float] = field(default_factory=dict)  # by stage, over all sessions that ended
    plugins: list[Plugin] = field(default_factory=list)
    resumed: list[dict[str, Any]] = field(default_factory=list)
    layout: str | None = None  # the layout over several ranks, in words, of the last start
    processor_share: float | None = None  # of the processors, that training got in the last session on a CPU

    @property
    def generation(self) -> dict[str, Any]:
        """The generation settings of the model that the run started from, which its checkpoints keep."""
        found: dict[str, Any] = (self.forked_from or {}).get("generation") or {}
        return found

    def resumed_at(
        self, step: int, requested: SheepOpConfig, device: str, command: str | None, *, keeps_steps: bool
    ) -> RunRecord:
        """The record of the run resumed from `step` on this machine now. With another number of steps it loses its
        budget in minutes.
        """
        here = circumstances(device)
        session = {"step": step, "time": here.pop("started"), "command": command, **here}
        deadline = self.deadline if keeps_steps else None
        return replace(
            self, requested=requested.model_dump(mode="json"), deadline=deadline, resumed=[*self.resumed, session]
        )

    def with_times(self, seconds: Mapping[str, float]) -> RunRecord:
        """Adds the stage times of a session that has ended."""
        total = {**self.stage_seconds}
        for stage, taken in seconds.items():
            total[stage] = total.get(stage, 0.0) + taken
        return replace(self, stage_seconds=total)

    @property
    def identity(self) -> str:
        """A unique name of the run, which stays the same if the run is resumed or moved."""
        what = f"{self.started} {self.corpus_fingerprint} {self.tokenizer_fingerprint} {self.seed}"
        return hashlib.blake2b(what.encode(), digest_size=8).hexdigest()

    def advice(self, metrics: Rows) -> list[str]:
        """What to know of a run with these rows of metrics: a busy machine, memorised text, what its analysis found."""
        steps = int(number(metrics.last("train").get("step")) or 0)
        found = (
            self._busy_words(steps),
            _overfitting_words(metrics),
            *(each.words for each in advice_of(metrics.rows)),
        )
        return [words for words in found if words is not None]

    def _busy_words(self, steps: int) -> str | None:
        """Returns what other programs cost the last session, which ended after `steps`; None if they cost little."""
        share = self.processor_share
        if share is None or share > QUIET:
            return None
        cost = f"took about {1 / share:.1f} times as long as alone"
        if self.deadline is not None:
            cost = f"took {counted(steps, 'step')}; alone it would have taken about {steps / share:,.0f}"
        return f"Other programs kept this machine busy: training got {share:.0%} of the processor time and {cost}."

    def write(self, run: RunDirectory) -> None:
        """Writes ``environment.json`` into the run."""
        write_json(run.record_file, {_STORED_AS.get(name, name): value for name, value in asdict(self).items()})

    @classmethod
    def read(cls, run: RunDirectory) -> RunRecord:
        """Reads it back; raises `CheckpointError` when it is missing or not a record."""
        file = run.record_file
        found = read_json(file)
        names = {_STORED_AS.get(entry.name, entry.name): entry for entry in fields(cls)}
        known = names.keys()
        added_later = {
            name for name, e in names.items() if e.default is not MISSING or e.default_factory is not MISSING
        }
        wrong = f"{file} is not the record of a run"
        if not isinstance(found, dict) or not known - added_later <= found.keys() <= known:
            raise CheckpointError(f"{wrong}. Restore that file.")
        try:
            record = TypeAdapter(cls).validate_python({names[key].name: value for key, value in found.items()})
            return replace(record, requested=with_current_keys(record.requested))
        except ValidationError as error:
            name, *below = (str(part) for part in error.errors()[0]["loc"])
            place = ".".join([_STORED_AS.get(name, name), *below])
            raise CheckpointError(f"{wrong}: {place} has the wrong type. Restore that file.") from None

    def provenance(self) -> dict[str, Any]:
        """What a checkpoint records about how it was made."""
        return {
            "sheepop_version": self.sheepop_version,
            "corpus_fingerprint": self.corpus_fingerprint,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "run": {"kind": self.requested.get("tuning", {}).get("method") or "pre-training"},
            BASE: (self.forked_from or {}).get(BASE) or [],
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
    """Reads the settings of a run back; raises `CheckpointError` if the file is not what the run wrote."""
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
    config = stored_config(parse_config(text, where=str(file)))
    try:
        config.training.resolved()
    except ValueError as error:
        raise CheckpointError(
            f"{file} is not what a run writes: it has settings that are {error}. Restore that file."
        ) from None
    return config


def view_run_config(run: RunDirectory) -> SheepOpConfig:
    """The configuration in the run directory, to look at; raises `ConfigError` if it is not valid."""
    return stored_config(read_config_file(run.config_file))


def find_corpus(run: RunDirectory, config: SheepOpConfig | None) -> Path | None:
    """The directory of the corpus that the run built, else of the first corpus in `data.paths`, else None."""
    given = [Path(path) for path in config.data.paths] if config else []
    return next((path for path in (run.corpus, *given) if is_corpus(path)), None)


def repeat_command(path: Path, record: RunRecord) -> str:
    """Returns the command for a run with the same steps as the one at `path`, bit for bit on the same machine."""
    config = RunDirectory(path).config_file
    plugins = [part for plugin in record.plugins for part in ("--plugin", plugin.path)]
    origin = None if record.forked_from is None else record.forked_from["path"]
    method = record.requested.get("tuning", {}).get("method")
    verb, begins = ["train"], [] if origin is None else ["--fork", origin]
    if method is not None and origin is not None:
        verb, begins = ["tune", method, origin], []
    return typed(*verb, *plugins, "--config", config, *begins, "--output", path.with_name(f"{path.name}-again"))


def dump_requested(record: RunRecord) -> str:
    """The requested settings that differ from their defaults, as YAML, without those that the recipe chose."""
    usual = SheepOpConfig().model_dump(mode="json")
    return dump_tree(_differences(record.requested, usual, record.chosen))


def _differences(
    requested: Mapping[str, Any], usual: Mapping[str, Any], left_out: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in requested.items():
        default, key = usual.get(name), f"{path}{name}"
        if isinstance(value, dict):
            value = _differences(value, default or {}, left_out, f"{key}.") or default
        if value != default and key not in left_out:
            found[name] = value
    return found


def resume_command(path: str | Path) -> str:
    """The command that resumes the run at `path`."""
    return typed("train", "--resume", path)


def tensorboard_command(runs: Mapping[str, Path]) -> str | None:
    """The command that shows the curves of runs, by name, in TensorBoard; None if no run wrote any for it."""
    places = {name: RunDirectory(path).tensorboard for name, path in runs.items()}
    found = {name: place for name, place in places.items() if place.is_dir()}
    if len(found) == 1:
        return typed_beside("tensorboard", "--logdir", *found.values())
    named = ",".join(f"{name}:{place}" for name, place in found.items())
    return typed_beside("tensorboard", "--logdir_spec", named) if found else None


def _overfitting_words(metrics: Rows) -> str | None:
    """Advice if the last held-out loss is clearly above the lowest one; None otherwise."""
    rows = [row for row in metrics.rows if row.get("split") == "validation"]
    losses = [loss for row in rows if (loss := number(row.get("loss"))) is not None]
    if not losses or len(losses) < len(rows) or losses[-1] <= (1 + _RISEN) * min(losses):
        return None
    best = rows[losses.index(min(losses))].get("step")
    return (
        f"The held-out loss was lowest at step {shown(best)} ({min(losses):.3f}) and then rose to {losses[-1]:.3f}: "
        "the model began to learn its training text by heart. The best checkpoint counts. More text helps most, "
        "or else a smaller model, model.dropout=0.1, or fewer steps (training.early_stopping=3 ends the run in time)."
    )


def ended_early(run: RunDirectory, config: SheepOpConfig) -> bool:
    """Whether early stopping ended the run."""
    patience, steps = config.training.early_stopping, run.steps()
    if patience is None or not steps or steps[-1] == config.training.max_steps:
        return False
    try:
        counters = read_counters(run.checkpoint(steps[-1]))
    except SheepOpError:
        return False
    return int(counters.get("stale_validations", 0)) >= patience


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def circumstances(device: str) -> dict[str, Any]:
    """The fields of a record that say when, where and with which versions a session starts."""
    return {
        "started": datetime.now(UTC).isoformat(),
        "sheepop_version": sheepop.__version__,
        "git": git_state(),
        "compute": _compute(device),
        "machine": describe_machine().to_dict(),
    }


def _compute(device: str) -> dict[str, Any]:
    """The device, the threads and the accelerator's libraries."""
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


class StageTimes:
    """Seconds by stage, in the order the stages began; a stage that is entered twice adds up.

    `started` is the reading of the monotonic clock when the run was requested, by default now.
    """

    def __init__(self, started: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic() if started is None else started

    @property
    def elapsed(self) -> float:
        """The seconds since the run was requested."""
        return time.monotonic() - self._started

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Adds the block's time to `stage`, also if the block raises."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - started


def entry(tree: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The mapping at `path` of a record that may be damaged or older; empty if it is missing."""
    node: Any = tree
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def text(value: Any) -> str:
    """Text unchanged, also if it is empty; anything else as a page shows it."""
    return value if isinstance(value, str) else shown(value)


def whole(value: Any) -> int | None:
    """A number without its fraction; None for anything else."""
    found = number(value)
    return None if found is None else int(found)
