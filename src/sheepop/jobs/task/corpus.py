"""Pre-training: runs that learn the next token of a corpus, or the target of a source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.word_vectors import read_word_vectors, vector_dimension
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError, SheepOpError
from sheepop.core.facts import counted
from sheepop.data import Batches, BatchSchedule, Corpus, is_corpus
from sheepop.data.corpus import trace_tokens
from sheepop.jobs.config import SheepOpConfig, local_files
from sheepop.jobs.task.corpus_batches import (
    build_batches,
    build_schedule,
    fit_data_to_architecture,
    open_corpus,
    reads_pairs,
    refuse_ignored_settings,
    require_fitting_corpus,
    warn_of_long_pairs,
)
from sheepop.jobs.task.interface import Task, with_training
from sheepop.jobs.task.samples import (
    generate_command,
    held_out_prompt,
    with_prompts,
)
from sheepop.model import Transformer
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.tokenizer import Tokenizer
from sheepop.train.memory_documents import reserved_documents
from sheepop.train.memory_gate import build_memory


class CorpusTask(Task):
    """Pre-training on a corpus, from new weights or from those of another model."""

    stage = "Corpus and vocabulary"

    @property
    def inputs(self) -> Sequence[str | None]:
        """Text, tokenizer and word vectors."""
        config = self.config
        return [*config.data.paths, config.tokenizer.path, config.training.initial_embeddings]

    def local_paths(self) -> Sequence[str]:
        """The text files, with datasets on the hub downloaded."""
        return local_files(self.config.data.paths, "data.extract.template", self.console)

    def prepared(self, given: Mapping[str, Any], num_ranks: int = 1) -> Self:
        """Opens the corpus of `data.paths`, which is built into the run unless it is finished already."""
        requested, origin = self.config, self.origin
        vectors = requested.training.initial_embeddings
        if vectors is not None and origin is not None:
            raise ConfigError(
                f"training.initial_embeddings = {vectors} is for a new network, but the weights of {origin.path} "
                "already have embeddings. Leave out one of the two."
            )
        config = requested
        if requested.training.memory is not None and reads_pairs(requested):
            raise ConfigError("training.memory is for text, but an encoder-decoder learns from pairs. Leave it out.")
        if origin is not None:
            origin.require_floats()
            config = origin.inherit(requested, given)
        task = self.with_config(fit_data_to_architecture(config, requested))
        sizes = given.get("tokenizer")  # the recipe's size may be more than a short text allows
        task.corpus = open_corpus(
            task.config, task.run, task.console, shrinks=not isinstance(sizes, Mapping) or "vocab_size" not in sizes
        )
        refuse_ignored_settings(requested, task.corpus)
        require_fitting_corpus(task.config, task.corpus)
        if origin is not None:
            origin.require(task.corpus)
        return task._with_documents_for_memory(given)

    def _with_documents_for_memory(self, given: Mapping[str, Any]) -> Self:
        """Returns the task. A memory that the recipe chose is left out if the text has too few documents for it.

        Raises `ConfigError` if the user has `given` that memory.
        """
        memory, train = self.config.training.memory, self.corpus.train
        if memory is None or len(reserved_documents(train, memory, self.config.seed)):
            return self
        why = (
            f"A memory of the text keeps some documents for itself, but each of the {train.num_documents:,} has more "
            f"than a fiftieth of the text, or more than training.memory.reserved_tokens = {memory.reserved_tokens:,}."
        )
        if isinstance(training := given.get("training"), Mapping) and training.get("memory") is not None:
            raise ConfigError(f"{why} Give text of more documents, or leave training.memory out.")
        self.console.info(f"{why} So this run has none.")
        return self.with_config(with_training(self.config, self.config.training.replace(memory=None)))

    def require_data_of(self, before: Mapping[str, Any]) -> None:
        """Refuses other text; a finished corpus may have moved, and `data.paths` names its place now."""
        given, paths = self.config.data.paths, tuple(before["data"]["paths"])
        require_text(self.run, given)
        if given != paths and not any(map(is_corpus, given)):
            raise ConfigError(
                f"A resumed run keeps its text, but data.paths was {list(paths)} and is now {list(given)}. Leave it "
                "out to keep the text that the run started with, or start a new run with another --output."
            )

    @cached_property
    def corpus(self) -> Corpus:
        """The corpus of the run."""
        return open_corpus(self.config, self.run, self.console)

    @property
    def directory(self) -> Path:
        """The directory of the corpus."""
        return self.corpus.directory

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the corpus."""
        return self.corpus.fingerprint

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What was read, left out and kept of the text."""
        return self.corpus.manifest

    @property
    def held_out_tokens(self) -> int:
        """The number of tokens in held-out documents."""
        return self.corpus.validation.num_tokens

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the corpus."""
        return self.corpus.tokenizer()

    def describe(self) -> str:
        """The number of tokens in both splits."""
        return f"{self.corpus.train.num_tokens:,} training tokens, {self.held_out_tokens:,} held out"

    def settled(self) -> Self:
        """The task with the vocabulary of the corpus and a prompt from its held-out text."""
        task = self.with_config(with_prompts(fit_model_to_tokenizer(self.config, self.corpus), self.corpus))
        task.check()
        vectors = task.config.training.initial_embeddings
        if vectors is not None:
            _check_initial_embeddings(Path(vectors), task.config.model.d_model)
        warn_of_long_pairs(task.config, task.corpus, self.console)
        return task

    def batches(self) -> Batches:
        """Returns the rows of the training text."""
        return build_batches(self.config, self.corpus.train, self.tokenizer())

    @cached_property
    def schedule(self) -> BatchSchedule:
        """Rows in the order of the curriculum and the mixture."""
        return build_schedule(self.config, self.corpus, self.run, self.console)

    def begin(self, model: Transformer) -> bool:
        """Sets token embeddings to the word vectors of `training.initial_embeddings`."""
        vectors = self.config.training.initial_embeddings
        if vectors is None:
            return False
        set_initial_embeddings(model, self.tokenizer(), Path(vectors), self.console)
        return True

    def documents(self, number: int) -> list[str]:
        """The names of the documents in batch `number` of the schedule, each once; empty if they cannot be read."""
        names: dict[str, None] = {}
        try:
            for ranges in self.schedule.token_ranges(number):
                for start, stop in ranges:
                    for origin in trace_tokens(self.corpus, "train", start, stop):
                        names[f"{origin.file}, {origin.place}" if origin.place else origin.file] = None
        except (SheepOpError, OSError):
            return []
        return list(names)

    def memory(self, model: Transformer) -> CorpusMemory | None:
        """The memory of the training text that `training.memory` asks for."""
        settings = self.config.training.memory
        if settings is None:
            return None
        return build_memory(
            model,
            self.corpus.train,
            settings,
            seed=self.config.seed,
            max_length=self.config.training.eval_length or self.batches().max_length,
            pad_id=self.tokenizer().filler_id,
            precision=self.config.training.precision,
        )

    def held_out(self) -> Batches | None:
        """The rows of the held-out text."""
        if not self.held_out_tokens:
            return None
        return build_batches(self.config, self.corpus.validation, self.tokenizer(), evaluation=True)

    def held_out_texts(self) -> Iterable[str]:
        """The held-out documents."""
        return (document.text for document in self.corpus.documents("validation"))

    def provenance(self) -> dict[str, Any]:
        """The number of training documents and the licences that they state."""
        count, stated = self.corpus.train.num_documents, self.corpus.licenses
        silent = count - sum(stated.values())
        licenses = {**stated, **({"": silent} if silent else {})} if stated else {}
        return {"data": {"documents": count, "licenses": licenses}}

    def try_out(self) -> str:
        """Continues the beginning of a held-out document."""
        return generate_command(self.run.path, held_out_prompt(self.config, self.corpus))


