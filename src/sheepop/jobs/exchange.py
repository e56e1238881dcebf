"""Imports models from the formats of other programs, and exports them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sheepop.checkpoint import load_model, resolve_model_directory
from sheepop.checkpoint.adapted import family_of
from sheepop.checkpoint.changes import NAME, changes_of
from sheepop.checkpoint.exchange.adapters import WEIGHTS, write_adapter
from sheepop.checkpoint.exchange.choice import choose_family, training_differences
from sheepop.checkpoint.exchange.writer import write_hugging_face
from sheepop.checkpoint.foreign import ExchangeReport, import_foreign, read_foreign
from sheepop.checkpoint.generation_settings import GENERATION, end_ids
from sheepop.checkpoint.gguf.writer import MIXTURES, write_gguf
from sheepop.checkpoint.identity import identities
from sheepop.checkpoint.lazy_tensor import ForeignModel, converted, dtype_named, total_bytes, watched
from sheepop.checkpoint.memory_file import has_memory
from sheepop.checkpoint.model_description import read_adapter_config
from sheepop.checkpoint.model_directory import open_model
from sheepop.checkpoint.model_kind import is_gguf, is_model, require_apart, require_free
from sheepop.checkpoint.source_directory import CONFIG
from sheepop.checkpoint.weight_files import MAX_SHARD_BYTES
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.core.files import CHECKSUMS, atomic_directory, write_json
from sheepop.report.formatting import parse_size

_FORMATS = ("hf", "gguf", "peft")
_QUANTISED = tuple(name for name in MIXTURES if name.startswith("q"))
_GGUF_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def import_model(
    source: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    max_shard_size: str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Writes the model in `source`, a directory in Hugging Face format or a GGUF file, as a model directory.

    Keeps one tensor in memory at a time. `dtype` (float32, bfloat16 or float16) converts the weights; None keeps their
    dtypes. `tokenizer` is the path of one that replaces the tokenizer in `source`. Weights larger than
    `max_shard_size` (None: 5GB) are split into several files. Returns a summary. Raises `CheckpointError` for a source
    that cannot be used, and `UsageError` for an `output` that is in use or inside `source`.
    """
    output, console = Path(output), console or Console.silent()
    wanted, limit = dtype_named(dtype), _shard_limit(max_shard_size)
    require_apart(Path(source), output)
    require_free(output, overwrite, "a model", is_model)
    model = read_foreign(Path(source), None if tokenizer is None else Path(tokenizer), wanted)
    return import_foreign(model, output, console, dtype=wanted, max_shard_bytes=limit, overwrite=overwrite)


