"""Pre-training: runs that learn the next token of a corpus, or the target of a source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.model_form import ModelForm, WholeModel
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError, DataError
from sheepop.data import Batches, Corpus, StepPlan, is_corpus
from sheepop.jobs.architecture import fit_data_to_architecture, require_fitting_corpus
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.fork import Fork
from sheepop.jobs.initial_embeddings import check_initial_embeddings, refuse_both, set_initial_embeddings
from sheepop.jobs.run_kind import RunData, RunKind, Samples
from sheepop.jobs.run_record import StoredRun
from sheepop.jobs.training_data import (
    build_batches,
    build_plan,
    documents_of_step,
    open_corpus,
    refuse_ignored_settings,
    warn_of_long_pairs,
)
from sheepop.jobs.training_evaluations import Asked
from sheepop.jobs.training_samples import (
    TrainingSamples,
    check_samples,
    generate_command,
    held_out_prompt,
    with_prompts,
)
from sheepop.model import Transformer, build_model
from sheepop.tokenizer import Tokenizer
from sheepop.train.expert_balance import with_experts
from sheepop.train.objective import OBJECTIVES, Objective
from sheepop.train.placement import Placement
from sheepop.train.source import PlannedSource, StepSource


class Pretraining(RunKind):
    """Runs on a corpus, from new weights or from those of another model."""

    stage = "Corpus and vocabulary"

    def inputs(self, config: SheepOpConfig) -> Sequence[str]:
        """Text, tokenizer and word vectors."""
        places = (*config.data.paths, config.tokenizer.path, config.training.initial_embeddings)
        return [place for place in places if place is not None]

    def open(
        self, asked: SheepOpConfig, run: RunDirectory, origin: Fork | None, console: Console
    ) -> tuple[SheepOpConfig, RunData]:
        """The corpus of `data.paths`, built into the run where it is not finished already."""
        refuse_both(asked.training, origin)
        config = fit_data_to_architecture(asked if origin is None else origin.inherit(asked), asked)
        corpus = open_corpus(config, run, console)
        refuse_ignored_settings(asked, corpus)
        require_fitting_corpus(config, corpus)
        if origin is not None:
            origin.require(corpus)
        return config, CorpusData(corpus, origin)

    def reopen(self, stored: StoredRun, asked: SheepOpConfig, run: RunDirectory, console: Console) -> RunData:
        """The corpus of the run, or the finished one that is named."""
        require_text(run, asked.data.paths)
        return CorpusData(open_corpus(corpus_settings(stored, asked), run, console))


@dataclass(frozen=True, eq=False)
class CorpusData(RunData):
    """A corpus: its rows, the cross-entropy of what comes next, and continuations of its held-out text."""

    corpus: Corpus
    origin: Fork | None = None

    @property
    def directory(self) -> Path:
        """Of the corpus."""
        return self.corpus.directory

    @property
    def fingerprint(self) -> str:
        """Of the corpus."""
        return self.corpus.fingerprint

    @property
    def held_out_tokens(self) -> int:
        """Those of the held-out documents."""
        return self.corpus.validation.num_tokens

    def tokenizer(self) -> Tokenizer:
        """Of the corpus."""
        return self.corpus.tokenizer()

    def describe(self) -> str:
        """The tokens of both splits."""
        return f"{self.corpus.train.num_tokens:,} training tokens, {self.held_out_tokens:,} held out"

    def settle(self, config: SheepOpConfig, console: Console) -> SheepOpConfig:
        """`config` with the vocabulary of the corpus and a prompt from its held-out text."""
        config = with_prompts(fit_model_to_tokenizer(config, self.corpus), self.corpus)
        self.check(config)
        if config.training.initial_embeddings is not None:
            check_initial_embeddings(Path(config.training.initial_embeddings), config.model.d_model)
        warn_of_long_pairs(config, self.corpus, console)
        return config

    def check(self, config: SheepOpConfig) -> None:
        """Refuses prompts that the model cannot continue."""
        check_samples(config, self.tokenizer(), config.training.sample_prompts or ())

    def batches(self, config: SheepOpConfig) -> Batches:
        """Rows of the training text."""
        return build_batches(config, self.corpus.train, self.tokenizer())

    def plan(self, config: SheepOpConfig, run: RunDirectory, console: Console) -> StepPlan:
        """Rows in the order of the curriculum and the mixture."""
        return build_plan(config, self.corpus, run, console)

    def objective(self, config: SheepOpConfig) -> Objective:
        """The cross-entropy of the next token."""
        return with_experts(OBJECTIVES[config.training.objective](config.training), config.model)

    def network(self, config: SheepOpConfig, device: str) -> Transformer:
        """Drawn from the seed, or with the weights of the model that the run begins with."""
        model = build_model(config.model, config.seed, device)
        if self.origin is not None:
            model.load_state_dict(self.origin.loaded.model.state_dict())
        return model

    def form(self, model: Transformer, config: SheepOpConfig) -> ModelForm:
        """All weights."""
        return WholeModel(model)

    def begin(self, model: Transformer, config: SheepOpConfig, console: Console) -> bool:
        """Sets the token embeddings to word vectors, if some are given."""
        vectors = config.training.initial_embeddings
        if vectors is None:
            return False
        set_initial_embeddings(model, self.tokenizer(), Path(vectors), console)
        return True

    def source(self, config: SheepOpConfig, plan: StepPlan, objective: Objective, placement: Placement) -> StepSource:
        """The batches of the plan."""
        return PlannedSource(
            plan,
            objective,
            config.training.resolved().micro_batch_size,
            placement.device,
            ahead=config.training.prefetch,
            hashed=config.training.log_batch_hash,
            documents=partial(documents_of_step, self.corpus, plan),
        )

    def held_out(self, config: SheepOpConfig) -> Batches | None:
        """Rows of the held-out text."""
        if not self.held_out_tokens:
            return None
        return build_batches(config, self.corpus.validation, self.tokenizer(), evaluation=True)

    def samples(self, model: Transformer, config: SheepOpConfig, device: str) -> Samples | None:
        """Continuations of `training.sample_prompts`."""
        prompts = config.training.sample_prompts
        return TrainingSamples(model, self.tokenizer(), config, device, prompts) if prompts else None

    def provenance(self) -> dict[str, Any]:
        """How many documents it was trained on, and which licences they state."""
        count, stated = self.corpus.train.num_documents, self.corpus.licenses
        silent = count - sum(stated.values())
        licenses = {**stated, **({"": silent} if silent else {})} if stated else {}
        return {"data": {"documents": count, "licenses": licenses}}

    def asked(self, config: SheepOpConfig) -> Asked | None:
        """What `evaluation` asks, for words of the held-out text too."""
        return Asked.of(config, self.corpus)

    def try_out(self, run: Path, config: SheepOpConfig) -> str:
        """Continues the beginning of a held-out document; that of a pair holds its target too."""
        return generate_command(run, held_out_prompt(config, self.corpus))


def corpus_settings(stored: StoredRun, wanted: SheepOpConfig) -> SheepOpConfig:
    """The configuration to open the corpus with, which may lie in another place by now.

    Raises `ConfigError` when `wanted` names other text: it would not be read.
    """
    before, now = tuple(stored.record.asked["data"]["paths"]), wanted.data.paths
    if now != before and not any(is_corpus(path) for path in now):
        raise ConfigError(
            f"A resumed run keeps its text, but data.paths was {list(before)} and is now {list(now)}. Leave it out "
            "to keep the text that the run started with, or start a new run with another --output."
        )
    return stored.config.replace(data={**stored.config.data.model_dump(), "paths": now})


def require_text(run: RunDirectory, paths: Iterable[str]) -> None:
    """Raises `DataError` when the text of a run that goes on, and that has no corpus of its own, is not there."""
    missing = [path for path in paths if "://" not in path and not Path(path).exists()]
    if missing and not is_corpus(run.corpus):
        raise DataError(
            f"The run in {run.path} reads {missing[0]}, which was not found from {Path.cwd()}. Resume in the directory "
            "where the run was started, or use --data to say where its corpus is now."
        )


def fit_model_to_tokenizer(config: SheepOpConfig, corpus: Corpus) -> SheepOpConfig:
    """`config` with the vocabulary of the corpus; raises `ConfigError` for a smaller one."""
    vocab_size = corpus.tokenizer().vocab_size
    if config.model.vocab_size is None:
        return config.replace(model={**config.model.model_dump(), "vocab_size": vocab_size})
    if config.model.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the tokenizer's {vocab_size} tokens. "
            "Leave it out to take the tokenizer's size."
        )
    return config
