"""Loads and saves model directories."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sheepop.adapt.lora import merged
from sheepop.adapt.quantization import dequantized
from sheepop.adapt.scalar_head import REWARD_HEAD, add_scalar_head, is_of_values
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.checkpoint.card_text import EVALUATIONS
from sheepop.checkpoint.changes import put_changes
from sheepop.checkpoint.expected_tensors import expected_tensors, tensor_problems
from sheepop.checkpoint.generation_settings import GENERATION, end_ids, read_generation
from sheepop.checkpoint.lazy_tensor import ForeignModel, LazyTensor, Shape
from sheepop.checkpoint.linked_weights import LINK, LinkedWeights
from sheepop.checkpoint.memory_file import read_memory
from sheepop.checkpoint.model_description import (
    PARTS,
    PROVENANCE,
    Provenance,
    Quantization,
    describe_model,
    has_reward_head,
    read_adapter_config,
    read_model_config,
    read_quantization,
    with_parts,
)
from sheepop.checkpoint.model_source import resolve_model_directory
from sheepop.checkpoint.run_directory import damaged_model
from sheepop.checkpoint.vocabulary import require_fit
from sheepop.checkpoint.weight_files import WEIGHTS, listed, open_weights
from sheepop.core.device import return_freed_memory
from sheepop.core.errors import CheckpointError
from sheepop.core.files import atomic_directory, read_json
from sheepop.core.machine import memory_nodes, usable_cores
from sheepop.core.memory_placement import copied_by_threads
from sheepop.model import ModelConfig, Transformer, blank_model
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.tokenizer import Tokenizer, load_tokenizer

ADAPTER = "adapter.safetensors"
_MOST_READERS = 4


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode; `end_ids` are tokens that end a text, in addition to the tokenizer's own.

    `generation` are the keys of its ``generation_config.json``.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    provenance: dict[str, Any]
    directory: Path
    end_ids: tuple[int, ...]
    generation: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def memory(self) -> CorpusMemory | None:
        """The memory of the training text in the directory; raises `CheckpointError` if it does not fit the model."""
        return read_memory(self.directory, self.config.vocabulary)


def write_model(
    directory: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    provenance: Provenance,
    generation: Mapping[str, Any],
) -> None:
    """Writes the files of a model directory into `directory`, which the caller makes durable and checksums.

    `weights` are the result of `unique_weights`, `generation` the keys of ``generation_config.json``.
    """
    plain: dict[str, Tensor] = {}
    for name, weight in weights.items():
        parts = weight.parts if isinstance(weight, StoredWeight) else (weight,)
        for suffix, part in zip(PARTS, parts, strict=False):
            if part is not None:
                plain[name + suffix] = part
    plain = {name: tensor.cpu().contiguous() for name, tensor in plain.items()}
    save_file(plain, directory / WEIGHTS, metadata={"format": "pt"})
    judges = f"{REWARD_HEAD}.weight" in weights
    computing = {weight.dtype for weight in weights.values() if isinstance(weight, StoredWeight)}
    quantization = Quantization.of(plain, *computing) if computing else None
    describe_model(directory, config, tokenizer, provenance, generation, quantization, has_reward_head=judges)


def save_model(
    target: str | Path,
    model: Transformer,
    tokenizer: Tokenizer,
    provenance: Provenance,
    *,
    generation: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> None:
    """Writes a model directory atomically; raises `CheckpointError` if `target` exists and `replace` is false.

    `generation` are the keys of its ``generation_config.json``, for a model made from another one those of that model.
    Scores in `provenance` are left out, since they were measured with the weights of another directory.
    """
    target = Path(target)
    if target.exists() and not replace:
        raise CheckpointError(f"{target} already exists. Choose another directory or remove it.")
    made = {key: value for key, value in provenance.items() if key != EVALUATIONS}
    with atomic_directory(target, replace=replace) as directory:
        write_model(directory, model.config, unique_weights(model), tokenizer, made, generation or {})


def load_model(
    path: str | Path,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    merge: bool = True,
    mapped: bool = False,
) -> LoadedModel:
    """Reads and verifies the model at `path` (see `resolve_model_directory`).

    A LoRA adapter in the directory is merged into the weights, unless they are quantised or `merge` is false. With
    `mapped` the floats of a directory are used by memory map, like those of a linked file: no time passes until they
    are read, but products are a tenth slower, and a program that changes the file in place changes the model.

    The parameters have the stored dtype, or `dtype`, and the network computes in it. If several dtypes are stored, such
    as float32 norms and bfloat16 matrices, all parameters get the one that represents every number. Raises
    `CheckpointError` naming the file that is missing, damaged, foreign or of a newer format.
    """
    directory, config = _intact(path)
    adapter, quantization = read_adapter_config(directory), read_quantization(directory)
    with _reading(directory, quantization, device, dtype, mapped) as weights:
        tokenizer = _fitting_tokenizer(directory, config)
        with torch.device("meta"):
            model = blank_model(config)
        if has_reward_head(directory) and adapter is None:
            add_scalar_head(model, REWARD_HEAD)
        return_freed_memory()  # of the tokenizer
        given = weights()
    moves = torch.device(device).type == "cpu" and memory_nodes() > 1
    if moves:  # a buffer would keep the memory that it shares with weights which are copied
        buffers = {name for name, _ in model.named_buffers()}
        given = {name: tensor.clone() if name in buffers else tensor for name, tensor in given.items()}
    load_weights(model, given, directory)
    del weights, given  # which would keep every weight until all are converted or copied
    return_freed_memory()
    common = dtype or reduce(torch.promote_types, [parameter.dtype for parameter in model.parameters()])
    is_mapped = mapped or (directory / LINK).is_file()
    # Those of a chunk of memory, which have similar sizes, are copied one after another. Buffers, such as position
    # tables, keep their precision.
    for parameter in sorted(model.parameters(), key=torch.Tensor.numel, reverse=True):
        if not isinstance(parameter, StoredWeight):
            data = parameter.data.to(common)
            has_experts = data.ndim > 2 and data.shape[1] > 1
            parameter.data = copied_by_threads(data, are_experts=has_experts) if moves and not is_mapped else data
        elif moves:
            parameter.move_to_threads()
    if adapter is not None:
        put_changes(model, adapter, read_weights(directory / ADAPTER), directory / ADAPTER)
        model = merged(model) if merge and quantization is None else model
    generation = read_generation(directory)
    ends = end_ids(generation, config.vocabulary, str(directory / GENERATION))
    made = read_json(directory / PROVENANCE)
    return LoadedModel(model.to(device).eval(), tokenizer, model.config, made, directory, ends, generation)


def stored_tensors(directory: Path) -> dict[str, LazyTensor]:
    """Returns the tensors of a model directory by name, without reading them; see `open_weights`."""
    link = LinkedWeights.read(directory)
    if link is None:
        return open_weights(directory)
    from sheepop.checkpoint.foreign import foreign_tensors  # loads all families, which other models do not need

    return foreign_tensors(link)


@contextmanager
def _reading(
    directory: Path, quantization: Quantization | None, device: str, dtype: torch.dtype | None, mapped: bool
) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Reads the weights of a model directory on other threads while the block runs.

    The block gets a function that waits for the weights and returns them by name. They lie in the memory of the process
    unless they are `mapped` or linked.
    """
    tensors = stored_tensors(directory)
    # Integers are arranged anew in their memory; those of a linked file are decoded to memory of their own.
    stays = mapped and quantization is None
    is_copied = not stays and not (directory / LINK).is_file() and torch.device(device).type == "cpu"

    def read(name: str, stored: Sequence[LazyTensor]) -> Tensor:
        parts = [(part.load() if is_copied else part.read().contiguous()).to(device) for part in stored]
        if quantization is None or len(parts) == 1:
            return parts[0]
        return nn.Parameter(quantization.matrix(name, parts, dtype, directory, in_place=True), requires_grad=False)

    whole = with_parts(tensors) if quantization is not None else {name: [tensor] for name, tensor in tensors.items()}
    # The largest come first: while they are decoded without Python, the block can run.
    ordered = sorted(whole, key=lambda name: whole[name][0].num_bytes, reverse=True)
    pool = ThreadPoolExecutor(min(_MOST_READERS, math.ceil(usable_cores())))
    try:
        found = {name: pool.submit(read, name, whole[name]) for name in ordered}
        yield lambda: {name: found[name].result() for name in whole}
    finally:
        pool.shutdown(cancel_futures=True)


