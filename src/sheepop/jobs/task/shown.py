"""What a run on examples would learn, and how, to look at before it starts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sheepop.checkpoint import RunDirectory, resolve_model_directory
from sheepop.checkpoint.generation_settings import GENERATION, end_ids, read_generation
from sheepop.checkpoint.model_description import read_model_config
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.facts import counted
from sheepop.core.files import atomic_directory
from sheepop.jobs.run.resolve import bytes_of_a_step, in_memory
from sheepop.jobs.task.examples import TOKENIZER, ExampleTask, require_examples, with_template
from sheepop.posttrain.encoding import Example, ExampleEncoder
from sheepop.posttrain.example_store import first_examples
from sheepop.posttrain.templates import READY
from sheepop.report import data_size
from sheepop.tokenizer import Tokenizer, chat_templates, load_tokenizer
from sheepop.train.activation_checkpointing import usable_memory
from sheepop.train.budget import most_steps


def shown_examples(task: ExampleTask, model: Path, count: int) -> Iterator[tuple[str, Example, Tokenizer]]:
    """The first examples that a run from `model` would learn from, with their places."""
    require_examples(task.config)
    tuning, paths, place = task.config.tuning, task.files(task.config.data.paths), resolve_model_directory(model)
    with tempfile.TemporaryDirectory() as directory:
        source, target = load_tokenizer(place), Path(directory) / TOKENIZER
        tokenizer = with_template(source, tuning.chat_template, target, Console.silent())
        with task.template(tokenizer) as template:
            encoder = ExampleEncoder(tokenizer, template, _end_ids(place))
            options = (task.row_type, tuning.columns or {}, tuning.join_turns, tuning.bad_examples)
            for where, example in first_examples(paths, encoder, count, *options):
                yield where, example, tokenizer


def _end_ids(place: Path) -> tuple[int, ...]:
    """The tokens that end the texts of the model in a directory, besides the tokenizer's own."""
    return end_ids(read_generation(place), read_model_config(place).vocabulary, str(place / GENERATION))


@dataclass(frozen=True)
class Decision:
    """What a run would do: the chat template and whether that marks answers, what ends texts, the examples, the steps.

    `longest` is the number of tokens of the longest example, `row_length` how many fit, and `learnt` the number of
    tokens to learn. A step reads `rows` rows, `micro_batch` at a time, with about `memory` bytes; `steps` is None if
    only the time limits them.
    """

    chat_template: str
    marks_answers: bool
    end_tokens: tuple[str, ...]
    examples: int
    held_out: int
    tokens: int
    learnt: int
    longest: int
    row_length: int
    rows: int
    micro_batch: int
    memory: int
    usable_memory: int
    steps: int | None

    @classmethod
    def of(cls, task: ExampleTask, model: Path, given: Mapping[str, Any] = MappingProxyType({})) -> Decision:
        """Tokenises all examples as a run from `model` does, which says the same; raises as that.

        `given` is the tree of settings as the user gave it.
        """
        place = resolve_model_directory(model)
        network, source, chosen = read_model_config(place), load_tokenizer(place), task.config.tuning.chat_template
        device = resolve_device(task.config.device)
        with tempfile.TemporaryDirectory() as directory:
            settings = task.config.replace(model=network.model_dump())
            task = type(task)(settings, RunDirectory(Path(directory)), task.console)
            with atomic_directory(task.directory) as built:
                task.build_in(built, source, _end_ids(place))
            task = task.with_row_length().with_batch(given)
            store, batches, tokenizer = task.store, task.batches(), task.tokenizer()
            with task.template(tokenizer) as template:
                marks = template.marks_answers()
            training = in_memory(task, task.config.training, given, device, chooses_rows=True)
            needed = bytes_of_a_step(task.config, training, batches.max_length, device)
            recomputes, blocks = training.activation_checkpointing, training.checkpointed_blocks or network.num_layers
            assert recomputes != "auto"
            epoch = training.batch_sizes().steps_to(batches.num_samples)
            most = most_steps(training, batches.num_samples, batches.tokens_per_sample)
            names = {number: text for text, number in tokenizer.special_tokens.items()}
            own = "the model's own" if chat_templates(source) else "a simple one, since the model has none"
            numbers = dict.fromkeys([*store.manifest["end_ids"], tokenizer.special_id("eos")])
            return cls(
                own if chosen is None else f"the ready one for {chosen}" if chosen in READY else f"that of {chosen}",
                marks,
                tuple(names.get(number, str(number)) for number in numbers if number is not None),
                store.train.num_groups,
                store.validation.num_groups,
                store.train.num_tokens,
                store.train.num_supervised,
                store.manifest["longest"],
                task.row_length,
                training.global_batch_size,
                training.micro_batch_size or training.global_batch_size,
                needed.peak(recomputes, blocks),
                usable_memory(training, device),
                epoch if most is None and training.max_minutes is None else most,
            )

    def lines(self) -> list[str]:
        """The decision in words."""
        how = (
            "its {% generation %} blocks mark the answers" if self.marks_answers else "answers are found by comparison"
        )
        steps = "as many steps as fit the minutes" if self.steps is None else counted(self.steps, "step")
        return [
            f"Chat template: {self.chat_template}; {how}.",
            f"The model's texts end with {' or '.join(self.end_tokens)}.",
            f"{counted(self.examples, 'example')} of {counted(self.tokens, 'token')}, {self.learnt:,} of them learnt; "
            f"{self.held_out:,} held out.",
            f"The longest example has {counted(self.longest, 'token')}; rows hold {self.row_length:,}.",
            f"A run takes {steps} of {counted(self.rows, 'row')}, {self.micro_batch:,} at a time, and needs about "
            f"{data_size(self.memory)} of memory; {data_size(self.usable_memory)} are to use.",
        ]
