"""Writes one of our models to a GGUF file, tensor by tensor, each in a type by the rules of ``llama-quantize``.

Tensors to which the result is most sensitive get more bits: the output projection, and in the mixtures called ``_m``
the values and the last matrix of the feed-forward network in about half of the layers. A row that is not a multiple of
256 numbers cannot have a type with blocks of 256, and gets the next larger type with blocks of 32.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sheepop.checkpoint.expected_tensors import expected_tensors, tensor_problems
from sheepop.checkpoint.gguf.container import (
    CHECKSUM_KEY,
    FILE_TYPE_KEY,
    TensorEntry,
    checksum_placeholder,
    write_container,
)
from sheepop.checkpoint.gguf.description import choose_architecture, config_metadata
from sheepop.checkpoint.gguf.layout import Place, balances, places
from sheepop.checkpoint.gguf.metadata import Value, value_of
from sheepop.checkpoint.gguf.quantized_types import F32, TYPES, TensorType, type_of_dtype
from sheepop.checkpoint.gguf.reader import open_gguf
from sheepop.checkpoint.gguf.rows import EMBEDDING_NAME, LAYER_EMBEDDING_NAME, OUTPUT_NAME, Role
from sheepop.checkpoint.gguf.tokenizer import tokenizer_metadata
from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.weight_files import listed
from sheepop.core.errors import CheckpointError
from sheepop.core.files import atomic_file
from sheepop.model.config import ModelConfig
from sheepop.tokenizer import Tokenizer

_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_LARGER = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
# In a model with this many layers and fewer values than queries, the values matter more.
_LAYERS_OF_70B = 80


@dataclass(frozen=True)
class Mixture:
    """The type of most matrices, the value of general.file_type, and whether sensitive matrices get more bits."""

    most: str
    file_type: int
    medium: bool = False

    def type_of(self, name: str, columns: int, config: ModelConfig) -> TensorType:
        """Returns the type of the matrix `name` in a file, whose rows have `columns` numbers."""
        found = self._wanted(name, columns, config)
        return TYPES[_LARGER.get(found, found) if columns % TYPES[found].block else found]

    def _wanted(self, name: str, columns: int, config: ModelConfig) -> str:
        if not self.most.startswith("q"):
            return self.most
        if name == OUTPUT_NAME or (name in (EMBEDDING_NAME, LAYER_EMBEDDING_NAME) and config.tie_weights):
            return "q8_0" if self.most == "q8_0" or columns % TYPES[self.most].block else "q6_k"
        place = _IN_LAYER.fullmatch(name)
        return self.most if place is None else self._in_layer(int(place[1]), place[2], config)

    def _in_layer(self, layer: int, part: str, config: ModelConfig) -> str:
        layers, eight_experts = config.num_layers, config.experts is not None and config.experts.count == 8
        eighth = layers // 8
        more = self.medium and (layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2)
        if part in ("attn_v", "attn_k", "attn_qkv") and eight_experts:
            return "q8_0"
        if (part in ("attn_v", "attn_qkv") or part.startswith("ffn_down")) and more:
            return "q6_k"
        values = part in ("attn_v", "attn_qkv") and layers == _LAYERS_OF_70B and config.kv_heads < config.num_heads
        if self.most == "q4_k" and (values or (part == "attn_output" and eight_experts)):
            return "q5_k"
        return self.most


MIXTURES = {
    "f32": Mixture("f32", 0),
    "f16": Mixture("f16", 1),
    "bf16": Mixture("bf16", 32),
    "q8_0": Mixture("q8_0", 7),
    "q6_k": Mixture("q6_k", 18),
    "q5_k_m": Mixture("q5_k", 17, medium=True),
    "q5_0": Mixture("q5_0", 8),
    "q4_k_m": Mixture("q4_k", 15, medium=True),
    "q4_0": Mixture("q4_0", 2),
}
"""How the matrices of a file can be stored, by name; the names are those of ``llama-quantize`` in lower case."""


# The version of llama.cpp's quantised block formats.
_QUANTIZATION_VERSION = 2
_PHI3_MARKS = ("phi-3", "phi3")
_PHI3_TOKENS = {"</s>", "<unk>", "<s>", "<|endoftext|>"}
# How many numbers are encoded at a time, so that a large tensor needs little additional memory.
_CHUNK = 2**18


@dataclass(frozen=True)
class GGUFExport:
    """The result of an export: the architecture, the number of tensors of each type, and notes for the user."""

    architecture: str
    types: Mapping[str, int]
    notes: tuple[str, ...]


def write_gguf(
    target: str | Path,
    config: ModelConfig,
    tensors: Mapping[str, LazyTensor],
    tokenizer: Tokenizer | None,
    *,
    dtype: str | None = None,
    name: str,
    architecture: str | None = None,
    end_ids: Sequence[int] = (),
    replace: bool = False,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> GGUFExport:
    """Writes a model to the file `target`, which is read back and compared before it replaces an older file.

    Matrices are stored as `dtype`, one of `MIXTURES`, or in their own type; norms, biases and other small, sensitive
    tensors always in f32. `name` is the model's name, and `architecture` the one that is tried first. A file without a
    tokenizer is for programs that bring their own. `end_ids` are tokens that end a text, in addition to the tokenizer's
    own; `advance` is called with the number of bytes written. Raises `CheckpointError` if llama.cpp cannot compute the
    same with any architecture, or if a tensor does not fit its type.
    """
    if dtype is not None and dtype not in MIXTURES:
        raise CheckpointError(f"{dtype!r} is not a type that SheepOp writes: {', '.join(MIXTURES)}.")
    chosen = choose_architecture(config, architecture)
    found = places(chosen, config)
    _check_tensors(config, tensors, balances(config) - {name for place in found for name, _ in place.ours})
    entries = [_entry(place, tensors, config, dtype) for place in found]
    file_type = MIXTURES[dtype or _most_common(entries)].file_type
    vocabulary, notes = tokenizer_metadata(tokenizer, config.vocabulary, end_ids)
    _check_name(name, vocabulary)
    metadata: dict[str, Value] = {
        **config_metadata(chosen, config),
        "general.type": value_of("model"),
        "general.name": value_of(name),
        FILE_TYPE_KEY: value_of(file_type),
        "general.quantization_version": value_of(_QUANTIZATION_VERSION),
        **vocabulary,
        CHECKSUM_KEY: checksum_placeholder(file_type),
    }
    place_of = {place.theirs: place for place in found}
    with atomic_file(target, replace=replace) as path:
        write_container(
            path, metadata, entries, lambda entry: _encoded(place_of[entry.name], entry.kind, tensors, advance)
        )
        _compare(path, config, tensors, tokenizer, {entry.name: entry.kind for entry in entries}, found)
    notes += _larger_notes(entries, dtype)
    if config.activation == "gelu":
        notes.append("llama.cpp computes the tanh form of GELU, which differs from the exact one by up to 0.0005.")
    if config.rotary_scaling is not None and config.rotary_scaling.truncate is False:
        notes.append("llama.cpp rounds the bounds of the pairs that YaRN mixes, unlike this model; some angles differ.")
    return GGUFExport(chosen.name, Counter(entry.kind.name for entry in entries), tuple(notes))


def _check_name(name: str, vocabulary: Mapping[str, Value]) -> None:
    """Raises `CheckpointError` for a name that makes llama.cpp expect Phi-3's vocabulary and fail to load the model."""
    if not name.isprintable():
        raise CheckpointError(f"{name!r} cannot be the name of a model: it contains characters that are not printable.")
    tokens = vocabulary.get("tokenizer.ggml.tokens")
    if not any(mark in name.lower() for mark in _PHI3_MARKS) or tokens is None:
        return
    if lacking := sorted(_PHI3_TOKENS.difference(tokens.plain)):
        raise CheckpointError(
            f"llama.cpp treats a model whose name contains {' or '.join(_PHI3_MARKS)} as Phi-3, and would refuse "
            f"{name!r}, whose vocabulary lacks {', '.join(lacking)}. Choose another name."
        )