def require_text(run: RunDirectory, paths: Sequence[str]) -> None:
    """Raises `DataError` if the text of a resumed run that has no corpus of its own is missing."""
    missing = [path for path in paths if "://" not in path and not Path(path).exists()]
    if missing and not is_corpus(run.corpus):
        raise DataError(
            f"The run in {run.path} reads {missing[0]}, which was not found from {Path.cwd()}. Run the command in "
            "the directory where the run was started, or say where its corpus is now with sheepop train --resume "
            f"{run.path} --data."
        )


def fit_model_to_tokenizer(config: SheepOpConfig, corpus: Corpus) -> SheepOpConfig:
    """`config` with the vocabulary size of the corpus; raises `ConfigError` if the size given is smaller."""
    vocab_size = corpus.tokenizer().vocab_size
    if config.model.vocab_size is None:
        return config.replace(model={**config.model.model_dump(), "vocab_size": vocab_size})
    if config.model.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the tokenizer's {vocab_size} tokens. "
            "Leave it out to take the tokenizer's size."
        )
    return config


def set_initial_embeddings(model: Transformer, tokenizer: Tokenizer, path: Path, console: Console) -> None:
    """Copies the vectors of the file at `path` to the tokens that are whole words; other embeddings stay unchanged.

    Raises `ConfigError` if the vectors have another size or no word of the file is a token, and `DataError` if the
    file is damaged.
    """
    weight = model.embedding.weight
    found = read_word_vectors(path, words_of(tokenizer), weight.shape[1])
    if len(found.ids) == 0:
        raise ConfigError(
            f"training.initial_embeddings: {path} has {counted(found.num_words, 'word')}, none of which is a token. "
            "Words must match exactly. Use a tokenizer with whole words, for example a larger one, or leave it out."
        )
    with torch.no_grad():
        weight[torch.from_numpy(found.ids).to(weight.device)] = torch.from_numpy(found.vectors).to(weight)
    if found.num_repeated:
        console.warn(
            f"{path} has {counted(found.num_repeated, 'further vector')} for words it already had; the first vector "
            "of each word is used."
        )
    console.info(
        f"{len(found.ids):,} of {tokenizer.vocab_size:,} tokens start with vectors from {path}, which has "
        f"{counted(found.num_words, 'word')}; the others start at random."
    )


def _check_initial_embeddings(path: Path, d_model: int) -> None:
    """Raises `ConfigError` or `DataError` if the first line of the file shows that the file cannot be used."""
    if (dimension := vector_dimension(path)) != d_model:
        raise ConfigError(
            f"The vectors in training.initial_embeddings = {path} have {dimension} numbers, but the model's have "
            f"{d_model} (model.d_model). Set model.d_model={dimension}, or use vectors of that size."
        )


def words_of(tokenizer: Tokenizer) -> dict[bytes, list[int]]:
    """Words that are a single token, each with its ids at the beginning of a text and after a space."""
    special = set(tokenizer.special_tokens.values())
    texts = {
        text.strip()
        for token_id in range(tokenizer.vocab_size)
        if token_id not in special and (text := _text(tokenizer.token_bytes(token_id)))
    }
    words = sorted(word for word in texts if word)
    found: dict[bytes, list[int]] = {}
    encoded = tokenizer.encode_batch([f"{space}{word}" for word in words for space in ("", " ")])
    for index, word in enumerate(words):
        alone = {ids[0] for ids in encoded[2 * index : 2 * index + 2] if len(ids) == 1} - special
        if alone:
            found[word.encode("utf-8")] = sorted(alone)
    return found


def _text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
