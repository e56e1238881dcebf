"""Post-training on examples: a finished model learns from lines of files, which the run keeps as tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from sheepop.adapt.lora import add_lora
from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.checkpoint import load_model, resolve_model_directory
from sheepop.checkpoint.changes import NAME
from sheepop.checkpoint.generation_settings import with_ends
from sheepop.checkpoint.model_description import read_model_config
from sheepop.checkpoint.model_form import AdaptedModel, ModelForm
from sheepop.core.config import leaves
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.core.facts import counted
from sheepop.core.files import atomic_directory
from sheepop.core.program import typed
from sheepop.data import Batches, BatchSchedule, RowSource, SampleOrder
from sheepop.data.batch_schedule import MixtureSchedule, PartOrder
from sheepop.jobs.config import SheepOpConfig, local_files
from sheepop.jobs.recipe import MOST_ROW_TOKENS
from sheepop.jobs.task.corpus_batches import source_members, source_seed
from sheepop.jobs.task.interface import Task
from sheepop.jobs.task.samples import generate_command
from sheepop.model import Transformer
from sheepop.posttrain.encoding import ExampleEncoder
from sheepop.posttrain.example_batches import ExampleRows, PackedExamples, PaddedExamples
from sheepop.posttrain.example_store import TOKENS, ExampleSplit, ExampleStore, build_examples
from sheepop.posttrain.rows import Row, Supervised
from sheepop.tokenizer import ChatTemplate, Tokenizer, chat_templates, load_tokenizer
from sheepop.tokenizer.ready_templates import READY, default_template, fitting, named_template

_SAMPLES, _LOOKED_AT = 3, 100
TOKENIZER = "tokenizer"  # the folder of a run's examples for the tokenizer with the chat template of the tuned model
# Rows of a chosen length hold a multiple of this many tokens.
_ROW_UNIT = 64
# The settings under `data` that a run on examples reads, and those under `training` that are about text.
_DATA_KEYS = {"paths", "validation_fraction", "packing", "max_length"}
_CURRICULUM = {"curriculum", "difficulty", "curriculum_epochs", "curriculum_jitter"}
_TEXT_KEYS = {*_CURRICULUM, "sequence_length_warmup", "initial_embeddings", "eval_length", "eval_stride"}
# Only the cross-entropy of labels reads these.
_OF_LABELS = {"training.objective", "training.z_loss", "training.label_smoothing"}


class ExampleTask(Task):
    """Post-training on examples. Subclasses define the objective and the scores."""

    stage = "Examples"

    @property
    def row_type(self) -> type[Row]:
        """The type of a line of the examples."""
        return Supervised

    @property
    def keeps_base(self) -> bool:
        """Whether the run needs the model that it starts from later on."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether the objective compares the model with a reference: `tuning.reference`, or the initial model."""
        return False

    @property
    def most_tokens(self) -> int:
        """The most tokens that an example may have."""
        return self.row_length

    def fitted(self, given: Mapping[str, Any]) -> SheepOpConfig:
        """The settings, which have the sizes of the model, as this kind of run needs them."""
        return self.config

    @property
    def inputs(self) -> Sequence[str | None]:
        """The examples and the chat template."""
        config, template = self.config, self.config.tuning.chat_template
        return [*config.data.paths, *config.tuning.validation_paths, None if template in READY else template]

    def prepared(self, given: Mapping[str, Any], num_ranks: int = 1) -> Self:
        """Tokenises the examples of `data.paths` into the run, with the tokenizer of the initial model."""
        config, origin = self.config, self.origin
        if origin is None:
            raise ConfigError(
                f"tuning.method = {config.tuning.method} teaches a finished model. Say which: sheepop tune "
                f"{config.tuning.method} MODEL --data FILE, or --fork MODEL."
            )
        _refuse_text_settings(config)
        require_examples(config)
        config = origin.inherit(config, given)
        if config.model.architecture != "decoder":
            raise ConfigError("Post-training is for models that continue text; this one is an encoder-decoder.")
        config = config.replace(tokenizer={**config.tokenizer.model_dump(), "path": None})
        if config.tuning.lora is None:
            origin.require_floats()
        if hasattr(origin.loaded.model, REWARD_HEAD):
            raise ConfigError(f"{origin.path} is a reward model, which judges answers. Start from a model that writes.")
        task = self.with_config(config)
        task = task.with_config(task.fitted(given))
        if config.tuning.lora is not None or task.keeps_base:
            origin.write_base(self.run.base)
        with atomic_directory(self.run.examples, replace=True) as place:
            task.build_in(place, origin.loaded.tokenizer, origin.loaded.end_ids)
        return task.with_row_length().with_batch(given, num_ranks)

    def with_batch(self, given: Mapping[str, Any], num_ranks: int = 1) -> Self:
        """The task with the size of a step that its examples decide, which `num_ranks` share evenly."""
        return self

    def with_row_length(self) -> Self:
        """The task with rows that hold its longest example, unless a length was given."""
        length = self.row_length_for(self.store)
        return self.with_config(self.config.replace(data={**self.config.data.model_dump(), "max_length": length}))

    def row_length_for(self, store: ExampleStore) -> int:
        """The given length of rows, or one that holds the longest example, in whole units of `_ROW_UNIT` tokens."""
        if self.config.data.max_length is not None:
            return self.row_length
        unit = math.lcm(_ROW_UNIT, self.config.parallel.tensor * self.config.parallel.context)
        return min(-(-self.needed_length(store) // unit) * unit, self.row_length)

    def needed_length(self, store: ExampleStore) -> int:
        """The tokens of the longest example; if rows hold several, at least four times the mean."""
        mean = store.train.num_tokens / max(1, store.train.num_examples)
        return max(store.longest, math.ceil(4 * mean)) if self.config.data.packing else store.longest

    def require_data_of(self, before: Mapping[str, Any]) -> None:
        """Refuses other examples than those that the run has kept, which would not be read."""
        given, paths = self.config.data.paths, tuple(before["data"]["paths"])
        if given != paths:
            raise ConfigError(
                f"A resumed run keeps its examples, but data.paths was {list(paths)} and is now {list(given)}. Leave "
                "it out, or start a new run with another --output."
            )

    def build_in(self, place: Path, tokenizer: Tokenizer, end_ids: Collection[int]) -> ExampleStore:
        """Tokenises the examples into the directory `place`; `end_ids` end the model's texts."""
        config = self.config
        tokenizer = with_template(tokenizer, config.tuning.chat_template, place / TOKENIZER, self.console)
        with self.template(tokenizer) as template:
            return build_examples(
                self.files(config.data.paths),
                place / TOKENS,
                ExampleEncoder(tokenizer, template, end_ids),
                self.row_type,
                max_length=self.most_tokens,
                long_examples=config.tuning.long_examples,
                validation_fraction=config.data.validation_fraction,
                validation_paths=self.files(config.tuning.validation_paths),
                bad_examples=config.tuning.bad_examples,
                columns=config.tuning.columns or {},
                joins_turns=config.tuning.join_turns,
                console=self.console,
            )

    def files(self, paths: Sequence[str]) -> list[Path]:
        """The files at `paths`; those of data sets on the hub are downloaded first, below ``data``."""
        return [Path(path) for path in local_files(paths, "tuning.columns", self.console)]

    def template(self, tokenizer: Tokenizer) -> ChatTemplate:
        """Opens the chat template of a tokenizer with the variables of the settings; the caller closes it."""
        return ChatTemplate.of(tokenizer, variables=self.config.tuning.chat_template_kwargs)

    @cached_property
    def store(self) -> ExampleStore:
        """The examples of the run, verified."""
        return ExampleStore.open(self.directory / TOKENS)

    @property
    def directory(self) -> Path:
        """The directory of the run's examples."""
        return self.run.examples

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenised examples."""
        return self.store.fingerprint

    @property
    def manifest(self) -> Mapping[str, Any]:
        """What was read, left out and kept of the examples."""
        return self.store.manifest

    @property
    def held_out_tokens(self) -> int:
        """The number of tokens in held-out examples, prompts included."""
        return self.store.validation.num_tokens

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model, with the chat template of the tuned model."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.directory / TOKENIZER)

    def describe(self) -> str:
        """The number of examples, and of their supervised tokens."""
        train = self.store.train
        return (
            f"{counted(train.num_groups, 'example')} of {counted(train.num_tokens, 'token')}, "
            f"{train.num_supervised:,} of them supervised; "
            f"{counted(self.store.validation.num_groups, 'example')} held out"
        )

    def check(self) -> None:
        """Refuses prompts that the model cannot answer, and a reference with another tokenizer."""
        reference = self.config.tuning.reference
        if reference is not None:
            if not self.needs_reference:
                raise ConfigError(
                    f"tuning.reference has no effect on tune {self.config.tuning.method} with these settings, which "
                    "compare the model with no other. Leave it out."
                )
            self.require_same_tokens("tuning.reference", reference)
        super().check()

    def require_same_tokens(self, key: str, path: str) -> None:
        """Raises `ConfigError` naming `key` unless the model at `path` has the same tokenizer and reads whole rows."""
        place = resolve_model_directory(path)
        if load_tokenizer(place).fingerprint() != self.tokenizer().fingerprint():
            raise ConfigError(f"{key}: {path} has another tokenizer, so its probabilities are of other tokens.")
        if (most := read_model_config(place).max_seq_len) < self.row_length:
            raise ConfigError(
                f"{key}: {path} reads {most:,} tokens, fewer than the rows of {self.row_length:,}. Lower "
                "data.max_length."
            )

    @property
    def row_length(self) -> int:
        """The most tokens of a row; raises `ConfigError` for more than the model reads."""
        most = self.config.model.max_seq_len
        length = self.config.data.max_length or min(most, MOST_ROW_TOKENS)
        if length > most:
            raise ConfigError(
                f"data.max_length = {length} is more than the {most} tokens that the model reads (model.max_seq_len). "
                "Lower it."
            )
        return length

    def batches(self) -> Batches:
        """The rows of the training examples."""
        return self.rows(self.store.train)

    def rows(self, split: ExampleSplit) -> ExampleRows:
        """The rows of a split; in a mixture, those of training examples are each of one source."""
        options: dict[str, Any] = {"max_length": self.row_length, "pad_id": self.tokenizer().filler_id}
        if not self.config.data.packing:
            return PaddedExamples(split, **options)
        return PackedExamples(split, **options, parts=self._sources if split is self.store.train else ())

    @cached_property
    def _sources(self) -> list[NDArray[np.int64]]:
        """The numbers of the groups of each source of `training.mixture`."""
        mixture = self.config.training.mixture
        return source_members(mixture, *self.store.files, "example") if mixture else []

    @cached_property
    def schedule(self) -> BatchSchedule:
        """Rows in random order, those of a mixture by the weights of its sources."""
        rows, training, seed = self.rows(self.store.train), self.config.training, self.config.seed
        orders, sizes, mixture = [SampleOrder(rows.num_samples, seed)], training.batch_sizes(), None
        if self._sources:
            size = self.store.train.group_size
            groups = np.array([rows.examples(sample)[0] // size for sample in range(rows.num_samples)])
            parts = [np.flatnonzero(np.isin(groups, members)) for members in self._sources]
            orders = [PartOrder(part, source_seed(seed, number, len(parts))) for number, part in enumerate(parts)]
            mixture = MixtureSchedule([source.weights for source in training.mixture], sizes)
        lengths = training.row_lengths(rows.max_length)
        return BatchSchedule([RowSource(rows, order) for order in orders], sizes, lengths, seed, mixture)

    def reference(self, device: str, dtype: torch.dtype = torch.float32) -> Transformer:
        """The reference model, without gradients."""
        return load_model(self.config.tuning.reference or self.run.base, device, dtype).model.requires_grad_(False)

    def network(self, device: str) -> Transformer:
        """The model to tune; with LoRA, its frozen weights and a new adapter."""
        config, lora = self.config, self.config.tuning.lora
        if lora is not None:
            model = self._frozen(device)
            add_lora(model, lora, name=NAME, seed=config.seed)
            return model
        return super().network(device)

    def _frozen(self, device: str) -> Transformer:
        """The frozen model below an adapter; it shares the memory of the loaded initial model if that fits."""
        found = None if self.origin is None or self.origin.is_quantised else self.origin.loaded.model
        if found is not None and found.device.type == device and found.embedding.weight.dtype == torch.float32:
            return found.sharing_copy()
        return load_model(self.run.base, device, torch.float32).model

    def form(self, model: Transformer, generation: Mapping[str, Any]) -> ModelForm:
        """Checkpoints store all weights; with LoRA, the adapter. The ends of learnt answers end the model's texts."""
        lora = self.config.tuning.lora
        if lora is not None:
            return AdaptedModel(self.run.base, model, lora, self.end_ids)
        return super().form(model, with_ends(generation, self.end_ids))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end texts of the model and the learnt answers."""
        return tuple(self.store.manifest.get("end_ids", ()))

    def held_out(self) -> Batches | None:
        """The rows of the held-out examples."""
        return self.rows(self.store.validation) if self.held_out_tokens else None

    def try_out(self) -> str:
        """A chat with a model that learned from conversations, or a continuation of a sample prompt."""
        if self.store.manifest["conversations"]:
            return typed("chat", self.run.path)
        prompts = self.sample_prompts()
        return generate_command(self.run.path, self.tokenizer().decode(prompts[0]) if prompts else None)

    def sample_prompts(self) -> list[list[int]]:
        """The prompts as tokens, by default of held-out examples. A given one is a user's message in a conversation."""
        given, tokenizer = self.config.training.sample_prompts, self.tokenizer()
        if given is None:
            return self._held_out_prompts(self.config.model.max_seq_len // 2)
        if not self.store.manifest["conversations"]:
            return [[*tokenizer.prefix_ids, *tokenizer.encode(text)] for text in given]
        with self.template(tokenizer) as template:
            messages = [[{"role": "user", "content": text}] for text in given]
            return [template.encode(tokenizer, each, add_generation_prompt=True) for each in messages]

    def _held_out_prompts(self, most: int) -> list[list[int]]:
        """The prompts of the first held-out examples, or of training examples, with at most `most` tokens."""
        split = self.store.validation if self.store.validation.num_groups else self.store.train
        found = []
        for number in range(min(split.num_groups, _LOOKED_AT)):
            ids, supervised = split.example(number * split.group_size)
            begin = int(np.argmax(supervised)) if supervised.any() else len(ids)
            if 0 < begin <= most:
                found.append(ids[:begin].tolist())
        return found[:_SAMPLES]


def require_examples(config: SheepOpConfig) -> None:
    """Raises `ConfigError` unless files of examples are named."""
    if not config.data.paths:
        raise ConfigError("data.paths is empty: name a file of examples with --data FILE.")


def with_template(tokenizer: Tokenizer, template: str | None, place: Path, console: Console) -> Tokenizer:
    """The tokenizer, saved to `place` with the chat template that conversations are rendered with."""
    place.mkdir()
    tokenizer.save(place)
    if template is not None:
        text = named_template(template, tokenizer)
    elif not chat_templates(tokenizer):
        text = default_template(tokenizer)
        known = " or ".join(f"tuning.chat_template={name}" for name in fitting(tokenizer))
        other = f" Its tokens also fit {known}." if known else ""
        console.info(f"The model has no chat template, so it learns a simple one, which is kept with it.{other}")
    else:
        return tokenizer
    (place / "chat_template.jinja").write_text(text, encoding="utf-8")
    return load_tokenizer(place)


def _refuse_text_settings(requested: SheepOpConfig) -> None:
    """Raises `ConfigError` for a setting that is about text and would have no effect on examples."""
    usual, tuning = SheepOpConfig(), requested.tuning
    unread = set() if tuning.teacher is None else _OF_LABELS
    if tuning.method != "sft":
        unread = {"data.packing", *_OF_LABELS}
    if requested.tokenizer != usual.tokenizer:
        raise ConfigError(
            "A tuned model keeps its tokenizer, so settings under tokenizer have no effect. Leave them out."
        )
    for section in ("data", "training"):
        default = dict(leaves(getattr(usual, section).model_dump(mode="json")))
        for key, value in leaves(getattr(requested, section).model_dump(mode="json")):
            name = key.split(".")[0]
            if value == default.get(key):
                continue
            if f"{section}.{name}" in unread:
                what = f"has no effect on tune {tuning.method}{'' if tuning.teacher is None else ' with a teacher'}"
            elif name not in _DATA_KEYS if section == "data" else name in _TEXT_KEYS:
                what = "is about running text and has no effect on examples"
            else:
                continue
            raise ConfigError(f"{section}.{key} = {value!r} {what}. Leave it out.")