def _check_tensors(config: ModelConfig, tensors: Mapping[str, LazyTensor], left_out: set[str]) -> None:
    """Raises `CheckpointError` for tensors that are missing, unexpected, of the wrong shape, or cannot be stored.

    Those that are `left_out` must be zero.
    """
    expected = expected_tensors(config)
    if problems := tensor_problems({name: tensor.shape for name, tensor in tensors.items()}, expected):
        raise CheckpointError(f"The tensors do not fit the configuration: {listed(problems)}.")
    for name in sorted(left_out):
        if bool(tensors[name].read().any()):
            raise CheckpointError(
                f"{name} is not zero, but llama.cpp adds no biases to the scores when it chooses experts."
            )


def _entry(place: Place, tensors: Mapping[str, LazyTensor], config: ModelConfig, dtype: str | None) -> TensorEntry:
    kind: TensorType = F32
    if place.role is Role.MATRIX:
        own = {tensors[name].dtype for name, _ in place.ours}
        if dtype is not None:
            kind = MIXTURES[dtype].type_of(place.theirs, place.shape[-1], config)
        elif len(own) == 1:
            kind = type_of_dtype(own.pop())
    if kind.size(place.shape) is None:
        raise CheckpointError(
            f"{place.theirs} has rows of {place.shape[-1]} numbers, but {kind.name} needs multiples of {kind.block}. "
            "Choose f16, bf16 or f32."
        )
    return TensorEntry(place.theirs, kind, place.shape)


