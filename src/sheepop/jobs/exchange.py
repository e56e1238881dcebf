"""Takes models in from other programs' formats, and gives them out."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from sheepop.checkpoint import open_model, write_foreign_model
from sheepop.checkpoint.exchange import (
    choose_family,
    converted,
    dtype_named,
    read_hugging_face,
    reported,
    total_bytes,
    training_differences,
    watched,
    write_hugging_face,
)
from sheepop.checkpoint.lazy_tensor import ForeignModel
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import atomic_directory, read_json
from sheepop.tokenizer import load_tokenizer

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SHOWN_NAMES = 10


def import_model(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Writes the model in `source`, a directory in the format of Hugging Face, as a model directory at `output`.

    One tensor is in memory at a time. `dtype` (float32, bfloat16 or float16) converts the weights, None keeps theirs;
    `tokenizer` is a path that is used in place of the tokenizer in `source`. Returns what was done. Raises
    `CheckpointError` for a source that cannot be used, and `UsageError` for an `output` that is in use.
    """
    source, output, console = Path(source), Path(output), console or Console.silent()
    wanted = dtype_named(dtype)
    _require_free(output, overwrite, "a model", _is_ours)
    model = read_foreign(source, None if tokenizer is None else Path(tokenizer))
    not_finite: list[str] = []
    tensors = watched(converted(model.tensors, wanted), not_finite)
    size = total_bytes(tensors)
    with (
        atomic_directory(output, replace=overwrite) as directory,
        console.progress("Importing", size, "bytes") as progress,
    ):
        model = replace(model, tensors=reported(tensors, progress.advance))
        write_foreign_model(directory, model, {"imported": dict(model.source)})
    _warn(console, not_finite)
    for note in model.notes:
        console.info(note)
    return _result(output, model, size, not_finite) | {"family": model.source.get("family"), "notes": list(model.notes)}


def export_model(
    model: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Writes the model that `model` means as a directory in the format of Hugging Face, and reads it back to compare.

    Of the families that express its configuration the one it was imported from is taken, else the first. Weights
    beyond `max_shard_size` are divided over several files. Returns what was done. Raises `CheckpointError` with the
    reasons when no family expresses the model, and `UsageError` for an `output` that is in use.
    """
    output, console = Path(output), console or Console.silent()
    wanted, max_shard_bytes = dtype_named(dtype), parse_size(max_shard_size)
    _require_free(output, overwrite, "an export", _is_export)
    found = open_model(model)
    imported = found.source.get("imported")
    family = choose_family(found.config, imported.get("family") if isinstance(imported, dict) else None)
    back = family.read_config(family.write_config(found.config), family.model_type)
    not_finite: list[str] = []
    found = replace(found, tensors=watched(converted(found.tensors, wanted), not_finite))
    size = total_bytes(found.tensors)
    with (
        atomic_directory(output, replace=overwrite) as directory,
        console.progress("Exporting", 2 * size, "bytes") as progress,
    ):
        write_hugging_face(directory, found, family, max_shard_bytes, progress.advance)
    _warn(console, list(dict.fromkeys(not_finite)))
    notes = [
        f"{key} = {here} is a matter of training that {family.model_type} does not express; it is written as {there}."
        for key, (here, there) in training_differences(found.config, back).items()
    ]
    for note in notes:
        console.info(note)
    return _result(output, found, size, list(dict.fromkeys(not_finite))) | {
        "family": family.model_type,
        "architecture": family.architecture,
        "notes": notes,
    }


def read_foreign(source: Path, tokenizer: Path | None) -> ForeignModel:
    """The model in `source`, its weights unread."""
    if not source.exists():
        raise CheckpointError(f"{source} does not exist. Give a directory in the format of Hugging Face.")
    if not source.is_dir():
        raise CheckpointError(f"{source} is a file. Give the directory that holds config.json and the weights.")
    if _is_ours(source):
        raise CheckpointError(f"{source} is a SheepOp model already; it can be used as it is.")
    return read_hugging_face(source, None if tokenizer is None else load_tokenizer(tokenizer))


def parse_size(text: str) -> int:
    """Bytes from a text such as ``5GB`` or ``200MB``, in powers of 1000. Raises `UsageError` for anything else."""
    match = re.fullmatch(r"\s*(\d{1,15})\s*([KMGT]?B|)\s*", text, re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper() if match[2].upper() != "B" else ""] if match else 0
    if size < 1:
        raise UsageError(f"{text!r} is not a size. Give a number with KB, MB, GB or TB, for example 5GB.")
    return size


def _require_free(output: Path, overwrite: bool, what: str, may_go: Any) -> None:
    """Refuses an output that is in use: always when it holds something else, and without `overwrite` anything."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not may_go(output):
        raise UsageError(f"{output} is there already and is not {what}. Choose another place.")
    if not overwrite:
        raise UsageError(f"{output} holds {what} already. Choose another place, or give --overwrite.")


def _is_ours(directory: Path) -> bool:
    config = directory / "config.json"
    try:
        found = read_json(config) if config.is_file() else None
    except CheckpointError:
        return False
    return isinstance(found, dict) and found.get("format") == "sheepop-model"


def _is_export(directory: Path) -> bool:
    """Whether a directory is one that an export wrote: a model of another program with our checksums."""
    return (
        (directory / "checksums.json").is_file() and (directory / "config.json").is_file() and not _is_ours(directory)
    )


def _warn(console: Console, not_finite: list[str]) -> None:
    if not_finite:
        more = len(not_finite) - _SHOWN_NAMES
        names = ", ".join(not_finite[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
        console.warn(f"NaN or infinity stands in {names}. The model will write nothing sensible.")


def _result(output: Path, model: ForeignModel, size: int, not_finite: list[str]) -> dict[str, Any]:
    numbers = sum(tensor.count for name, tensor in model.tensors.items() if not name.endswith(".router.balance"))
    return {
        "path": str(output),
        "parameters": numbers,
        "bytes": size,
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in model.tensors.values()}),
        "vocab_size": model.config.vocabulary,
        "not_finite": not_finite,
    }
