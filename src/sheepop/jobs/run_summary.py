"""What can be said of a run from its directory alone: its size, how far it came, how well it does, its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sheepop import model
from sheepop.checkpoint import RunDirectory, read_counters
from sheepop.core.config import leaves
from sheepop.core.errors import CheckpointError, SheepOpError
from sheepop.core.program import typed_beside
from sheepop.data.manifest import read_manifest
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.data import find_corpus
from sheepop.jobs.record_values import entry, text, whole
from sheepop.jobs.run_record import RunRecord, view_run_config
from sheepop.report import number
from sheepop.train.metrics import SCORE, read_json_lines

State = Literal["running", "finished", "stopped"]


@dataclass(frozen=True)
class RunSummary:
    """One run; what is not known is None.

    Its scores are those of its best checkpoint on the whole held-out text once it is finished; before, with
    `is_sampled` where validations read a part of that text, they are the best of all its validations.
    """

    name: str
    path: str
    state: State
    ended_early: bool
    parameters: int | None
    steps: int
    total_steps: int | None
    tokens: int | None
    seconds: float | None
    best_loss: float | None
    bits_per_byte: float | None
    is_sampled: bool
    last_train_loss: float | None

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class FoundRun:
    """A run with everything a comparison needs.

    Its settings come without nesting; `held_out` names the text that it is scored on, None where that is not known;
    `sample` is the last text that it wrote.
    """

    summary: RunSummary
    settings: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    held_out: str | None = None
    sample: Mapping[str, Any] | None = None


def find_runs(paths: Sequence[Path]) -> tuple[list[FoundRun], dict[str, str]]:
    """The runs among `paths` and in the folders among them, and why each other folder there is left out.

    Each is found once, and runs of one name are called by their paths.
    """
    found, left_out = [], {}
    for path in {path.resolve(): path for path in _candidates(paths)}.values():
        try:
            found.append(read_run(path))
        except (SheepOpError, OSError) as error:
            left_out[str(path)] = str(error)
    names = Counter(run.summary.name for run in found)
    return [run if names[run.summary.name] == 1 else _called_by_path(run) for run in found], left_out


def _called_by_path(run: FoundRun) -> FoundRun:
    return replace(run, summary=replace(run.summary, name=run.summary.path))


def read_run(path: Path) -> FoundRun:
    """The run at `path`; raises `CheckpointError` or `ConfigError` when it is not a run or cannot be read."""
    run = RunDirectory(path)
    if not run.config_file.is_file() and not run.record_file.is_file():
        raise CheckpointError("not a run")
    config = view_run_config(run)
    metrics, _ = read_json_lines(run.metrics_file)
    train = [row for row in metrics if row.get("split") == "train"]
    last = train[-1] if train else {}
    steps = max([*run.steps(), whole(last.get("step")) or 0])
    score = next((row for row in reversed(metrics) if row.get("split") == SCORE), None)
    judged = [row for row in metrics if row.get("split") == "validation"] if score is None else [score]
    early = ended_early(run, config)
    state: State = "stopped"
    if run.is_running():
        state = "running"
    elif early or (config.training.max_steps is not None and steps >= config.training.max_steps):
        state = "finished"
    summary = RunSummary(
        name=path.resolve().name,
        path=str(path),
        state=state,
        ended_early=early,
        parameters=_num_parameters(run, config),
        steps=steps,
        total_steps=config.training.max_steps,
        tokens=whole(last.get("tokens")),
        seconds=number(last.get("seconds")),
        best_loss=_lowest(judged, "loss"),
        bits_per_byte=_lowest(judged, "bits_per_byte"),
        is_sampled=score is None and bool(judged) and config.training.eval_tokens is not None,
        last_train_loss=number(last.get("loss")),
    )
    samples, _ = read_json_lines(run.samples_file)
    return FoundRun(
        summary,
        dict(leaves(config.model_dump(mode="json"))),
        metrics,
        _held_out(run, config),
        samples[-1] if samples else None,
    )


def tensorboard_command(runs: Mapping[str, Path]) -> str | None:
    """What to type to see the curves of runs, by name, in TensorBoard; None where none was written for it."""
    places = {name: RunDirectory(path).tensorboard for name, path in runs.items()}
    found = {name: place for name, place in places.items() if place.is_dir()}
    if len(found) == 1:
        return typed_beside("tensorboard", "--logdir", *found.values())
    named = ",".join(f"{name}:{place}" for name, place in found.items())
    return typed_beside("tensorboard", "--logdir_spec", named) if found else None


def ended_early(run: RunDirectory, config: SheepOpConfig) -> bool:
    """Whether patience came to its end before the last step."""
    patience, steps = config.training.early_stopping, run.steps()
    if patience is None or not steps or steps[-1] == config.training.max_steps:
        return False
    try:
        counters = read_counters(run.checkpoint(steps[-1]))
    except SheepOpError:
        return False
    return int(counters.get("stale_validations", 0)) >= patience


def _held_out(run: RunDirectory, config: SheepOpConfig) -> str | None:
    """The checksums of the held-out documents: the same for the same text, whatever its tokens are."""
    found = find_corpus(run, config)
    try:
        files = entry({} if found is None else read_manifest(found), "tokens", "splits", "validation").get("files")
    except SheepOpError:
        return None
    if not isinstance(files, list) or not files or not all(isinstance(file, Mapping) for file in files):
        return None
    return " ".join(text(file.get("sha256")) for file in files)


def _num_parameters(run: RunDirectory, config: SheepOpConfig) -> int | None:
    """What the run wrote down when it started; counted, which loads torch, where it is older than that."""
    try:
        recorded = RunRecord.read(run).num_parameters
    except CheckpointError:
        recorded = None
    if recorded is not None or config.model.vocab_size is None:
        return recorded
    return model.num_parameters(config.model)


def _candidates(paths: Sequence[Path]) -> Iterator[Path]:
    """Each path that is a run or holds no folder, and else the folders in it; hidden ones are nobody's runs."""
    for path in paths:
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a directory. Name a run, or a folder of runs.")
        folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        if RunDirectory(path).holds_run() or not folders:
            yield path
        else:
            yield from folders


def _lowest(metrics: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = (number(row.get(key)) for row in metrics)
    return min((value for value in values if value is not None), default=None)
