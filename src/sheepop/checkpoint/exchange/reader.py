"""Reads model directories in the format of Hugging Face's transformers: configuration, weights, tokenizer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sheepop.checkpoint.exchange.choice import IMPORTED
from sheepop.checkpoint.exchange.families.multimodal import MULTIMODAL
from sheepop.checkpoint.exchange.family import Family, Reading
from sheepop.checkpoint.exchange.quantised_formats import FLOATS
from sheepop.checkpoint.exchange.quantised_weights import dequantised, dtype_of_model, take_quantisation
from sheepop.checkpoint.exchange.rope_parameters import longrope_note
from sheepop.checkpoint.exchange.tensor_rules import TensorGroup, to_ours
from sheepop.checkpoint.expected_tensors import tensor_problems
from sheepop.checkpoint.generation_settings import GENERATION, end_ids
from sheepop.checkpoint.given import shown
from sheepop.checkpoint.lazy_tensor import ForeignModel, LazyTensor, pieces
from sheepop.checkpoint.mapping import REASONS
from sheepop.checkpoint.source_directory import CONFIG, check_tokenizer_files, read_table
from sheepop.checkpoint.vocabulary import fitting
from sheepop.checkpoint.weight_files import listed, open_weights
from sheepop.core.errors import CheckpointError, TokenizerError, first_few
from sheepop.model.config import ModelConfig
from sheepop.tokenizer import Tokenizer, load_tokenizer

_LONGEST_VERSION = 40
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_KEYS = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.[kv]_(?:proj|norm)\.")
_HEAD = "lm_head.weight"
_EMBEDDING = "embedding.weight"


class OpenedDirectory(NamedTuple):
    """A model directory without its tokenizer: `tensors` are ours, `keys` those of its configuration."""

    family: Family
    config: ModelConfig
    keys: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    notes: list[str]


class LanguageModel(NamedTuple):
    """The family of a language model, its configuration, and its keys and tensors without those of other parts."""

    family: Family
    reading: Reading
    keys: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    notes: list[str]


def read_hugging_face(
    directory: Path, tokenizer: Tokenizer | None = None, dtype: torch.dtype | None = None
) -> ForeignModel:
    """Returns the model in `directory` without reading its weights; `tokenizer` replaces the directory's own.

    Raises `CheckpointError` as `open_hugging_face` does, and for a tokenizer that does not fit.
    """
    family, config, keys, tensors, remarks = open_hugging_face(directory, dtype)
    tokenizer = _own_tokenizer(directory) if tokenizer is None else tokenizer
    tokenizer, notes = fitting(tokenizer, config, directory)
    source = {
        "format": "hugging face",
        "family": family.model_type,
        "directory": os.fsencode(directory.resolve()).decode(errors="replace"),
        "transformers_version": ascii(keys.get("transformers_version"))[:_LONGEST_VERSION].strip("'"),
    }
    generation = _generation(directory, keys, config)
    return ForeignModel(config, tensors, tokenizer, generation, source, (*notes, *remarks))


def open_hugging_face(directory: Path, dtype: torch.dtype | None = None) -> OpenedDirectory:
    """Opens the model in `directory` without its tokenizer, and without reading its weights.

    Quantised weights become weights of `dtype`, None for that of the model; the others keep theirs. Raises
    `CheckpointError` for an unknown family or key, for tensors that are missing, unexpected or of the wrong shape (each
    named), and for a file that is damaged or outside the directory.
    """
    keys: Mapping[str, Any] | None = read_table(directory, CONFIG)
    if keys is None:
        raise CheckpointError(
            f"{directory} is not a model in the Hugging Face format: it has no {CONFIG}. Give the directory that "
            "contains it and the weights."
        )
    family, (config, ignored, remarks), keys, tensors, aside = language_model(keys, directory, open_weights, dtype)
    found, left_out = canonical(tensors, family)
    if family.further_layers:
        further = {name for name in found if (place := _LAYER.match(name)) and int(place[1]) >= config.num_layers}
        found = {name: tensor for name, tensor in found.items() if name not in further}
        aside += [f"Left out, because they predict further tokens: {listed(sorted(further), 3)}."] if further else []
    unread = {name for name in found if (place := _KEYS.match(name)) and not _has_keys(config, int(place[1]))}
    found = {name: tensor for name, tensor in found.items() if name not in unread}
    _check_counts(config, found, directory)
    groups = family.tensor_groups(config)
    found = _without_tied_head(family, config, found, groups, directory)
    aside += _drop_zero_biases(found, groups)
    _check(config, groups, found, directory)
    notes = []
    if unused := [*unread, *(name for name in left_out if name.startswith(family.unused))]:
        notes.append(f"Left out {len(unused)} tensors that transformers does not read: {listed(sorted(unused), 3)}.")
    left_out = [name for name in left_out if name not in unused]
    notes += [*aside, *remarks, *_notes(keys, config, left_out, ignored)]
    return OpenedDirectory(family, config, keys, to_ours(groups, found, config), notes)


def _has_keys(config: ModelConfig, layer: int) -> bool:
    return layer >= config.num_layers or config.kv_source(layer) in (layer, None)


def _notes(keys: Mapping[str, Any], config: ModelConfig, left_out: list[str], ignored: Sequence[str]) -> list[str]:
    """Returns notes on parts of the source that were not imported."""
    notes = [f"Left out, because they are derived from the configuration: {listed(left_out, 3)}."] if left_out else []
    if ignored:
        notes.append(
            f"Ignored keys of {CONFIG}, which transformers does not read for {keys['model_type']}: "
            f"{first_few(ignored, 20)}."
        )
    notes += longrope_note(config, keys.get("max_position_embeddings"))
    if keys.get("auto_map"):
        notes.append(
            f"{CONFIG} refers to program code that comes with the model (auto_map). SheepOp never runs it, and read "
            f"the model as an ordinary {keys['model_type']} (its model_type)."
        )
    return notes


def _own_tokenizer(directory: Path) -> Tokenizer:
    check_tokenizer_files(directory)
    try:
        return load_tokenizer(directory)
    except TokenizerError as error:
        raise TokenizerError(f"{error} You can give another tokenizer with --tokenizer.") from None


def language_model(
    keys: Mapping[str, Any],
    directory: Path,
    weights: Callable[[Path], Mapping[str, LazyTensor]] = lambda _: {},
    dtype: torch.dtype | None = None,
) -> LanguageModel:
    """Returns the language model of the configuration `keys`; without `weights` only the configuration is checked.

    `weights` opens the tensors of `directory`, once the family is known. `dtype` is that of `read_hugging_face`, as are
    the errors.
    """
    where = str(directory / CONFIG)
    multimodal = MULTIMODAL.get(str(keys.get("model_type")))
    family = family_of(keys, directory) if multimodal is None else multimodal.text
    keys, quantisation = take_quantisation(keys, where)
    tensors = weights(directory)
    notes: list[str] = []
    if quantisation is not None and tensors:
        tensors, notes = dequantised(tensors, quantisation, dtype or dtype_of_model(keys, tensors), directory)
    if multimodal is not None:
        keys, tensors, aside = multimodal.language_model(keys, tensors, where)
        notes += aside
        where += ": text_config"
    return LanguageModel(family, family.read(keys, where), keys, tensors, notes)


def family_of(keys: Mapping[str, Any], directory: Path) -> Family:
    """Returns the family for `model_type`; raises `CheckpointError` with the known families if there is none."""
    model_type = keys.get("model_type")
    known = IMPORTED | {alias: family for family in IMPORTED.values() for alias in family.aliases}
    if isinstance(model_type, str) and model_type in known:
        return known[model_type]
    found = "there is no model_type" if model_type is None else f"model_type = {shown(model_type)} is not supported"
    found += REASONS.get(str(model_type), "")
    raise CheckpointError(
        f"{directory / CONFIG}: {found}. Choose a model of a supported family: {', '.join((*known, *MULTIMODAL))}."
    )


def canonical(tensors: Mapping[str, LazyTensor], family: Family) -> tuple[dict[str, LazyTensor], list[str]]:
    """Returns the tensors with the names of the family's table, and the names of those that are left out.

    Some published files lack the prefix of the table, and some versions of transformers use another name for the output
    projection.
    """
    heads = {rule.theirs for rule in family.tensors if not rule.theirs.startswith(family.prefix)} | {*family.renamed}
    prefixed = any(name.startswith(family.prefix) for name in tensors)
    found: dict[str, LazyTensor] = {}
    left_out = []
    for name, tensor in tensors.items():
        if name.endswith(family.buffers) or name.startswith(family.unused):
            left_out.append(name)
            continue
        full = name if prefixed or name in heads else family.prefix + name
        full = family.renamed.get(full, full)
        found[full if full not in found else name] = tensor
    return found, left_out


def _check_counts(config: ModelConfig, found: Mapping[str, LazyTensor], directory: Path) -> None:
    """Refuses a configuration with far more layers than the files have tensors, before its tensors are listed."""
    experts = 0 if config.experts is None else config.experts.count
    layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    if config.num_layers + experts * layers > len(found):
        raise CheckpointError(
            f"{directory / CONFIG} describes {config.num_layers} layers"
            + (f" with {experts} experts" if experts else "")
            + f", but the directory has only {len(found)} tensors."
        )


def _without_tied_head(
    family: Family, config: ModelConfig, found: dict[str, LazyTensor], groups: Sequence[TensorGroup], directory: Path
) -> dict[str, LazyTensor]:
    """Drops an output projection that is stored although it is tied to the embedding."""
    head = next(rule.theirs for rule in family.tensors if rule.ours == (_HEAD,))
    if not config.tie_weights or head not in found:
        return found
    name = next(name for group in groups if _EMBEDDING in group.ours for name in group.theirs)
    if name in found and not same_values(found[head], found[name]):
        raise CheckpointError(
            f"{directory}: {head} differs from {name}, although they are tied according to {CONFIG} "
            "(tie_word_embeddings). Set this key to false there to keep both."
        )
    return {key: tensor for key, tensor in found.items() if key != head}


def _drop_zero_biases(found: dict[str, LazyTensor], groups: Sequence[TensorGroup]) -> list[str]:
    """Takes biases that are zero out of `found` where the family has none (GPTQ writes them); returns a note."""
    expected = {name for group in groups for name in group.theirs}
    layers = {name.removesuffix(".weight") for name in expected}
    zero = [
        name
        for name in found.keys() - expected
        if name.endswith(".bias") and name.removesuffix(".bias") in layers and not found[name].read().any()
    ]
    for name in zero:
        del found[name]
    return [f"Left out biases that are zero: {listed(sorted(zero), 3)}."] if zero else []


def _check(
    config: ModelConfig, groups: Sequence[TensorGroup], found: Mapping[str, LazyTensor], directory: Path
) -> None:
    expected = {name: shape for group in groups for name, shape in group.theirs.items()}
    rows = {name for group in groups if {_EMBEDDING, _HEAD} & group.ours.keys() for name in group.theirs}
    reasons = dict.fromkeys(rows, f" for vocab_size = {config.vocabulary}")
    problems = tensor_problems({name: tensor.shape for name, tensor in found.items()}, expected, reasons)
    problems += [
        f"{name} has the dtype {str(found[name].dtype).removeprefix('torch.')}, which SheepOp cannot compute with; "
        "export quantised weights in float16 or bfloat16 first"
        for name in expected
        if name in found and found[name].dtype not in FLOATS
    ]
    if problems:
        raise CheckpointError(
            f"The weights in {directory} do not fit its {CONFIG}: {listed(problems)}. Take both from the same model."
        )


def _generation(directory: Path, keys: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of ``generation_config.json``; without that file, ``eos_token_id`` from ``config.json``."""
    settings = read_table(directory, GENERATION)
    if settings is None:
        settings = {"eos_token_id": keys["eos_token_id"]} if keys.get("eos_token_id") is not None else {}
    end_ids(settings, config.vocabulary, str(directory))
    try:
        json.dumps(settings, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:
        raise CheckpointError(f"{directory / GENERATION} contains a value that JSON does not allow: {error}.") from None
    return settings


def same_values(one: LazyTensor, other: LazyTensor) -> bool:
    """Whether two tensors have the same bits, including those of NaN."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    pairs = zip(pieces(one.read().contiguous()), pieces(other.read().contiguous()), strict=True)
    return all(torch.equal(here.view(torch.uint8), there.view(torch.uint8)) for here, there in pairs)
