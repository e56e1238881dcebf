"""The model that a new run starts from: its network and tokenizer are kept, everything else may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sheepop.adapt.quantization import weight_bytes
from sheepop.checkpoint import LoadedModel, load_model, save_model
from sheepop.checkpoint.identity import identities
from sheepop.checkpoint.model_description import read_adapter_config, read_quantization
from sheepop.checkpoint.model_form import copy_base
from sheepop.checkpoint.model_kind import BASE
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.core.program import typed
from sheepop.data import Corpus, is_corpus
from sheepop.jobs.config import SheepOpConfig
from sheepop.model import ModelConfig
from sheepop.model.presets import PRESETS

# These change how a network is trained, not what its weights mean.
_FREE = frozenset({"dropout", "preset"})


@dataclass(frozen=True)
class Fork:
    """The model that a new run starts from: a model directory, a checkpoint, or the best one of a run."""

    path: Path

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model, read and verified."""
        return load_model(self.path)

    def forget(self) -> None:
        """Frees the memory of the model; the next access to `loaded` reads it again."""
        self.__dict__.pop("loaded", None)

    @property
    def weight_bytes(self) -> int:
        """The size of its weights in memory, as they are stored: integers stay integers."""
        return weight_bytes(self.loaded.model.parameters())

    @property
    def is_quantised(self) -> bool:
        """Whether its weights are integers."""
        return read_quantization(self.loaded.directory) is not None

    def require_floats(self) -> None:
        """Raises `ConfigError` if its weights are integers, which cannot be trained."""
        if self.is_quantised:
            raise ConfigError(
                f"The weights of {self.path} are integers, which cannot be trained. Train an adapter with sheepop tune "
                "and tuning.lora={}, give the model that they were rounded from, or start from the same weights as "
                f"floats, which this writes: sheepop export {self.path} --format hf --output FLOATS"
            )

    def write_base(self, target: Path) -> None:
        """Writes the model to `target` for a run that keeps its weights; files are shared if possible.

        Raises `CheckpointError` for an adapter on integer weights, which cannot be merged.
        """
        directory = self.loaded.directory
        if read_adapter_config(directory) is None:
            copy_base(directory, target)
        elif self.is_quantised:
            raise CheckpointError(
                f"{directory} holds an adapter on integer weights, and no second one can be added to it. Merge it into "
                f"floats, and start from these: {typed('export', self.path, '--merge', '--output', 'FLOATS')}"
            )
        else:
            loaded = self.loaded
            save_model(
                target, loaded.model, loaded.tokenizer, loaded.provenance, generation=loaded.generation, replace=True
            )

    def inherit(self, config: SheepOpConfig, given: Mapping[str, Any]) -> SheepOpConfig:
        """`config` with the model's sizes, and with its tokenizer unless the text is a finished corpus.

        Raises `ConfigError` naming every model setting in `given` that differs from the model's.
        """
        found = inherited(self.loaded.config, config, given, f"A fork keeps the network of {self.loaded.directory}")
        config = config.replace(model=found)
        if config.tokenizer.path is None and not any(is_corpus(path) for path in config.data.paths):
            tokenizer = {**config.tokenizer.model_dump(), "path": str(self.loaded.directory)}
            config = config.replace(tokenizer=tokenizer)
        return config

    def require(self, corpus: Corpus) -> None:
        """Raises `CheckpointError` unless the corpus consists of this model's tokens."""
        theirs, ours = corpus.tokenizer().fingerprint(), self.loaded.tokenizer.fingerprint()
        if theirs != ours:
            raise CheckpointError(
                f"The corpus in {corpus.directory} has a different tokenizer ({theirs[:12]}) from the model in "
                f"{self.loaded.directory} ({ours[:12]}). Rebuild it with tokenizer.path={self.loaded.directory}."
            )

    def as_record(self) -> dict[str, Any]:
        """The model's place, origin and generation settings, for the record of the run."""
        return {
            "path": str(self.loaded.directory.resolve()),
            "provenance": self.loaded.provenance,
            BASE: identities(self.loaded.directory),
            "generation": dict(self.loaded.generation),
        }


def inherited(found: ModelConfig, config: SheepOpConfig, given: Mapping[str, Any], why: str) -> dict[str, Any]:
    """The model section of a run that keeps the network `found`, with the dropout that `given` names, if any.

    Raises `ConfigError`, which begins with `why`, for any other setting in `given` that differs from the network.
    """
    wanted, kept = config.model.model_dump(), found.model_dump()
    section = given.get("model") or {}
    # A key that is null is left open.
    named = {
        name for name, value in {**PRESETS.get(str(section.get("preset")), {}), **section}.items() if value is not None
    }
    other = [name for name in wanted if name in named - _FREE and wanted[name] != kept[name]]
    if other:
        words = "; ".join(f"model.{name} is {kept[name]!r} there, not {wanted[name]!r}" for name in other)
        raise ConfigError(f"{why}, but {words}. Leave it out, or train a new model without --fork.")
    dropout = wanted["dropout"] if "dropout" in named else kept["dropout"]
    return {**kept, "dropout": dropout}
