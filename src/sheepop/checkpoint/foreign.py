"""Models in the formats of other programs, directories of Hugging Face and GGUF files: opened, and imported as ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sheepop.checkpoint.lazy_tensor import (
    ForeignModel,
    LazyTensor,
    converted,
    reported,
    total_bytes,
    watched,
    with_stored,
)
from sheepop.checkpoint.linked_weights import LinkedWeights
from sheepop.checkpoint.model_description import Quantization, describe_model, formats_of
from sheepop.checkpoint.model_kind import BASE, is_gguf, is_model
from sheepop.checkpoint.weight_files import MAX_SHARD_BYTES, write_weights
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, TokenizerError, first_few
from sheepop.core.files import atomic_directory
from sheepop.tokenizer import ChatTemplate, Tokenizer, chat_templates, load_tokenizer

_SHOWN_NAMES = 10
_GREETING = [{"role": "user", "content": "Hello"}]


def read_foreign(source: Path, tokenizer: Path | None = None, dtype: torch.dtype | None = None) -> ForeignModel:
    """Opens the model in `source` without reading its weights; `tokenizer` replaces its own.

    Quantised weights of a directory become weights of `dtype`, None for that of the model.
    """
    if not source.exists():
        raise CheckpointError(
            f"{source} does not exist. Give a directory in Hugging Face format, or a GGUF file. A published model "
            "needs no import: give its name to any command that takes a model."
        )
    if source.is_dir() and is_model(source):
        raise CheckpointError(f"{source} is already a SheepOp model and can be used as it is.")
    own = None if tokenizer is None else load_tokenizer(tokenizer)
    # The families of one format take long to load, and models of the other do not need them.
    if source.is_dir():
        from sheepop.checkpoint.exchange.reader import read_hugging_face

        return replace(read_hugging_face(source, own, dtype), place=source)
    if not is_gguf(source):
        raise CheckpointError(
            f"{source} is a file, but not a GGUF file. Give the directory that holds config.json and the weights."
        )
    from sheepop.checkpoint.gguf.reader import read_gguf

    return replace(read_gguf(source, own), place=source)


def foreign_tensors(link: LinkedWeights) -> dict[str, LazyTensor]:
    """Returns the tensors of a linked model by our names, quantised matrices as their parts."""
    if link.place.is_dir():
        from sheepop.checkpoint.exchange.reader import open_hugging_face

        return dict(open_hugging_face(link.place).tensors)
    from sheepop.checkpoint.gguf.reader import open_gguf

    file = open_gguf(link.place)
    return with_stored(file.tensors, file.quantized)


def open_in_place(source: Path, output: Path, origin: Mapping[str, Any], console: Console) -> list[str]:
    """Writes a model directory that leaves the weights in the files of `source`, and reads none.

    `origin` is where the model was published, and replaces the place of its files in the provenance. Notes go to
    `console`. Returns the formats of the weights.
    """
    model = read_foreign(source)
    link = LinkedWeights.of(output, source)
    with atomic_directory(output, replace=True) as directory:
        link.write(directory)
        _describe(directory, model, origin, model.stored(), is_linked=True)
    for warning in template_problems(model.tokenizer):
        console.warn(warning)
    for note in model.notes:
        console.info(note)
    return formats_of(model.stored())


def _describe(
    directory: Path,
    model: ForeignModel,
    origin: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    *,
    is_linked: bool = False,
) -> None:
    source = {key: value for key, value in model.source.items() if not origin or key != "directory"}
    made: dict[str, Any] = {"imported": {**source, **origin}}
    if model.place is not None and not is_linked:
        made[BASE] = [LinkedWeights.of(directory, model.place).identity()]
    quantization = Quantization.of(tensors, torch.float32)
    describe_model(directory, model.config, model.tokenizer, made, model.generation, quantization, is_linked=is_linked)


def import_foreign(
    model: ForeignModel,
    output: Path,
    console: Console,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes `model` as a model directory, with one tensor in memory at a time.

    `dtype` converts the weights; None keeps their dtypes, and quantised matrices as they are stored. Weights larger
    than `max_shard_bytes` are split into several files. Returns a summary.
    """
    report = ExchangeReport(console, output, template_problems(model.tokenizer))
    tensors = watched(model.stored() if dtype is None else converted(model.tensors, dtype), report.not_finite)
    with (
        atomic_directory(output, replace=overwrite) as directory,
        console.progress("Importing", total_bytes(tensors), "bytes") as progress,
    ):
        write_weights(directory, reported(tensors, progress.advance), max_shard_bytes)
        _describe(directory, model, {}, tensors)
    family = model.source.get("family", model.source.get("architecture"))
    return report.finish(model, family, model.notes, formats_of(tensors))


@dataclass
class ExchangeReport:
    """Collects warnings and non-finite tensors while a model is copied, and reports them at the end."""

    console: Console
    output: Path
    warnings: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)

    def finish(
        self, model: ForeignModel, family: object, notes: Sequence[str], dtypes: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Prints the warnings and notes; returns the summary of the export or import."""
        warnings = list(self.warnings)
        if self.not_finite:
            names = first_few(self.not_finite, _SHOWN_NAMES)
            warnings.append(f"There are NaN or infinite values in {names}. The model cannot generate sensible text.")
        for warning in warnings:
            self.console.warn(warning)
        for note in notes:
            self.console.info(note)
        numbers = sum(tensor.count for name, tensor in model.tensors.items() if not name.endswith(".router.balance"))
        own = {str(tensor.dtype).removeprefix("torch.") for tensor in model.tensors.values()}
        files = sorted(self.output.glob("*.safetensors")) if self.output.is_dir() else [self.output]
        return {
            "path": str(self.output),
            "family": family,
            "parameters": numbers,
            "vocab_size": model.config.vocabulary,
            "dtypes": sorted(own if dtypes is None else dtypes),
            "bytes": sum(file.stat().st_size for file in files),
            "not_finite": self.not_finite,
            "warnings": warnings,
            "notes": list(notes),
        }


def template_problems(tokenizer: Tokenizer) -> list[str]:
    """Warnings about the default chat template of a model, from rendering a short conversation.

    A template is foreign code that may be damaged or never end. The model also works without it, so this is no reason
    to refuse the model.
    """
    if "default" not in chat_templates(tokenizer):
        return []
    try:
        with ChatTemplate.of(tokenizer) as template:
            template.render(_GREETING, add_generation_prompt=True)
    except TokenizerError as error:
        return [f"{error} It was tried on a short conversation; the model can be used without it."]
    return []
