"""The corpus of a run, its batches, and which rows each step reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sheepop.checkpoint import RunDirectory
from sheepop.core.config import Config
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError
from sheepop.core.facts import counted
from sheepop.core.random import derive_seed
from sheepop.data import (
    BatchSchedule,
    Corpus,
    PackedBatches,
    PaddedBatches,
    PairBatches,
    RowSource,
    SampleOrder,
    TextBatches,
    build_corpus,
    is_corpus,
)
from sheepop.data.batch_schedule import EasyToHardOrder, MixtureSchedule
from sheepop.data.config import pair_settings
from sheepop.data.difficulty import read_difficulty, row_difficulty, write_difficulty
from sheepop.data.mixing import SourceNumbers, SourcePattern
from sheepop.data.shards import DocumentView, TokenSource
from sheepop.jobs.config import SheepOpConfig
from sheepop.tokenizer import Tokenizer, load_tokenizer
from sheepop.train.memory_documents import other_documents, reserved_documents


def open_corpus(config: SheepOpConfig, run: RunDirectory, console: Console, *, shrinks: bool = False) -> Corpus:
    """Opens the corpus of `data.paths` if it is a corpus directory; otherwise builds it into the run, once.

    With `shrinks` a short text gets a smaller vocabulary.
    """
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
    return build_corpus(config.data, config.tokenizer, run.corpus, seed=config.seed, console=console, shrinks=shrinks)


def reads_pairs(config: SheepOpConfig) -> bool:
    """Whether the network learns from pairs of source and target."""
    return config.model.architecture == "encoder_decoder"


def fit_data_to_architecture(config: SheepOpConfig, requested: SheepOpConfig) -> SheepOpConfig:
    """`config` with the settings under `data` that its architecture implies; `requested` is what the user gave.

    Raises `ConfigError` for settings that the architecture does not support.
    """
    if not reads_pairs(config):
        if config.data.extract.pair is not None:
            raise ConfigError(
                "data.extract.pair reads pairs of source and target, which a decoder cannot learn from. Set "
                "model.architecture=encoder_decoder, or use data.extract.template to turn each record into text."
            )
        return config
    if config.training.sequence_length_warmup:
        raise ConfigError(
            "training.sequence_length_warmup cuts rows of text, but the pairs of an encoder-decoder are never cut. "
            "Leave it out."
        )
    return config.replace(data=pair_settings(config.data, requested.data).model_dump())


def require_fitting_corpus(config: SheepOpConfig, corpus: Corpus) -> None:
    """Raises `ConfigError` unless the corpus holds pairs for an encoder-decoder and text for a decoder."""
    if reads_pairs(config) and not corpus.holds_pairs:
        raise ConfigError(
            f"The corpus {corpus.directory} holds text, but an encoder-decoder learns from pairs of source and target. "
            "Give JSON lines with these two fields, or a corpus built with data.extract.pair=[source,target]."
        )
    if corpus.holds_pairs and not reads_pairs(config):
        raise ConfigError(
            f"The corpus {corpus.directory} holds pairs of source and target, but a decoder learns from text. Set "
            "model.architecture=encoder_decoder, or give text."
        )


def refuse_ignored_settings(config: SheepOpConfig, corpus: Corpus) -> None:
    """Raises `ConfigError` for a setting given by the user with which the finished corpus was not built."""
    built = corpus.manifest["config"]
    for section, given in (("data", config.data), ("tokenizer", config.tokenizer)):
        for name, wanted, made in _differences(given, built[section], section):
            raise ConfigError(
                f"{name} = {wanted!r} has no effect on the finished corpus {corpus.directory}, which was built with "
                f"{made!r}. Leave it out, or build another corpus."
            )


def _differences(given: Config, built: Mapping[str, Any], section: str) -> Iterator[tuple[str, Any, Any]]:
    """Given settings that differ from those in `built`, as (key, given, built); unrecorded ones are not compared."""
    values = given.model_dump(mode="json")
    for key in sorted(given.model_fields_set & built.keys()):
        value = getattr(given, key)
        if isinstance(value, Config):
            yield from _differences(value, built[key], f"{section}.{key}")
        elif values[key] != built[key]:
            yield f"{section}.{key}", values[key], built[key]


def build_batches(
    config: SheepOpConfig, split: TokenSource, tokenizer: Tokenizer, *, evaluation: bool = False
) -> TextBatches:
    """Batches of a split by `data.packing`, `data.max_length` and `data.stride`; pairs for an encoder-decoder.

    For `evaluation`, rows have `training.eval_length` tokens, and every token is counted once, also if they overlap
    (`training.eval_stride`).
    """
    length, overlapping = (config.training.eval_length, config.training.eval_stride) if evaluation else (None, None)
    max_length = length or config.data.max_length or config.model.max_seq_len
    if max_length > config.model.max_seq_len:
        key = "training.eval_length" if length else "data.max_length"
        raise ConfigError(
            f"{key} = {max_length} is more than model.max_seq_len = {config.model.max_seq_len}. "
            "Lower the first or raise the second."
        )
    if reads_pairs(config):
        for name, given in (("eval_length", length), ("eval_stride", overlapping)):
            if given is not None:
                raise ConfigError(f"training.{name} is for held-out texts; pairs are scored whole. Leave it out.")
        return PairBatches(
            split,
            max_length=max_length,
            pad_id=tokenizer.filler_id,
            eos_id=tokenizer.eos_id,
            leave_out_long=config.data.long_pairs == "leave_out",
        )
    if config.data.packing and overlapping is None:
        return PackedBatches(split, max_length=max_length, pad_id=tokenizer.filler_id)
    stride = overlapping or config.data.stride or max_length
    if stride > max_length:
        key = "training.eval_stride" if overlapping else "data.stride"
        raise ConfigError(
            f"{key} = {stride} is more than the chunk length {max_length}, so tokens between chunks would be "
            "lost. Choose a stride no longer than the chunks."
        )
    return PaddedBatches(split, max_length=max_length, pad_id=tokenizer.filler_id, stride=stride, count_once=evaluation)


def warn_of_long_pairs(config: SheepOpConfig, corpus: Corpus, console: Console) -> None:
    """Warns how many pairs of a corpus are left out because they are too long."""
    if not reads_pairs(config):
        return
    for name, split in (("training", corpus.train), ("held-out", corpus.validation)):
        batches = build_batches(config, split, corpus.tokenizer()) if split.num_tokens else None
        if isinstance(batches, PairBatches) and batches.num_left_out:
            console.warn(
                f"{batches.num_left_out:,} of {split.num_documents:,} {name} pairs are longer than "
                f"{config.data.max_length or config.model.max_seq_len} tokens and are left out (data.long_pairs)."
            )


def build_schedule(
    config: SheepOpConfig, corpus: Corpus, run: RunDirectory, console: Console, *, store: bool = True
) -> BatchSchedule:
    """Plans which rows each step of a run reads; with `store` it keeps scores of difficulty in `run`.

    Raises `ConfigError` or `DataError` if the settings do not fit the corpus.
    """
    training, tokenizer, seed = config.training, corpus.tokenizer(), config.seed
    views: list[DocumentView | None] = [*_views(training.mixture, corpus)] if training.mixture else [None]
    if training.memory is not None:
        reserved = reserved_documents(corpus.train, training.memory, seed)
        views = [other_documents(corpus.train if view is None else view, reserved) for view in views]
    batches = [build_batches(config, corpus.train if view is None else view, tokenizer) for view in views]
    orders: list[SampleOrder]
    if training.curriculum == "easy_to_hard":
        scores = _difficulty(config, corpus, views, batches, run, console, store=store)
        orders = [
            EasyToHardOrder(
                score,
                source_seed(seed, number, len(views)),
                epochs=training.curriculum_epochs,
                jitter=training.curriculum_jitter,
            )
            for number, score in enumerate(scores)
        ]
    else:
        orders = [
            SampleOrder(cut.num_samples, source_seed(seed, number, len(views))) for number, cut in enumerate(batches)
        ]
    sizes = training.batch_sizes()
    return BatchSchedule(
        sources=[RowSource(*parts) for parts in zip(batches, orders, views, strict=True)],
        sizes=sizes,
        lengths=training.row_lengths(max(cut.max_length for cut in batches)),
        seed=seed,
        mixture=MixtureSchedule([s.weights for s in training.mixture], sizes) if training.mixture else None,
    )


def source_seed(seed: int, number: int, num_sources: int) -> int:
    """The seed of a source's order; the seed itself if there is only one source."""
    return seed if num_sources == 1 else derive_seed(seed, "mixture source", number)


