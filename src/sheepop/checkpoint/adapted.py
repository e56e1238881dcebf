"""Adds adapters to a loaded model, from PEFT directories or from our model directories with LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sheepop.adapt.lora import activate, adapters, can_merge, merged
from sheepop.checkpoint.changes import put_changes
from sheepop.checkpoint.exchange.adapters import CONFIG, read_adapter, trained_on
from sheepop.checkpoint.exchange.choice import choose_family
from sheepop.checkpoint.exchange.family import Family
from sheepop.checkpoint.generation_settings import GENERATION, end_ids, read_generation, with_ends
from sheepop.checkpoint.identity import identities, require_base
from sheepop.checkpoint.model_description import read_adapter_config, read_model_config
from sheepop.checkpoint.model_directory import ADAPTER, LoadedModel, read_weights
from sheepop.checkpoint.model_source import resolve_adapter, resolve_model_directory
from sheepop.checkpoint.run_directory import damaged_model
from sheepop.core.errors import CheckpointError
from sheepop.model import Transformer
from sheepop.tokenizer import holds_tokenizer, load_tokenizer

ADDED = "added-1"
"""The name in the network of the first adapter that `with_adapters` adds."""


def with_adapters(loaded: LoadedModel, paths: Sequence[str | Path], *, merge: bool = True) -> LoadedModel:
    """Returns the model with the sum of these adapters, sharing the memory of unchanged weights.

    A path is a directory in PEFT's format, the name of a published one, or a model or run that was tuned with LoRA.
    `merge` merges the adapters into the weights, unless these are quantised. The chat template comes from the last
    adapter that has the same tokenizer, and what ends the texts of adapters ends those of the sum. Raises
    `CheckpointError` for an adapter that is damaged or does not fit.
    """
    model, tokenizer, generation = loaded.model.sharing_copy(), loaded.tokenizer, loaded.generation
    for number, path in enumerate(paths, start=1):
        try:
            directory = _put(Path(path), model, loaded, f"added-{number}")
        except CheckpointError as error:
            raise CheckpointError(f"The adapter {path} cannot be added to {loaded.directory}: {error}") from None
        if holds_tokenizer(directory):
            own = load_tokenizer(directory)
            tokenizer = own if own.fingerprint() == tokenizer.fingerprint() else tokenizer
        where = str(directory / GENERATION)
        generation = with_ends(generation, end_ids(read_generation(directory), loaded.config.vocabulary, where))
    activate(model, *adapters(model))
    whole = merged(model) if merge and can_merge(model) else model
    ends = end_ids(generation, loaded.config.vocabulary, GENERATION)
    return replace(
        loaded, model=whole.eval(), config=whole.config, tokenizer=tokenizer, generation=generation, end_ids=ends
    )


def family_of(loaded: LoadedModel) -> Family:
    """Returns the family of a model in other programs: the one it was imported from, or the first that fits."""
    imported = loaded.provenance.get("imported")
    return choose_family(loaded.config, imported.get("family") if isinstance(imported, dict) else None)


def _put(path: Path, model: Transformer, loaded: LoadedModel, name: str) -> Path:
    """Adds one adapter to `model` and returns the directory that contains it."""
    path = resolve_adapter(path)
    if (path / CONFIG).is_file():
        read_adapter(path, model, family_of(loaded), name=name)
        require_base(trained_on(path), loaded.directory)
        return path
    directory = resolve_model_directory(path)
    read_model_config(directory)
    config = read_adapter_config(directory)
    if config is None:
        raise CheckpointError(
            f"{directory} is not an adapter: it has neither PEFT's {CONFIG} nor the LoRA adapter of a run with "
            "tuning.lora."
        )
    if problems := damaged_model(directory):
        raise CheckpointError("; ".join(problems) + ".")
    put_changes(model, config, read_weights(directory / ADAPTER), directory / ADAPTER, name=name)
    require_base(identities(directory), loaded.directory)
    return directory
