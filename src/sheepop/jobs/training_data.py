"""The corpus of a run and the batches made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.checkpoint import RunDirectory
from sheepop.core.config import Config
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, SheepOpError
from sheepop.data import Batches, Corpus, PackedBatches, PaddedBatches, TokenSplit, build_corpus, is_corpus
from sheepop.data.provenance import trace_tokens
from sheepop.jobs.config import SheepOpConfig
from sheepop.tokenizer import Tokenizer, load_tokenizer


def open_corpus(config: SheepOpConfig, run: RunDirectory, console: Console) -> Corpus:
    """The corpus of `data.paths`: opened when it is a corpus directory, else built once into the run."""
    paths = config.data.paths
    if not paths:
        raise ConfigError("data.paths is empty: name a file, a folder or a corpus directory with --data PATH.")
    prebuilt = [path for path in paths if is_corpus(path)]
    if prebuilt:
        if len(paths) > 1:
            raise ConfigError(
                f"data.paths mixes the corpus directory {prebuilt[0]} with other inputs. "
                "Give one corpus directory alone, or only files and folders."
            )
        corpus = Corpus.open(Path(paths[0]))
        if config.tokenizer.path is not None:
            corpus.require_tokenizer(load_tokenizer(config.tokenizer.path))
        return corpus
    if is_corpus(run.corpus):
        return Corpus.open(run.corpus)
    return build_corpus(config.data, config.tokenizer, run.corpus, seed=config.seed, console=console)


def documents_of_samples(corpus: Corpus, batches: Batches, samples: NDArray[np.int64]) -> list[str]:
    """The names of the documents that training samples hold, each once; empty when the corpus cannot say."""
    names: dict[str, None] = {}
    try:
        for sample in samples.tolist():
            for origin in trace_tokens(corpus, "train", *batches.token_range(sample)):
                names[f"{origin.file}, {origin.place}" if origin.place else origin.file] = None
    except (SheepOpError, OSError):
        return []
    return list(names)


def refuse_ignored_settings(config: SheepOpConfig, corpus: Corpus) -> None:
    """Raises `ConfigError` for a setting given by the user that a finished corpus was built without."""
    built = corpus.manifest["config"]
    for section, given in (("data", config.data), ("tokenizer", config.tokenizer)):
        for name, asked, made in _differences(given, built[section], section):
            raise ConfigError(
                f"{name} = {asked!r} has no effect on the finished corpus {corpus.directory}, which was built with "
                f"{made!r}. Leave it out, or build another corpus."
            )


def _differences(given: Config, built: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any, Any]]:
    """The settings that were given and that are others in `built`; what is not recorded there is not compared."""
    values = given.model_dump(mode="json")
    for key in sorted(given.model_fields_set & built.keys()):
        value = getattr(given, key)
        if isinstance(value, Config):
            yield from _differences(value, built[key], f"{section}.{key}")
        elif values[key] != built[key]:
            yield f"{section}.{key}", values[key], built[key]


def build_batches(
    config: SheepOpConfig, split: TokenSplit, tokenizer: Tokenizer, *, evaluation: bool = False
) -> Batches:
    """Batches of a split as `data.packing`, `data.max_length` and `data.stride` say.

    For `evaluation` every token is counted once, overlapping chunks or not.
    """
    max_length = config.data.max_length or config.model.max_seq_len
    if max_length > config.model.max_seq_len:
        raise ConfigError(
            f"data.max_length = {max_length} is more than model.max_seq_len = {config.model.max_seq_len}. "
            "Lower the first or raise the second."
        )
    if config.data.packing:
        return PackedBatches(split, max_length=max_length, pad_id=tokenizer.pad_id)
    stride = config.data.stride or max_length
    if stride > max_length:
        raise ConfigError(
            f"data.stride = {stride} is more than the chunk length {max_length}, so tokens between chunks would be "
            "lost. Choose a stride of at most the length."
        )
    return PaddedBatches(split, max_length=max_length, pad_id=tokenizer.pad_id, stride=stride, count_once=evaluation)