def _views(mixture: Sequence[SourcePattern], corpus: Corpus) -> list[DocumentView]:
    """The training documents of each source of a mixture; a document belongs to the first source that matches."""
    found = corpus.sources("train")
    documents = source_members(mixture, found.names, found.numbers, "training document")
    return [DocumentView(corpus.train, members) for members in documents]


def source_members(
    mixture: Sequence[SourcePattern], names: Sequence[str], numbers: NDArray[Any], what: str
) -> list[NDArray[np.int64]]:
    """The members of each source of a mixture: documents or examples, of which the file names are ``names[numbers]``.

    Each belongs to the first source whose pattern matches. Raises `DataError`, which calls one of them `what`, if there
    is none, or if a source has no members.
    """
    patterns = SourceNumbers(mixture)
    sources = np.array([patterns.number(name) for name in names], dtype=np.int64)[numbers]
    if (sources < 0).any():
        name, count = names[int(numbers[sources < 0][0])], counted(int((sources < 0).sum()), what)
        raise DataError(
            f"training.mixture: {count} match no pattern, for example those from {name!r}. Add a source with the "
            "pattern '*' at the end; weight 0 leaves them out."
        )
    members = [np.flatnonzero(sources == number) for number in range(len(mixture))]
    for source, found in zip(mixture, members, strict=True):
        if not len(found):
            raise DataError(
                f"training.mixture: no {what} matches {source.pattern!r}, or an earlier pattern took them all. "
                "Patterns are compared with the file names that 'sheepop data stats' or the report shows, as in a "
                ".gitignore."
            )
    return members


def _difficulty(
    config: SheepOpConfig,
    corpus: Corpus,
    views: Sequence[DocumentView | None],
    batches: Sequence[TextBatches],
    run: RunDirectory,
    console: Console,
    *,
    store: bool,
) -> list[NDArray[np.float64]]:
    """The difficulty of every row of every source, read from the run or computed."""
    name, path = config.training.difficulty, run.difficulty
    identity = {
        "corpus": corpus.fingerprint,
        "difficulty": name,
        "rows": f"packing {config.data.packing}, length {batches[0].max_length}, stride {config.data.stride}",
        "sources": ", ".join(repr(source.pattern) for source in config.training.mixture),
    }
    scores = read_difficulty(path, identity, [cut.num_samples for cut in batches])
    if scores is None:
        tokenizer = corpus.tokenizer()
        scores = [
            row_difficulty(name, corpus.train if view is None else view, cut, tokenizer, console)
            for view, cut in zip(views, batches, strict=True)
        ]
        if store:
            write_difficulty(path, identity, scores)
    return scores