def export_model(
    model: str | Path,
    output: str | Path,
    *,
    format: str = "hf",
    dtype: str | None = None,
    quantize: str | None = None,
    max_shard_size: str | None = None,
    with_tokenizer: bool = True,
    merge: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Writes a model for other programs, then reads the export back and compares it with the model.

    `format` is ``hf``, a directory for transformers; ``gguf``, a file for llama.cpp; or ``peft``, only the LoRA adapter
    of a model, for Hugging Face's PEFT. `dtype` converts the weights. For GGUF, `quantize` makes the weights smaller
    (``q8_0``, ``q6_k``, ``q5_k_m``, ``q5_0``, ``q4_k_m`` or ``q4_0``), and `with_tokenizer` false leaves the tokenizer
    out for programs with their own. An adapter is merged into the weights; integer weights first become the floats that
    they stand for, which is exact. `merge` requires that there is an adapter. For ``hf``, weights larger than
    `max_shard_size` (None: 5GB) are split into several files. Returns a summary. Raises `CheckpointError` with the
    reasons if the format cannot express the model, and `UsageError` for settings that exclude each other or an `output`
    in use.
    """
    if format not in _FORMATS:
        raise UsageError(f"format {format!r} is not known. Give one of {', '.join(_FORMATS)}.")
    if quantize is not None and (format != "gguf" or dtype is not None or quantize not in _QUANTISED):
        raise UsageError(
            f"quantize {quantize!r} cannot be used: it takes {', '.join(_QUANTISED)}, needs format gguf, and cannot be "
            "combined with dtype."
        )
    if max_shard_size is not None and format != "hf":
        raise UsageError("max_shard_size is for format hf; a GGUF file is not split.")
    if not with_tokenizer and format != "gguf":
        raise UsageError("Only a GGUF file can be written without a tokenizer; a directory always has one.")
    report = ExchangeReport(console or Console.silent(), Path(output))
    dtype_named(dtype)
    require_apart(Path(model), report.output)
    if merge:
        if format == "peft":
            raise UsageError("merge is for formats hf and gguf; peft writes the adapter alone.")
        _require_adapter(Path(model))
    if has_memory(resolve_model_directory(Path(model))):
        report.console.warn("No other program reads the memory of the training text, so it is left out.")
    if format == "gguf":
        require_free(report.output, overwrite, "a GGUF file", is_gguf)
        gguf_type = _GGUF_TYPES[dtype] if dtype else quantize
        return _export_gguf(open_model(model), gguf_type, with_tokenizer, overwrite, report)
    if format == "peft":
        if dtype is not None:
            raise UsageError("dtype is for formats hf and gguf; an adapter is written in float32.")
        require_free(report.output, overwrite, "an adapter", _is_adapter)
        return _export_adapter(Path(model), overwrite, report)
    limit = _shard_limit(max_shard_size)
    require_free(report.output, overwrite, "an export", _is_export)
    found = open_model(model)
    found = replace(found, tensors=converted(found.tensors, dtype_named(dtype)))
    return _export_hugging_face(found, limit, overwrite, report)


def _export_gguf(
    model: ForeignModel, gguf_type: str | None, with_tokenizer: bool, overwrite: bool, report: ExchangeReport
) -> dict[str, Any]:
    size, origin = total_bytes(model.tensors), _origin(model)
    with report.console.progress("Exporting", size, "bytes") as progress:
        written = write_gguf(
            report.output,
            model.config,
            watched(model.tensors, report.not_finite),
            model.tokenizer if with_tokenizer else None,
            dtype=gguf_type,
            name=report.output.stem,
            architecture=origin.get("architecture", origin.get("family")),
            end_ids=end_ids(model.generation, model.config.vocabulary, GENERATION),
            replace=overwrite,
            advance=progress.advance,
        )
    return report.finish(model, written.architecture, written.notes, list(written.types))


def _origin(model: ForeignModel) -> dict[str, Any]:
    """Returns what a model remembers of the file or directory that it was imported from."""
    imported = model.source.get("imported")
    return imported if isinstance(imported, dict) else {}


def _export_hugging_face(model: ForeignModel, limit: int, overwrite: bool, report: ExchangeReport) -> dict[str, Any]:
    """Uses the family that the model was imported from if it can still express it, else the first one that can."""
    family = choose_family(model.config, _origin(model).get("family"))
    back = family.read_config(family.write_config(model.config), family.model_type)
    notes = [
        f"{key} = {here} matters only in training, and {family.model_type} cannot express it; it is written as {there}."
        for key, (here, there) in training_differences(model.config, back).items()
    ]
    model = replace(model, tensors=watched(model.tensors, report.not_finite))
    with (
        atomic_directory(report.output, replace=overwrite) as directory,
        report.console.progress("Exporting", 2 * total_bytes(model.tensors), "bytes") as progress,
    ):
        write_hugging_face(directory, model, family, limit, progress.advance)
    return report.finish(model, family.model_type, notes)


def _export_adapter(model: Path, overwrite: bool, report: ExchangeReport) -> dict[str, Any]:
    """Writes only the LoRA adapter of a model, with the weight names of the family that the model exports to."""
    directory = _require_adapter(model)
    loaded = load_model(directory, merge=False)
    family = family_of(loaded)
    with atomic_directory(report.output, replace=overwrite) as place:
        write_adapter(place, loaded.model, family, name=NAME, base=identities(directory))
        loaded.tokenizer.save(place, tables=False)  # with the chat template
        write_json(place / GENERATION, dict(loaded.generation))
    change = changes_of(loaded.model)
    return {
        "path": str(report.output),
        "family": family.model_type,
        "parameters": sum(tensor.numel() for tensor in change.values()),
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in change.values()}),
        "bytes": (report.output / WEIGHTS).stat().st_size,
    }


def _require_adapter(model: Path) -> Path:
    """Returns the directory of a model; raises `CheckpointError` if it has no adapter."""
    directory = resolve_model_directory(model)
    if read_adapter_config(directory) is None:
        raise CheckpointError(
            f"{directory} has no LoRA adapter, as a run with tuning.lora does. Export the whole model with format hf."
        )
    return directory


def _shard_limit(max_shard_size: str | None) -> int:
    limit = MAX_SHARD_BYTES if max_shard_size is None else parse_size(max_shard_size)
    if limit < 1:
        raise UsageError(f"{max_shard_size!r} is not a size that weights fit into. Write it as 500MB or 5GB.")
    return limit


def _is_export(directory: Path) -> bool:
    """Whether a directory was written by an export: another program's model with our checksums."""
    return (directory / CHECKSUMS).is_file() and (directory / CONFIG).is_file() and not is_model(directory)


def _is_adapter(directory: Path) -> bool:
    """Whether a directory is an adapter written by an export."""
    return (directory / CHECKSUMS).is_file() and (directory / WEIGHTS).is_file()
