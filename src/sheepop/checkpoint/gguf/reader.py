"""Reads a GGUF file as one of our models, whose tensors are read on demand."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sheepop.checkpoint.expected_tensors import tensor_problems
from sheepop.checkpoint.gguf.container import FILE_TYPE_KEY, Container, TensorRecord, verify_checksum
from sheepop.checkpoint.gguf.description import ARCHITECTURE_KEY, read_config
from sheepop.checkpoint.gguf.fields import FURTHER_LAYERS
from sheepop.checkpoint.gguf.layout import Place, balances, places
from sheepop.checkpoint.gguf.metadata import Value
from sheepop.checkpoint.gguf.rotary import DIVISORS
from sheepop.checkpoint.gguf.rows import EMBEDDING_NAME, OUTPUT_NAME, Role
from sheepop.checkpoint.gguf.split import is_split, open_container
from sheepop.checkpoint.gguf.tokenizer import end_ids_from_metadata, tokenizer_from_metadata
from sheepop.checkpoint.lazy_tensor import ForeignModel, LazyTensor
from sheepop.checkpoint.model_description import PARTS
from sheepop.checkpoint.vocabulary import fitting
from sheepop.checkpoint.weight_files import listed
from sheepop.core.errors import CheckpointError
from sheepop.tokenizer import Tokenizer

_LONGEST_TEXT = 1000
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_TOLERANCE = 1e-4
# The allowed difference between two rounded copies of the embedding, as a share of its largest number. Types with fewer
# than 8 bits store multiples of up to 1/32 of it, and a scaled copy may be rounded to the next multiple.
_ROUNDING, _COARSE_ROUNDING = 0.01, 0.04
_FINE = ("f32", "f16", "bf16", "q8_0")
# Tensors that SheepOp does not support, and the reasons for the error.
_REASONS = {
    "rope_factors_long.weight": "belongs to LongRoPE, which is read only from the Hugging Face format",
    "rope_factors_short.weight": "belongs to LongRoPE, which is read only from the Hugging Face format",
}


class _Parts:
    """The parts of a matrix, which are decoded together; each is kept until it is taken."""

    def __init__(self, read: Callable[[], list[Tensor]]) -> None:
        self._read, self._lock = read, threading.Lock()
        self._kept: dict[int, Tensor] = {}

    def take(self, index: int) -> Tensor:
        """Returns a part, which belongs to the caller alone."""
        with self._lock:
            if index not in self._kept:
                self._kept = dict(enumerate(self._read()))
            return self._kept.pop(index)


class GGUFFile:
    """An open file whose tensors were checked against its configuration; see `open_gguf`."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self.architecture, self.config = read_config(container)
        found = [
            place
            for place in places(self.architecture, self.config)
            if place.theirs in container.tensors or not place.optional
        ]
        further = {
            name
            for name in container.tensors
            if (place := _LAYER.match(name)) and int(place[1]) >= self.config.num_layers
        }
        key = container.metadata.get(f"{self.architecture.name}.{FURTHER_LAYERS}")
        self._further = sorted(further) if key is not None and key.content else []
        sharing = range(self.config.num_layers - self.config.shared_kv_layers, self.config.num_layers)
        keys = (f"blk.{layer}.{name}.weight" for layer in sharing for name in ("attn_k", "attn_k_norm", "attn_v"))
        self._unread = [name for name in keys if name in container.tensors]
        _check_tensors(container, found, [*self._further, *self._unread])
        self._half = _half_precision([container.tensors[place.theirs] for place in found if place.role is Role.MATRIX])
        num_experts = 0 if self.config.experts is None else self.config.experts.count
        self.tensors: Mapping[str, LazyTensor] = {
            **{name: LazyTensor.of(torch.zeros(num_experts)) for name in balances(self.config)},
            **{name: self._lazy(place, name) for place in found if not place.copied for name, _ in place.ours},
        }
        quantized = [place for place in found if not place.copied and container.tensors[place.theirs].kind.fill_stored]
        self.quantized: Mapping[str, Mapping[str, LazyTensor]] = {
            name: self._lazy_parts(place, name) for place in quantized if place.keeps_numbers for name, _ in place.ours
        }
        self._changed = [place.theirs for place in quantized if not place.keeps_numbers]

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()

    def tokenizer(self) -> Tokenizer:
        """Returns the file's tokenizer; raises `CheckpointError` if there is none, or SheepOp cannot read it."""
        return tokenizer_from_metadata(self._container.metadata, self.config.vocabulary, self._container.path)

    def generation(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Returns the tokens that end a text in the form of ``generation_config.json``, empty if only eos does."""
        ids = end_ids_from_metadata(self._container.metadata, self.config.vocabulary, self._container.path)
        return {} if set(ids) <= {tokenizer.special_id("eos")} else {"eos_token_id": ids}

    def notes(self) -> list[str]:
        """Returns notes on quantised tensors that are not in `quantized`, and on those that are left out."""
        notes = {
            "Quantised tensors that are no plain matrices of the network are dequantised": self._changed,
            "Left out, because they predict further tokens": self._further,
            "Left out, because their layers use the keys and values of others": self._unread,
        }
        return [f"{what}: {listed(names, 3)}." for what, names in notes.items() if names]

    def source(self) -> dict[str, Any]:
        """Returns the origin of the model, for its provenance."""
        metadata = self._container.metadata
        general = {
            key: value.content
            for key, value in metadata.items()
            if key.startswith("general.") and key not in (ARCHITECTURE_KEY, FILE_TYPE_KEY) and _is_short(value)
        }
        types = Counter(record.kind.name for record in self._container.tensors.values())
        origin = {"format": "gguf", "file": self._container.path.name, "architecture": self.architecture.name}
        return {**origin, "tensor_types": dict(types), "metadata": general}

    def _lazy(self, place: Place, name: str) -> LazyTensor:
        shape = dict(place.ours)[name]
        dtype = self._container.tensors[place.theirs].kind.dtype
        if self._half is not None and place.role is not Role.MATRIX:
            # Files always store these in float32. They are returned in half precision if that is exact.
            numbers = self._read(place, name, dtype)
            dtype = self._half if torch.equal(numbers.to(self._half).to(dtype), numbers) else dtype
        return LazyTensor(shape, dtype, partial(self._read, place, name, dtype))

    def _lazy_parts(self, place: Place, name: str) -> dict[str, LazyTensor]:
        """Returns a quantised matrix as its integers, scales and offsets, by their names in a model directory."""
        kind, shape = self._container.tensors[place.theirs].kind, dict(place.ours)[name]
        parts = _Parts(partial(self._read_parts, place, name))
        return {
            name + suffix: LazyTensor(
                (*shape[:-1], shape[-1] // kind.block * part.shape[1]),
                part.dtype,
                partial(parts.take, index),
            )
            for index, (suffix, part) in enumerate(zip(PARTS, kind.stored_block, strict=False))
        }

    def _read_parts(self, place: Place, name: str) -> list[Tensor]:
        parts = self._container.read_stored(place.theirs, place.rows(name))
        return [place.inverse(part, name).contiguous() for part in parts]

    def _read(self, place: Place, name: str, dtype: torch.dtype) -> Tensor:
        return place.inverse(self._container.read(place.theirs, place.rows(name)), name).to(dtype).contiguous()


def open_gguf(path: str | Path) -> GGUFFile:
    """Opens a file, or a part of a model and all others, and checks its tensors; close it, or use it in a `with`.

    Raises `CheckpointError` for damage, missing or unexpected tensors, and unsupported features.
    """
    container = open_container(path)
    try:
        # A checksum in a part was copied from the file before it was split.
        if not is_split(container):
            verify_checksum(container)
        return GGUFFile(container)
    except BaseException:
        container.close()
        raise


def read_gguf(path: str | Path, tokenizer: Tokenizer | None = None) -> ForeignModel:
    """Returns the model in a file: f32, f16 and bf16 tensors unchanged, and quantised ones as float32 and as stored.

    The file stays mapped while its tensors are in use. `tokenizer` replaces the file's own. Raises `CheckpointError`
    like `open_gguf`, and for a tokenizer that is missing, unsupported, or does not fit.
    """
    file = open_gguf(path)
    if tokenizer is None:
        tokenizer = file.tokenizer()
    tokenizer, notes = fitting(tokenizer, file.config, path)
    notes += file.notes()
    return ForeignModel(
        *(file.config, file.tensors, tokenizer, file.generation(tokenizer), file.source(), tuple(notes)), file.quantized
    )


def _check_tensors(container: Container, found: list[Place], left_out: Collection[str] = ()) -> None:
    """Raises `CheckpointError` naming every tensor that is missing, unexpected, or has the wrong shape or content."""
    shapes = {name: record.shape for name, record in container.tensors.items() if name not in left_out}
    wanted = {place.theirs: place.shape for place in found}
    # A matrix with a single row may stand there as a vector, and a vector as such a matrix.
    shapes |= {
        name: shape
        for name, shape in wanted.items()
        if shapes.get(name) in ((1, *shape), shape[1:]) and math.prod(shapes[name]) == math.prod(shape)
    }
    if DIVISORS in shapes.keys() - wanted.keys() and bool((container.read(DIVISORS) == 1).all()):
        del shapes[DIVISORS]  # these divisors do not scale
    problems = tensor_problems(shapes, wanted)
    problems += [f"{name} {reason}" for name, reason in _REASONS.items() if name in shapes]
    if not problems:
        implied = (place for place in found if place.constant is not None or place.copied)
        problems = [problem for place in implied if (problem := _constant_problem(container, place))]
    if problems:
        raise CheckpointError(
            f"The tensors of {container.path} do not fit its metadata: {listed(problems)}. Convert the model again, "
            "or use another file of it."
        )


def _constant_problem(container: Container, place: Place) -> str:
    """Returns the problem of a tensor whose content is determined by the rest of the file, or an empty text."""
    found = container.read(place.theirs).float()
    if place.constant is not None:
        wanted = place.constant()
        near = (found - wanted).abs() <= _TOLERANCE * wanted.abs()
        return "" if bool(near.all()) else f"the numbers of {place.theirs} do not fit the configuration"
    other = container.read(OUTPUT_NAME if place.theirs == EMBEDDING_NAME else EMBEDDING_NAME).float()
    found = place.restored(found)
    is_fine = all(container.tensors[name].kind.name in _FINE for name in (EMBEDDING_NAME, OUTPUT_NAME))
    rounding = _ROUNDING if is_fine else _COARSE_ROUNDING
    near = (found == other) | (found.isnan() & other.isnan())
    near |= (found - other).abs() <= rounding * other[other.isfinite()].abs().max()
    return "" if bool(near.all()) else f"{OUTPUT_NAME} differs from {EMBEDDING_NAME}, although the two are tied"


def _half_precision(matrices: list[TensorRecord]) -> torch.dtype | None:
    """Returns the dtype of the matrices if all have the same half precision, otherwise None."""
    dtypes = {record.kind.dtype for record in matrices}
    return next(iter(dtypes)) if dtypes in ({torch.float16}, {torch.bfloat16}) else None


def _is_short(value: Value) -> bool:
    """Whether a value is short and finite enough for the provenance record."""
    content = value.content
    if isinstance(content, float):
        return math.isfinite(content)
    return isinstance(content, int) or (isinstance(content, str) and len(content) <= _LONGEST_TEXT)
