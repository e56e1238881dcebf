"""Finds the model directory that a MODEL argument names: a path, a model of another program, or a published name."""

from __future__ import annotations

from pathlib import Path

from sheepop.checkpoint.model_cache import find_published, local_model
from sheepop.checkpoint.model_kind import GGUF, PublishedName, is_gguf, is_hugging_face
from sheepop.checkpoint.run_directory import RunDirectory
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError


def resolve_model_directory(path: str | Path, console: Console | None = None) -> Path:
    """Returns the model directory for `path`, which exists; a published model is fetched first if it is not cached.

    `path` is a model directory, a checkpoint, a run (its best checkpoint, else the latest), a directory in Hugging
    Face's format, a GGUF file, or the name of a published model (see `PublishedName`). A path that exists wins over a
    name. Models of other programs are imported into the cache (see `model_cache`). Progress goes to `console`, by
    default standard error. Raises `CheckpointError` if `path` is nothing of this.
    """
    path = Path(path)
    if not path.exists():
        found = _published(
            path,
            console,
            "a model directory, a checkpoint, a run directory, a GGUF file, or the name of a published model, such as "
            "Qwen/Qwen3-0.6B",
        )
        if (found / "config.json").is_file():
            return found
        raise CheckpointError(f"{path} is an adapter, not a model. Give its model, and this one with --adapter {path}.")
    if is_gguf(path) or is_hugging_face(path):
        return local_model(path, console or Console())
    if (path / "config.json").is_file():
        return path
    run = RunDirectory(path)
    if run.holds_run():
        step = run.pointer("best")
        if step is None:
            step = run.pointer("latest")
        if step is None:
            raise CheckpointError(f"The run in {path} has no finished checkpoint yet.")
        return run.checkpoint(step)
    raise CheckpointError(
        f"{path} is not a model: it has neither config.json (a model directory) nor checkpoints/ (a run), and is no "
        f"GGUF file.{_hint(path)}"
    )


def resolve_adapter(path: str | Path, console: Console | None = None) -> Path:
    """Returns `path` if it exists, else the directory of the published adapter of this name, which is fetched first.

    Raises `CheckpointError` if there is none.
    """
    path = Path(path)
    what = "a directory in PEFT's format, a run with tuning.lora, or the name of a published adapter"
    return path if path.exists() else _published(path, console, what)


def resolve_tokenizer_directory(path: str | Path, console: Console | None = None) -> Path:
    """Returns a directory with the tokenizer of a model; of a published one that is not cached, only that is fetched.

    Otherwise it is the directory of `resolve_model_directory`, which see.
    """
    path = Path(path)
    if path.exists():
        return resolve_model_directory(path, console)
    return _published(path, console, "a tokenizer, or a model", weights=False)


def _published(path: Path, console: Console | None, what: str, *, weights: bool = True) -> Path:
    """Returns the directory of a name in the cache, fetched first if it is not there; `what` may be given instead."""
    name = PublishedName.parse(str(path))
    if name is None:
        raise CheckpointError(f"{path} does not exist. Give {what}.")
    folder = Path(path.parts[0])
    if folder.is_dir():
        raise CheckpointError(
            f"{path} does not exist, although there is a folder {folder} here, so SheepOp did not ask the hub for a "
            f"model of this name. If you mean a published model, write hf:{path}."
        )
    cached = find_published(name, weights=weights)
    if cached is None:
        from sheepop.checkpoint.published_model import pull  # loads the hub's library

        cached = pull(name, console or Console(), weights=weights)
    return cached.use()


def absolute_source(model: str | Path) -> Path:
    """Returns a MODEL argument so that it means the same in any working directory: names of published models stay."""
    path = Path(model)
    return path if not path.exists() and PublishedName.parse(str(model)) is not None else path.absolute()


def _hint(path: Path) -> str:
    inside = sorted(path.iterdir()) if path.is_dir() else []
    for what, found in (
        ("runs", [entry for entry in inside if entry.is_dir() and RunDirectory(entry).holds_run()]),
        ("GGUF files", [entry for entry in inside if entry.suffix.lower() == GGUF]),
    ):
        if found:
            return f" It is a folder of {what}; give one of them, such as {found[0]}."
    return ""
