"""Post-training as a kind of run: a finished model learns from examples, which the run keeps as tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sheepop.adapt.scalar_head import REWARD_HEAD
from sheepop.checkpoint import RunDirectory, resolve_model_directory
from sheepop.core.config import leaves
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.core.files import atomic_directory
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.fork import Fork
from sheepop.jobs.run_kind import RunData, RunKind
from sheepop.jobs.run_record import StoredRun
from sheepop.jobs.tuned_data import TOKENIZER, TunedData
from sheepop.posttrain.encoding import Example, ExampleEncoder, default_template
from sheepop.posttrain.example_store import TOKENS, build_examples, first_examples
from sheepop.tokenizer import ChatTemplate, Tokenizer, chat_templates, load_tokenizer
from sheepop.tokenizer.settings import LARGEST_TEMPLATE, read_text

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
        tokenizer = _with_template(tokenizer, config.tuning.chat_template, place / TOKENIZER, console)
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


def first_of(
    config: SheepOpConfig, data: type[TunedData], model: Path, count: int
) -> Iterator[tuple[str, Example, Tokenizer]]:
    """The first examples that a run from `model` would learn from, with their places, to look at before it."""
    if not config.data.paths:
        raise ConfigError("data.paths is empty: name a file of examples with --data FILE.")
    console = Console.silent()
    with tempfile.TemporaryDirectory() as place:
        source = load_tokenizer(resolve_model_directory(model))
        tokenizer = _with_template(source, config.tuning.chat_template, Path(place) / TOKENIZER, console)
        with ChatTemplate.of(tokenizer) as template:
            encoder = ExampleEncoder(tokenizer, template)
            paths = [Path(path) for path in config.data.paths]
            for where, example in first_examples(paths, encoder, count, data.row_type(config)):
                yield where, example, tokenizer


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
