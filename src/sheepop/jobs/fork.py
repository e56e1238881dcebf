"""A new run that begins with the weights of another: its model and tokenizer are kept, everything else may differ."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sheepop.checkpoint import LoadedModel, load_model, save_model
from sheepop.checkpoint.model_directory import read_adapter_config, read_quantization
from sheepop.checkpoint.model_form import copy_base
from sheepop.core.errors import CheckpointError, ConfigError
from sheepop.data import Corpus, is_corpus
from sheepop.jobs.config import SheepOpConfig
from sheepop.model import ModelConfig

# These change how a network is trained, not what its weights mean.
_FREE = frozenset({"dropout", "preset"})


@dataclass(frozen=True)
class Fork:
    """The model that a new run begins with: a model directory, a checkpoint, or the best one of a run."""

    path: Path

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model, read and verified."""
        return load_model(self.path)

    def forget(self) -> None:
        """Frees the memory of the model; whoever asks for it again has it read again."""
        self.__dict__.pop("loaded", None)

    @property
    def is_quantised(self) -> bool:
        """Whether its weights are integers."""
        return read_quantization(self.loaded.directory) is not None

    def write_base(self, target: Path) -> None:
        """Makes a model directory of it for a run that leaves its weights as they are; files are shared if possible.

        Raises `CheckpointError` for integers with a change beside them, which cannot be merged.
        """
        directory = self.loaded.directory
        if read_adapter_config(directory) is None:
            copy_base(directory, target)
        elif self.is_quantised:
            raise CheckpointError(
                f"{directory} holds a change beside weights of integers, and a second one cannot be put on it. Begin "
                "with the model below it."
            )
        else:
            loaded = self.loaded
            save_model(target, loaded.model, loaded.tokenizer, loaded.provenance, replace=True)

    def inherit(self, config: SheepOpConfig) -> SheepOpConfig:
        """`config` with the model's sizes, and with its tokenizer where the text is not a finished corpus.

        Raises `ConfigError` naming every setting of the model that was given and differs.
        """
        given, found = config.model.model_dump(), self.loaded.config.model_dump()
        usual = ModelConfig().model_dump()
        asked = {name: value for name, value in given.items() if value != usual[name] and name not in _FREE}
        if other := [name for name, value in asked.items() if value != found[name]]:
            what = "; ".join(f"model.{name} is {found[name]!r} there, not {given[name]!r}" for name in other)
            raise ConfigError(
                f"A fork keeps the network of {self.loaded.directory}, but {what}. Leave it out, or train a new model "
                "without --fork."
            )
        dropout = given["dropout"] if given["dropout"] != usual["dropout"] else found["dropout"]
        config = config.replace(model={**found, "dropout": dropout})
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
        """Where the run came from, for its record."""
        return {"path": str(self.loaded.directory.resolve()), "provenance": self.loaded.provenance}