def open_model(path: str | Path) -> ForeignModel:
    """Verifies the model at `path` and returns it without reading the weights, for export to another format.

    Quantised weights are dequantised, and an adapter is merged.
    """
    directory, config = _intact(path)
    tokenizer = _fitting_tokenizer(directory, config)
    if config.architecture != "decoder":
        raise CheckpointError(f"{directory} is an encoder-decoder, which none of SheepOp's export formats supports.")
    if has_reward_head(directory):
        raise CheckpointError(f"{directory} is a reward model, which none of SheepOp's export formats supports.")
    tensors = stored_tensors(directory)
    if read_adapter_config(directory) is not None:
        whole = merged(dequantized(load_model(directory, merge=False).model))
        config, weights = whole.config, unique_weights(whole)
        tensors = {name: LazyTensor.of(tensor) for name, tensor in weights.items()}
    elif (quantization := read_quantization(directory)) is not None:
        tensors = quantization.dequantized(tensors, directory)
    expected = expected_tensors(config)
    _check_fit({name: tensor.shape for name, tensor in tensors.items()}, expected, directory)
    tensors = {name: tensors[name] for name in expected}
    return ForeignModel(config, tensors, tokenizer, read_generation(directory), read_json(directory / PROVENANCE))


def _intact(path: str | Path) -> tuple[Path, ModelConfig]:
    """Verifies all checksums of the model at `path`; returns its directory and its configuration."""
    directory = resolve_model_directory(path)
    config = read_model_config(directory)
    if problems := damaged_model(directory):
        raise CheckpointError(f"The model in {directory} cannot be used: {'; '.join(problems)}.")
    return directory, config


def _fitting_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    tokenizer = load_tokenizer(directory)
    require_fit(tokenizer, config, directory)
    return tokenizer


def unique_weights(model: Transformer) -> dict[str, Tensor]:
    """Returns the state dict without the duplicate of tied weights, and without a policy's value weights."""
    state = model.state_dict()
    if model.config.tie_weights:
        del state["lm_head.weight"]
    return {name: tensor.detach() for name, tensor in state.items() if not is_of_values(name)}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors file; raises `CheckpointError` if it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None


def load_weights(model: Transformer, weights: dict[str, Tensor], source: Path) -> None:
    """Loads `weights` into `model`; raises `CheckpointError` naming missing, unexpected and misshapen tensors."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if not is_of_values(name)}
    if model.config.tie_weights:
        del expected["lm_head.weight"]
    _check_fit({name: tuple(tensor.shape) for name, tensor in weights.items()}, expected, source)
    model.load_state_dict(weights, strict=False, assign=any(tensor.is_meta for tensor in model.parameters()))
    model.tie()


def _check_fit(found: Mapping[str, Shape], expected: Mapping[str, Shape], source: Path) -> None:
    if problems := tensor_problems(found, expected):
        raise CheckpointError(f"The weights in {source} do not fit their configuration: {listed(problems)}.")
