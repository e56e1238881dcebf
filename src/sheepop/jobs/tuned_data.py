"""What a run of post-training learns from: examples as tokens, and the model that it begins with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch

from sheepop.adapt.lora import add_lora
from sheepop.checkpoint import RunDirectory, load_model, resolve_model_directory
from sheepop.checkpoint.changes import NAME
from sheepop.checkpoint.model_directory import read_model_config
from sheepop.checkpoint.model_form import AdaptedModel, ModelForm, WholeModel
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.core.facts import counted
from sheepop.core.program import typed
from sheepop.data import Batches, RowSource, SampleOrder, StepPlan
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.fork import Fork
from sheepop.jobs.run_kind import RunData, Samples
from sheepop.jobs.training_samples import TrainingSamples, check_samples, generate_command
from sheepop.model import Transformer, build_model
from sheepop.posttrain.example_batches import PackedExamples, PaddedExamples
from sheepop.posttrain.example_store import TOKENS, ExampleSplit, ExampleStore
from sheepop.posttrain.rows import Row, Supervised
from sheepop.tokenizer import ChatTemplate, Tokenizer, load_tokenizer
from sheepop.train.objective import Objective
from sheepop.train.placement import Placement
from sheepop.train.source import PlannedSource, StepSource

_SAMPLES, _LOOKED_AT = 3, 100
TOKENIZER = "tokenizer"
"""The folder of a run's examples that holds the tokenizer, with the template that the tuned model is to have."""


