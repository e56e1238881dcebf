"""Post-training: runs that begin with a finished model and learn from examples."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch

from sheepop.adapt.lora import add_lora
from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.checkpoint import RunDirectory, load_model, resolve_model_directory
from sheepop.checkpoint.changes import NAME
from sheepop.checkpoint.model_form import AdaptedModel, ModelForm, WholeModel
from sheepop.core.config import leaves
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.errors import ConfigError
from sheepop.core.files import atomic_directory
from sheepop.core.program import typed
from sheepop.data import Batches, RowSource, SampleOrder, StepPlan
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.fork import Fork
from sheepop.jobs.run_kind import RunData, RunKind, Samples
from sheepop.jobs.run_record import StoredRun
from sheepop.jobs.training_samples import TrainingSamples, check_samples, generate_command
from sheepop.model import Transformer, build_model
from sheepop.posttrain.distillation import Distillation
from sheepop.posttrain.encoding import Example, ExampleEncoder, default_template
from sheepop.posttrain.example_batches import PackedExamples, PaddedExamples
from sheepop.posttrain.example_store import TOKENS, ExampleSplit, ExampleStore, build_examples, first_examples
from sheepop.posttrain.rows import Row, Supervised
from sheepop.posttrain.supervised import NoisyEmbeddings
from sheepop.tokenizer import ChatTemplate, Tokenizer, chat_templates, load_tokenizer
from sheepop.tokenizer.settings import LARGEST_TEMPLATE, read_text
from sheepop.train.expert_balance import with_experts
from sheepop.train.objective import OBJECTIVES, Objective
from sheepop.train.placement import Placement
from sheepop.train.source import PlannedSource, StepSource

_SAMPLES, _LOOKED_AT = 3, 100
_TOKENIZER = "tokenizer"
# What of the settings under `data` and `training` means something to a run on examples; the rest is about text.
_DATA_KEYS = {"paths", "validation_fraction", "packing", "max_length"}
_TEXT_KEYS = {
    "curriculum", "difficulty", "curriculum_epochs", "curriculum_jitter", "mixture", "sequence_length_warmup",
    "initial_embeddings", "eval_stride",
}  # fmt: skip
# What is read only where the cross-entropy of labels is learnt.
_OF_LABELS = {"training.objective", "training.z_loss", "training.label_smoothing"}


class Tuning(RunKind):
    """Runs that begin with a finished model; `data` is the class of what they learn from."""

    stage = "Examples"

    def __init__(self, data: type[TunedData]) -> None:
        self.data = data

    def inputs(self, config: SheepOpConfig) -> Sequence[str]:
        """The examples and the template."""
        places = (*config.data.paths, *config.tuning.validation_paths, config.tuning.chat_template)
        return [place for place in places if place is not None]

    def open(
        self, asked: SheepOpConfig, run: RunDirectory, origin: Fork | None, console: Console
    ) -> tuple[SheepOpConfig, RunData]:
        """The examples of `data.paths`, tokenised into the run with the tokenizer of the model that it begins with."""
        if origin is None:
            raise ConfigError(
                f"tuning.method = {asked.tuning.method} teaches a finished model. Say which: sheepop tune "
                f"{asked.tuning.method} MODEL --data FILE, or --fork MODEL."
            )
        _refuse_text_settings(asked)
        if not asked.data.paths:
            raise ConfigError("data.paths is empty: name a file of examples with --data FILE.")
        config = origin.inherit(asked)
        if config.model.architecture != "decoder":
            raise ConfigError("Post-training is for models that continue text; this one is an encoder-decoder.")
        config = config.replace(tokenizer={**config.tokenizer.model_dump(), "path": None})
        if origin.is_quantised and config.tuning.lora is None:
            raise ConfigError(
                f"The weights of {origin.path} are integers, which cannot be trained. Learn a change beside them with "
                "tuning.lora={}, or give the model that they were rounded from."
            )
        if hasattr(origin.loaded.model, REWARD_HEAD):
            raise ConfigError(f"{origin.path} is a reward model, which judges answers. Begin with a model that writes.")
        config = self.data.fitted(config, asked)
        if config.tuning.lora is not None or self.data.keeps_base(config):
            origin.write_base(run.base)
        with atomic_directory(run.examples, replace=True) as place:
            self._build(config, origin.loaded.tokenizer, place, console)
        return config, self.data.of_run(run, origin, console)

    def reopen(self, stored: StoredRun, asked: SheepOpConfig, run: RunDirectory, console: Console) -> RunData:
        """The examples that the run has kept; raises `ConfigError` where others are named, which would not be read."""
        before = tuple(stored.record.asked["data"]["paths"])
        if asked.data.paths != before:
            raise ConfigError(
                f"A resumed run keeps its examples, but data.paths was {list(before)} and is now "
                f"{list(asked.data.paths)}. Leave it out, or start a new run with another --output."
            )
        return self.data.of_run(run, None, console)

    def _build(self, config: SheepOpConfig, tokenizer: Tokenizer, place: Path, console: Console) -> None:
        tokenizer = _with_template(tokenizer, config.tuning.chat_template, place / _TOKENIZER, console)
        with ChatTemplate.of(tokenizer) as template:
            build_examples(
                [Path(path) for path in config.data.paths],
                place / TOKENS,
                ExampleEncoder(tokenizer, template),
                self.data.row_type(config),
                max_length=self.data.most_tokens(config),
                long_examples=config.tuning.long_examples,
                validation_fraction=config.data.validation_fraction,
                validation_paths=[Path(path) for path in config.tuning.validation_paths],
                console=console,
            )


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
        return load_tokenizer(self.place / _TOKENIZER)

    def describe(self) -> str:
        """How many examples there are, and how many of their tokens are learnt."""
        train = self.store.train
        return (
            f"{train.num_groups:,} examples of {train.num_tokens:,} tokens, {train.num_supervised:,} of them "
            f"supervised; {self.store.validation.num_groups:,} examples held out"
        )

    def settle(self, config: SheepOpConfig, console: Console) -> SheepOpConfig:
        """`config` as it is."""
        self.check(config)
        return config

    def check(self, config: SheepOpConfig) -> None:
        """Refuses prompts that the model cannot answer."""
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


class SupervisedData(TunedData):
    """Answers, whose cross-entropy is learnt."""

    def objective(self, config: SheepOpConfig) -> Objective:
        """The cross-entropy of the answers."""
        objective = with_experts(self._answers(config), config.model)
        alpha = config.tuning.neftune_alpha
        return objective if alpha is None else NoisyEmbeddings(objective, alpha)

    def _answers(self, config: SheepOpConfig) -> Objective:
        """What is learnt of an answer: its tokens, or what a teacher gives for them."""
        teacher = config.tuning.teacher
        if teacher is None:
            return OBJECTIVES[config.training.objective](config.training)
        return Distillation(self._taught_by(teacher.model, config), teacher.weight, teacher.temperature)

    def _taught_by(self, path: str, config: SheepOpConfig) -> Transformer:
        """The teacher, read once; raises `ConfigError` for one that has other tokens or reads too few."""
        if path not in self._teachers:
            found = load_model(path, resolve_device(config.device), torch.float32)
            if found.tokenizer.fingerprint() != self.tokenizer().fingerprint():
                raise ConfigError(
                    f"tuning.teacher.model: {path} has another tokenizer, so its probabilities are of other tokens."
                )
            if found.config.max_seq_len < row_length(config):
                raise ConfigError(
                    f"tuning.teacher.model: {path} reads {found.config.max_seq_len:,} tokens, fewer than the rows of "
                    f"{row_length(config):,}. Lower data.max_length."
                )
            self._teachers[path] = found.model.requires_grad_(False)
        return self._teachers[path]

    @cached_property
    def _teachers(self) -> dict[str, Transformer]:
        return {}


def first_of(
    config: SheepOpConfig, data: type[TunedData], model: Path, count: int
) -> Iterator[tuple[str, Example, Tokenizer]]:
    """The first examples that a run from `model` would learn from, with their places, to look at before it."""
    if not config.data.paths:
        raise ConfigError("data.paths is empty: name a file of examples with --data FILE.")
    console = Console.silent()
    with tempfile.TemporaryDirectory() as place:
        source = load_tokenizer(resolve_model_directory(model))
        tokenizer = _with_template(source, config.tuning.chat_template, Path(place) / _TOKENIZER, console)
        with ChatTemplate.of(tokenizer) as template:
            encoder = ExampleEncoder(tokenizer, template)
            paths = [Path(path) for path in config.data.paths]
            for where, example in first_examples(paths, encoder, count, data.row_type(config)):
                yield where, example, tokenizer


def row_length(config: SheepOpConfig) -> int:
    """The most tokens of a row; raises `ConfigError` for more than the model reads."""
    length = config.data.max_length or config.model.max_seq_len
    if length > config.model.max_seq_len:
        raise ConfigError(
            f"data.max_length = {length} is more than the {config.model.max_seq_len} tokens that the model reads "
            "(model.max_seq_len). Lower it."
        )
    return length


def _with_template(tokenizer: Tokenizer, template: str | None, place: Path, console: Console) -> Tokenizer:
    """The tokenizer, written to `place` with the chat template that conversations are written with."""
    place.mkdir()
    tokenizer.save(place)
    if template is not None:
        text = read_text(Path(template), LARGEST_TEMPLATE)
    elif not chat_templates(tokenizer):
        text = default_template(tokenizer)
        console.info("The model has no chat template, so it learns a simple one, which is kept with it.")
    else:
        return tokenizer
    (place / "chat_template.jinja").write_text(text, encoding="utf-8")
    return load_tokenizer(place)


def _refuse_text_settings(asked: SheepOpConfig) -> None:
    """Raises `ConfigError` for a setting that is about text and would have no effect on examples."""
    usual, unread = SheepOpConfig(), set() if asked.tuning.teacher is None else _OF_LABELS
    if asked.tuning.method != "sft":
        unread = {"data.packing", *_OF_LABELS}
    if asked.tokenizer != usual.tokenizer:
        raise ConfigError(
            "A tuned model keeps its tokenizer, so settings under tokenizer have no effect. Leave them out."
        )
    for section in ("data", "training"):
        given = dict(leaves(getattr(asked, section).model_dump(mode="json")))
        default = dict(leaves(getattr(usual, section).model_dump(mode="json")))
        for key, value in given.items():
            name = key.split(".")[0]
            if value != default.get(key) and f"{section}.{name}" in unread:
                raise ConfigError(
                    f"{section}.{key} = {value!r} has no effect on tune {asked.tuning.method}"
                    f"{'' if asked.tuning.teacher is None else ' with a teacher'}. Leave it out."
                )
            means_nothing = name not in _DATA_KEYS if section == "data" else name in _TEXT_KEYS
            if value != default.get(key) and means_nothing:
                raise ConfigError(
                    f"{section}.{key} = {value!r} is about running text and has no effect on examples. Leave it out."
                )
