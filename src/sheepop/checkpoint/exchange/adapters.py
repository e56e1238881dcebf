"""LoRA adapters in the format of Hugging Face's PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

If a model family fuses several of our layers into one, so do its adapters. Reading splits B into the rows of each
layer. Writing stacks their A and puts their B on a block diagonal, which is exact, with the sum of their ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sheepop.adapt.lora import LoraEmbedding, LowRank, activate, adapted_layers, adapters, full, put, row_lengths
from sheepop.adapt.lora_config import LoraConfig
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.exchange.tensor_rules import PER_EXPERT, SAME, Layout
from sheepop.checkpoint.given import Given
from sheepop.checkpoint.lazy_tensor import LazyTensor
from sheepop.checkpoint.model_kind import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE
from sheepop.checkpoint.safetensors_file import open_safetensors, read_metadata, write_safetensors
from sheepop.checkpoint.source_directory import read_table, source_file
from sheepop.core.errors import CheckpointError, ConfigError, first_few
from sheepop.core.files import write_json
from sheepop.model import ModelConfig, Transformer

CONFIG, WEIGHTS = ADAPTER_CONFIG, ADAPTER_WEIGHTS
_PREFIX = "base_model.model."
_LINEAR = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
# Keys that do not affect the results of a trained adapter.
_IRRELEVANT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "qalora_group_size",
    "runtime_config", "eva_config", "loftq_config", "megatron_core",
}  # fmt: skip
# Initialisations that do not change the base weights.
_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal", "default")


@dataclass(frozen=True)
class _Place:
    """A layer of the family: the paths of our layers in it, the layout of their rows, and its weight's shape."""

    ours: tuple[str, ...]
    layout: Layout
    rows: tuple[int, ...]
    length: int


def write_adapter(
    directory: Path, model: Transformer, family: Family, *, name: str = "default", base: Sequence[str] = ()
) -> None:
    """Writes the adapter `name` into a directory, which the caller makes durable.

    `base` are the hashes of the weights that it fits, which `trained_on` reads back.
    Raises `ConfigError` if the model has no such adapter, and `CheckpointError` for a layer that the family lacks.
    """
    if name not in adapters(model):
        known = ", ".join(adapters(model)) or "none"
        raise ConfigError(f"The model has no adapter called {name!r}; it has: {known}.")
    changes = {path: layer.changes[name] for path, layer in adapted_layers(model).items() if name in layer.changes}
    tensors: dict[str, Tensor] = {}
    sizes: dict[str, tuple[int, float]] = {}
    for theirs, place in _places(model, family).items():
        parts = [changes.get(path) for path in place.ours]
        if any(part is not None for part in parts):
            found, sizes[theirs] = _joined(model, place, parts)
            tensors |= {f"{_PREFIX}{theirs}.{kind}": tensor for kind, tensor in found.items()}
    config = next(iter(changes.values())).config
    assert isinstance(config, LoraConfig)
    write_json(directory / CONFIG, _described(config, sizes, family))
    lazy = {name: LazyTensor.of(tensor) for name, tensor in tensors.items()}
    write_safetensors(directory / WEIGHTS, lazy, {BASE: " ".join(base)} if base else {})


def trained_on(directory: Path) -> list[str]:
    """Returns the hashes of the weights that an adapter which SheepOp wrote fits; of others it returns none."""
    weights = source_file(directory, WEIGHTS)
    return [] if weights is None else read_metadata(weights).get(BASE, "").split()


def _described(config: LoraConfig, sizes: Mapping[str, tuple[int, float]], family: Family) -> dict[str, Any]:
    """Returns PEFT's settings; layers whose rank or alpha differs from the most common one are listed individually."""
    rank, alpha = max(set(sizes.values()), key=list(sizes.values()).count)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilised,
        "use_dora": config.dora,
        "bias": "none",
        "fan_in_fan_out": any(getattr(rule.layout, "transposed", False) for rule in family.tensors),
        "target_modules": sorted(sizes),
        "modules_to_save": None,
        "rank_pattern": {name: size[0] for name, size in sizes.items() if size[0] != rank},
        "alpha_pattern": {name: size[1] for name, size in sizes.items() if size[1] != alpha},
    }


def _joined(model: Transformer, place: _Place, parts: Sequence[Any]) -> tuple[dict[str, Tensor], tuple[int, float]]:
    """Returns the tensors of one layer of the family from our adapters, and its rank and alpha."""
    present = [part for part in parts if part is not None]
    rank, config = sum(part.config.rank for part in present), present[0].config
    alpha = config.alpha
    if rank != config.rank:  # else scale * rank may differ from alpha in the last bit
        alpha = config.scale * (math.sqrt(rank) if config.rank_stabilised else rank)
    down = torch.cat([part.down.detach() for part in present])
    ups, begin = [], 0
    for part, rows in zip(parts, place.rows, strict=True):
        up = down.new_zeros(rows, rank)
        if part is not None:
            up[:, begin : begin + part.config.rank] = part.up.detach() * (part.config.scale / config.scale)
            begin += part.config.rank
        ups.append(up)
    up = place.layout.to_theirs(ups, model.config)[0]
    if isinstance(adapted_layers(model).get(place.ours[0]), LoraEmbedding):
        return dict(zip(_EMBEDDING, (down.cpu(), up.cpu()), strict=True)), (rank, alpha)
    found = dict(zip(_LINEAR, (down.cpu(), up.cpu()), strict=False))
    if config.dora:
        lengths = [
            row_lengths(full(model.get_parameter(f"{path}.weight")).float())
            if part is None
            else part.magnitude.detach()
            for path, part in zip(place.ours, parts, strict=True)
        ]
        found[_LINEAR[2]] = place.layout.to_theirs(lengths, model.config)[0].cpu()
    return found, (rank, alpha)