def _larger_notes(entries: Sequence[TensorEntry], dtype: str | None) -> list[str]:
    """Returns a note if rows do not divide into the blocks of the chosen type, which a larger type replaces."""
    block = 1 if dtype is None else TYPES[MIXTURES[dtype].most].block
    larger = [entry.kind.name for entry in entries if entry.kind.block > 1 and entry.shape[-1] % block]
    kinds = ", ".join(sorted(set(larger)))
    reason = f"have rows that are not multiples of {block} numbers, and are stored as {kinds}, which need more bits"
    return [f"{len(larger)} of {len(entries)} tensors {reason}."] if larger else []


def _most_common(entries: Sequence[TensorEntry]) -> str:
    """Returns the name of the type that most numbers have."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[entry.kind.name] += math.prod(entry.shape)
    return sizes.most_common(1)[0][0]


def _encoded(
    place: Place, kind: TensorType, tensors: Mapping[str, LazyTensor], advance: Callable[[int], None]
) -> Iterator[Tensor]:
    """Yields the bytes of one of their tensors in pieces."""
    rows = place.forward([tensors[name].read() for name, _ in place.ours]).reshape(-1, place.shape[-1])
    try:
        for piece in _pieces(rows):
            content = kind.encode(piece)
            advance(content.numel())
            yield content
    except CheckpointError as error:
        raise CheckpointError(f"{place.theirs} cannot be stored as {kind.name}: {error}") from None


def _compare(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, LazyTensor],
    tokenizer: Tokenizer | None,
    kinds: Mapping[str, TensorType],
    found: Sequence[Place],
) -> None:
    """Reads the file back, and raises `CheckpointError` if it differs from the model."""
    with open_gguf(path) as file:
        if file.config != config:
            raise CheckpointError(f"{path} was read back with a different configuration. Please report this.")
        back = None if tokenizer is None else file.tokenizer()
        if tokenizer is not None and back is not None and back.fingerprint() != tokenizer.fingerprint():
            raise CheckpointError(f"{path} was read back with a different tokenizer. Please report this.")
        for place in found:
            for name, _ in () if place.copied else place.ours:
                if place.layout is not None:
                    own = place.forward([tensors[each].read() for each, _ in place.ours])
                    kind = kinds[place.theirs]
                    own = kind.decode(kind.encode(own.reshape(-1, own.shape[-1])), own.shape[-1]).view(own.shape)
                    same = _same_bits(place.inverse(own, name), file.tensors[name].read())
                else:
                    same = _is_encoded(file.tensors[name].read(), tensors[name].read(), place, kinds[place.theirs])
                if not same:
                    raise CheckpointError(
                        f"{path} was read back with different numbers in {name}. The disk may be failing."
                    )


def _is_encoded(found: Tensor, own: Tensor, place: Place, kind: TensorType) -> bool:
    """Whether `found` is one of our tensors after encoding and decoding.

    Rows are encoded separately, so their order does not matter.
    """
    if found.shape != own.shape:
        return False
    columns = own.shape[-1]
    pairs = zip(_pieces(place.stored(own).reshape(-1, columns)), _pieces(found.reshape(-1, columns)), strict=True)
    return all(_same_bits(place.restored(kind.decode(kind.encode(rows), columns)), back) for rows, back in pairs)


def _pieces(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, max(1, _CHUNK // rows.shape[-1]))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits after conversion to a common dtype, including those of NaN."""
    common = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(one.to(common).contiguous().view(torch.uint8), other.to(common).contiguous().view(torch.uint8))
