"""Adapters that are given beside a model: PEFT's, or the changes that model directories of ours hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sheepop.adapt.lora import activate, adapters, can_merge, merged
from sheepop.checkpoint.changes import put_changes
from sheepop.checkpoint.exchange.adapters import CONFIG, read_adapter
from sheepop.checkpoint.exchange.choice import choose_family
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.model_directory import (
    ADAPTER,
    LoadedModel,
    read_adapter_config,
    read_model_config,
    read_weights,
)
from sheepop.checkpoint.run_directory import damaged_model, resolve_model_directory
from sheepop.core.errors import CheckpointError
from sheepop.model import Transformer
from sheepop.tokenizer import holds_tokenizer, load_tokenizer


def with_adapters(loaded: LoadedModel, paths: Sequence[str | Path], *, merge: bool = True) -> LoadedModel:
    """The model with these adapters, added up, over the same memory where nothing is changed.

    A path means a directory in PEFT's format, or a model or run that was tuned with LoRA. With `merge` they are in the
    weights, where these are not integers, and else beside them. The last adapter that has the model's tokenizer gives
    its chat template. Raises `CheckpointError` for an adapter that is damaged or does not fit.
    """
    model, tokenizer = loaded.model.sharing_copy(), loaded.tokenizer
    for number, path in enumerate(paths, start=1):
        try:
            directory = _put(Path(path), model, loaded, f"added-{number}")
        except CheckpointError as error:
            raise CheckpointError(f"The adapter {path} cannot be put on {loaded.directory}: {error}") from None
        if holds_tokenizer(directory):
            own = load_tokenizer(directory)
            tokenizer = own if own.fingerprint() == tokenizer.fingerprint() else tokenizer
    activate(model, *adapters(model))
    whole = merged(model) if merge and can_merge(model) else model
    return replace(loaded, model=whole.eval(), tokenizer=tokenizer)


def family_of(loaded: LoadedModel) -> Family:
    """The family that other programs have a model in: the one that it was imported from, or the first that fits."""
    imported = loaded.provenance.get("imported")
    return choose_family(loaded.config, imported.get("family") if isinstance(imported, dict) else None)


def _put(path: Path, model: Transformer, loaded: LoadedModel, name: str) -> Path:
    """Puts one adapter beside the layers of `model`; the directory that it is in."""
    if (path / CONFIG).is_file():
        read_adapter(path, model, family_of(loaded), name=name)
        return path
    directory = resolve_model_directory(path)
    read_model_config(directory)
    config = read_adapter_config(directory)
    if config is None:
        raise CheckpointError(
            f"{directory} has neither {CONFIG}, as adapters of PEFT do, nor a change beside its weights, as a run with "
            "tuning.lora has."
        )
    if problems := damaged_model(directory):
        raise CheckpointError("; ".join(problems) + ".")
    put_changes(model, config, read_weights(directory / ADAPTER), directory / ADAPTER, name=name)
    return directory