def read_adapter(directory: Path, model: Transformer, family: Family, *, name: str = "default") -> None:
    """Adds the adapter in `directory` to `model`, as the only active one.

    Raises `CheckpointError` for another kind of adapter, for an unknown setting that may affect the results, and for
    tensors that are missing, unexpected, or of the wrong shape (each named); the model is then unchanged.
    """
    keys = read_table(directory, CONFIG)
    weights = source_file(directory, WEIGHTS)
    if keys is None or weights is None:
        raise CheckpointError(f"{directory} is not a LoRA adapter: it has no {CONFIG if keys is None else WEIGHTS}.")
    given = Given(keys, str(directory / CONFIG))
    # Older versions use a longer name for the row lengths of DoRA.
    stored = open_safetensors(weights).items()
    tensors = {key.replace("magnitude_vector.weight", "magnitude_vector"): tensor for key, tensor in stored}
    changes: list[tuple[str, LowRank]] = []
    saved = given.take("modules_to_save", None) or []
    if not isinstance(saved, list):
        raise given.problem("modules_to_save", "is not a list")
    for theirs, place in _places(model, family).items():
        kinds = {kind: f"{_PREFIX}{theirs}.{kind}" for kind in (*_LINEAR, *_EMBEDDING)}
        found = {kind: tensors.pop(full_name) for kind, full_name in kinds.items() if full_name in tensors}
        if found:
            changes += _cut(found, place, theirs, given, model)
        elif any(theirs == each or theirs.endswith(f".{each}") for each in saved):
            changes.append(_replaced(tensors, theirs, place, given.where, model))
    if given.typed("ensure_weight_tying", bool, False) and model.config.tie_weights:
        changes = _with_tied(changes)
    _check(given)
    _leave_out_copies(tensors, model, family, str(weights))
    if tensors:
        raise CheckpointError(
            f"{weights}: SheepOp has no layer for {first_few(sorted(tensors), 4)}. It supports adapters of linear "
            "layers in blocks, of the embedding and of the output projection."
        )
    if not changes:
        raise CheckpointError(f"{weights} has no tensors.")
    if name in adapters(model):
        raise ConfigError(f"The model already has an adapter called {name!r}. Choose another name.")
    model.requires_grad_(False)
    for path, change in changes:
        put(model, path, name, change)
    activate(model, name)


def _cut(
    found: Mapping[str, LazyTensor], place: _Place, theirs: str, given: Given, model: Transformer
) -> Iterator[tuple[str, LowRank]]:
    """Yields the adapters of our layers from the tensors of one layer of the family."""
    kinds = _EMBEDDING if _EMBEDDING[0] in found else _LINEAR
    dora = given.typed("use_dora", bool, False) and kinds is _LINEAR
    if dora and place.ours == ("lm_head",):
        raise CheckpointError(
            f"{given.where}: use_dora is for layers in blocks, and {theirs} is the output projection."
        )
    wanted = kinds[: 3 if dora else 2]
    if set(found) != set(wanted):
        raise CheckpointError(f"{given.where}: {theirs} has the tensors {sorted(found)}, but needs {sorted(wanted)}.")
    rank = _pattern(given, "rank_pattern", theirs, given.typed("r", int, 8))
    alpha = _pattern(given, "alpha_pattern", theirs, given.typed("lora_alpha", float, 8))
    shapes: dict[str, tuple[int, ...]] = {wanted[0]: (rank, place.length), wanted[1]: (sum(place.rows), rank)}
    if dora:
        shapes[wanted[2]] = (sum(place.rows),)
    for kind, shape in shapes.items():
        if found[kind].shape != shape:
            raise CheckpointError(f"{given.where}: {theirs}.{kind} has the shape {found[kind].shape}, not {shape}.")
    down, up, *magnitude = (found[kind].read().float() for kind in wanted)
    ups = place.layout.to_ours([up], [(rows, rank) for rows in place.rows], model.config)
    magnitudes = place.layout.to_ours(magnitude, [(rows,) for rows in place.rows], model.config) if dora else ups
    for path, part, lengths in zip(place.ours, ups, magnitudes, strict=True):
        dropout, stabilised = given.typed("lora_dropout", float, 0.0), given.typed("use_rslora", bool, False)
        settings = {"rank": rank, "alpha": alpha, "dropout": dropout, "rank_stabilised": stabilised, "dora": dora}
        config = LoraConfig(targets=(path,), **settings)
        yield path, LowRank(config, down.clone(), part.contiguous(), lengths.contiguous() if dora else None)