@dataclass(frozen=True, eq=False)
class TunedData(RunData):
    """Examples, and the model that a run begins with; what is learnt from them, and how, is said by each kind."""

    place: Path
    store: ExampleStore
    base: Path
    origin: Fork | None
    console: Console

    @classmethod
    def of_run(cls, run: RunDirectory, origin: Fork | None, console: Console) -> Self:
        """The examples of a run, verified."""
        return cls(run.examples, ExampleStore.open(run.examples / TOKENS), run.base, origin, console)

    @staticmethod
    def row_type(config: SheepOpConfig) -> type[Row]:
        """What a line of the examples is."""
        return Supervised

    @staticmethod
    def keeps_base(config: SheepOpConfig) -> bool:
        """Whether the model that the run begins with is needed later on."""
        return False

    @classmethod
    def needs_reference(cls, config: SheepOpConfig) -> bool:
        """Whether the model is compared with another: that of `tuning.reference`, or the one that it began with."""
        return False

    @staticmethod
    def most_tokens(config: SheepOpConfig) -> int:
        """The most tokens that an example may have."""
        return row_length(config)

    @staticmethod
    def fitted(config: SheepOpConfig, asked: SheepOpConfig) -> SheepOpConfig:
        """`config`, which has the sizes of the model, as this kind of run needs it."""
        return config

    @property
    def directory(self) -> Path:
        """Of the run's examples."""
        return self.place

    @property
    def fingerprint(self) -> str:
        """Of the examples as tokens."""
        return self.store.fingerprint

    @property
    def held_out_tokens(self) -> int:
        """Those of the held-out examples, prompts too."""
        return self.store.validation.num_tokens

    def tokenizer(self) -> Tokenizer:
        """That of the model, with the template that the tuned model is to have."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.place / TOKENIZER)

    def describe(self) -> str:
        """How many examples there are, and how many of their tokens are learnt."""
        train = self.store.train
        return (
            f"{counted(train.num_groups, 'example')} of {counted(train.num_tokens, 'token')}, "
            f"{train.num_supervised:,} of them supervised; "
            f"{counted(self.store.validation.num_groups, 'example')} held out"
        )

    def settle(self, config: SheepOpConfig, console: Console) -> SheepOpConfig:
        """`config` as it is."""
        self.check(config)
        return config

    def check(self, config: SheepOpConfig) -> None:
        """Refuses prompts that the model cannot answer, and a reference that cannot read what it writes."""
        if config.tuning.reference is not None:
            if not self.needs_reference(config):
                raise ConfigError(
                    f"tuning.reference has no effect on tune {config.tuning.method} with these settings, which compare "
                    "the model with no other. Leave it out."
                )
            require_same_tokens("tuning.reference", config.tuning.reference, self.tokenizer(), row_length(config))
        check_samples(config, self.tokenizer(), self.sample_prompts(config))

    def batches(self, config: SheepOpConfig) -> Batches:
        """Rows of training examples."""
        return self.rows(self.store.train, config)

    def rows(self, split: ExampleSplit, config: SheepOpConfig) -> Batches:
        """The samples of a split."""
        cut = PackedExamples if config.data.packing else PaddedExamples
        return cut(split, max_length=row_length(config), pad_id=self.tokenizer().filler_id)

    def plan(self, config: SheepOpConfig, run: RunDirectory, console: Console) -> StepPlan:
        """Rows in random order."""
        rows, training = self.batches(config), config.training
        return StepPlan(
            [RowSource(rows, SampleOrder(rows.num_samples, config.seed))],
            training.batch_sizes(),
            training.row_lengths(rows.max_length),
            config.seed,
        )

    def reference(self, config: SheepOpConfig, device: str, dtype: torch.dtype = torch.float32) -> Transformer:
        """The model that the tuned one is compared with; it gets no gradient."""
        return load_model(config.tuning.reference or self.base, device, dtype).model.requires_grad_(False)

    def network(self, config: SheepOpConfig, device: str) -> Transformer:
        """The model that is tuned; with LoRA its change beside weights that stay as they are."""
        lora = config.tuning.lora
        if lora is not None:
            model = self._frozen(device)
            add_lora(model, lora, name=NAME, seed=config.seed)
            return model
        model = build_model(config.model, config.seed, device)
        if self.origin is not None:
            model.load_state_dict(self.origin.loaded.model.state_dict())
        return model

    def _frozen(self, device: str) -> Transformer:
        """The base of a change, in memory that a model just read has already, where that is as it is needed."""
        found = None if self.origin is None or self.origin.is_quantised else self.origin.loaded.model
        if found is not None and found.device.type == device and found.embedding.weight.dtype == torch.float32:
            return found.sharing_copy()
        return load_model(self.base, device, torch.float32).model

    def form(self, model: Transformer, config: SheepOpConfig) -> ModelForm:
        """All weights, or the change."""
        lora = config.tuning.lora
        return WholeModel(model) if lora is None else AdaptedModel(self.base, model, lora)

    def source(self, config: SheepOpConfig, plan: StepPlan, objective: Objective, placement: Placement) -> StepSource:
        """The batches of the plan."""
        training = config.training
        return PlannedSource(
            plan,
            objective,
            training.resolved().micro_batch_size,
            placement.device,
            ahead=training.prefetch,
            hashed=training.log_batch_hash,
        )

    def held_out(self, config: SheepOpConfig) -> Batches | None:
        """Rows of held-out examples."""
        return self.rows(self.store.validation, config) if self.held_out_tokens else None

    def samples(self, model: Transformer, config: SheepOpConfig, device: str) -> Samples | None:
        """Answers to `training.sample_prompts`, or to the prompts of held-out examples."""
        prompts = self.sample_prompts(config)
        return TrainingSamples(model, self.tokenizer(), config, device, prompts) if prompts else None

    def try_out(self, run: Path, config: SheepOpConfig) -> str:
        """A chat with a model that has learnt from conversations."""
        if self.store.manifest["conversations"]:
            return typed("chat", run)
        prompts = self.sample_prompts(config)
        return generate_command(run, self.tokenizer().decode(prompts[0]) if prompts else None)

    def sample_prompts(self, config: SheepOpConfig) -> list[list[int]]:
        """What is answered while the model learns, as tokens; what is given is what a user says in a conversation."""
        given, tokenizer = config.training.sample_prompts, self.tokenizer()
        if given is None:
            return self._held_out_prompts(config.model.max_seq_len // 2)
        if not self.store.manifest["conversations"]:
            return [[*tokenizer.prefix_ids, *tokenizer.encode(text)] for text in given]
        with ChatTemplate.of(tokenizer) as template:
            said = [[{"role": "user", "content": text}] for text in given]
            texts = [template.render(messages, add_generation_prompt=True) for messages in said]
        return [tokenizer.encode(text, allow_special=True) for text in texts]

    def _held_out_prompts(self, most: int) -> list[list[int]]:
        """What stands before the first answer of held-out examples, or of those to learn, where it is not too long."""
        split = self.store.validation if self.store.validation.num_groups else self.store.train
        found = []
        for number in range(min(split.num_groups, _LOOKED_AT)):
            ids, supervised = split.example(number * split.group_size)
            begin = int(np.argmax(supervised)) if supervised.any() else len(ids)
            if 0 < begin <= most:
                found.append(ids[:begin].tolist())
        return found[:_SAMPLES]


def require_same_tokens(key: str, path: str, tokenizer: Tokenizer, length: int) -> None:
    """Raises `ConfigError` naming `key` unless the model at `path` has the same tokenizer and reads `length` tokens."""
    place = resolve_model_directory(path)
    if load_tokenizer(place).fingerprint() != tokenizer.fingerprint():
        raise ConfigError(f"{key}: {path} has another tokenizer, so its probabilities are of other tokens.")
    if (most := read_model_config(place).max_seq_len) < length:
        raise ConfigError(
            f"{key}: {path} reads {most:,} tokens, fewer than the rows of {length:,}. Lower data.max_length."
        )


def row_length(config: SheepOpConfig) -> int:
    """The most tokens of a row; raises `ConfigError` for more than the model reads."""
    length = config.data.max_length or config.model.max_seq_len
    if length > config.model.max_seq_len:
        raise ConfigError(
            f"data.max_length = {length} is more than the {config.model.max_seq_len} tokens that the model reads "
            "(model.max_seq_len). Lower it."
        )
    return length