def _replaced(
    tensors: dict[str, LazyTensor], theirs: str, place: _Place, where: str, model: Transformer
) -> tuple[str, LowRank]:
    """Returns the change of a layer whose trained weight PEFT saved as a whole: the difference, of full rank."""
    key, ours = f"{_PREFIX}{theirs}.weight", place.ours[0]
    weight = full(model.get_parameter(f"{ours}.weight")).float().cpu()
    is_one = len(place.ours) == 1 and place.layout is SAME
    if not is_one or key not in tensors or tuple(tensors[key].shape) != tuple(weight.shape):
        raise CheckpointError(
            f"{where}: modules_to_save names {theirs}, but SheepOp finds no weight {key} with the shape of {ours}. "
            "It reads whole weights of single linear layers, embeddings and output projections."
        )
    difference, one = tensors.pop(key).read().float() - weight, torch.eye(weight.shape[1])
    settings = LoraConfig(targets=(ours,), rank=len(one), alpha=float(len(one)))
    is_embedding = isinstance(model.get_submodule(ours), nn.Embedding)
    return ours, LowRank(settings, *((difference.t().contiguous(), one) if is_embedding else (one, difference)))


def _with_tied(changes: list[tuple[str, LowRank]]) -> list[tuple[str, LowRank]]:
    """Adds the change of the embedding to the output projection, as PEFT does with ``ensure_weight_tying``."""
    of_embedding = dict(changes).get("embedding")
    if of_embedding is None or "lm_head" in dict(changes):
        return changes
    down, up = (each.detach().t().contiguous() for each in (of_embedding.up, of_embedding.down))
    return [*changes, ("lm_head", LowRank(of_embedding.config, down, up))]


def _untied(model: Transformer) -> ModelConfig:
    """The configuration in which embedding and output projection are layers apart, as they are for adapters."""
    return model.config.replace(tie_weights=False)


def _leave_out_copies(tensors: dict[str, LazyTensor], model: Transformer, family: Family, where: str) -> None:
    """Removes embedding and head weights, which PEFT may save with an adapter; they must equal those of the model."""
    for group in family.tensor_groups(_untied(model)):
        ours = next(iter(group.ours))
        theirs = next(iter(group.theirs), "").removesuffix(".weight")
        for copied in (f"{_PREFIX}{theirs}.base_layer.weight", f"{_PREFIX}{theirs}.weight"):
            if ours in ("embedding.weight", "lm_head.weight") and copied in tensors:
                found, weight = tensors.pop(copied).read(), full(model.get_parameter(ours)).cpu()
                if not torch.equal(found.to(weight.dtype), weight):
                    raise CheckpointError(
                        f"{where}: {copied} differs from the model's {ours}. Give the model that the adapter is for."
                    )


def _pattern(given: Given, key: str, module: str, default: float) -> Any:
    """Returns a module's value for `key`, whose patterns are regular expressions for the end of module paths."""
    patterns = given.take(key, None) or {}
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        try:
            matches = module == pattern or re.fullmatch(rf"(.*\.)?({pattern})", module)
        except re.error:
            raise given.problem(key, "has an entry that is not a regular expression") from None
        if matches:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
                raise given.problem(key, "has an entry that is not a number above 0")
            return value
    return default


def _check(given: Given) -> None:
    """Refuses settings with which the adapter would compute something else."""
    if given.take("peft_type", None) != "LORA":
        raise given.problem("peft_type", "is not LORA, the kind of adapter that SheepOp reads")
    if given.take("bias", "none") != "none":
        raise given.problem("bias", "means that biases were trained too, which SheepOp does not read")
    if given.take("init_lora_weights", True) not in _BEGINNINGS:
        raise given.problem("init_lora_weights", "changed the base weights; convert the adapter to plain LoRA")
    for key in given.unread():
        if key not in _IRRELEVANT and given.take(key) not in (None, False, [], {}):
            raise given.problem(key, "is not known, and may affect the results of the adapter")


def _places(model: Transformer, family: Family) -> dict[str, _Place]:
    """Returns the layers that can have adapters, by their path in the family."""
    found = {}
    for group in family.tensor_groups(_untied(model)):
        names = tuple(name.removesuffix(".weight") for name in group.ours)
        if len(group.theirs) != 1 or group.layout is PER_EXPERT:
            continue
        if any(len(shape) != 2 or ".router." in name for name, shape in group.ours.items()):
            continue
        shapes = [shape[::-1] if name == "embedding.weight" else shape for name, shape in group.ours.items()]
        # B has the row layout of the weight; it does not matter whether the weight is stored transposed, as (in, out).
        layout = group.layout if getattr(group.layout, "by_head", False) else SAME
        place = _Place(names, layout, tuple(shape[0] for shape in shapes), shapes[0][1])
        found[next(iter(group.theirs)).removesuffix(".weight")] = place
    return found
