"""Shows what a run on examples would learn, and how, before it starts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.text import Text

from sheepop.checkpoint import RunDirectory, resolve_model_directory
from sheepop.checkpoint.generation_settings import GENERATION, end_ids, read_generation
from sheepop.checkpoint.model_description import read_model_config
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.errors import DataError, first_few
from sheepop.core.facts import counted, visible
from sheepop.core.files import atomic_directory
from sheepop.jobs.run.step_memory import bytes_of_a_step, in_memory
from sheepop.jobs.task.examples import TOKENIZER, ExampleTask, require_examples, with_template
from sheepop.jobs.task.fork import Fork
from sheepop.posttrain.encoding import Example, ExampleEncoder
from sheepop.posttrain.rows import RowError, read_rows
from sheepop.report import data_size
from sheepop.tokenizer import Tokenizer, chat_templates, load_tokenizer
from sheepop.tokenizer.ready_templates import READY
from sheepop.train.activation_checkpointing import usable_memory
from sheepop.train.budget import most_steps

_LEARNT, _GIVEN = ("bold green", "bold green underline"), ("dim", "dim underline")


def shown_examples(task: ExampleTask, model: Path, count: int) -> Iterator[tuple[str, Example, Tokenizer]]:
    """The examples of the first `count` rows that a run from `model` would learn, with their places.

    Of a pair the chosen answer comes before the rejected. Raises `DataError` for a row that cannot be learnt, unless
    `tuning.bad_examples` leaves it out.
    """
    require_examples(task.config)
    tuning, place = task.config.tuning, resolve_model_directory(model)
    leaves_out = tuning.bad_examples == "leave_out"
    options: dict[str, Any] = {"joins_turns": tuning.join_turns, "on_bad": (lambda _: None) if leaves_out else None}
    rows = read_rows(task.files(task.config.data.paths), task.row_type, tuning.columns or {}, **options)
    with tempfile.TemporaryDirectory() as directory:
        source, target = load_tokenizer(place), Path(directory) / TOKENIZER
        tokenizer = with_template(source, tuning.chat_template, target, Console.silent())
        with task.template(tokenizer) as template:
            encoder = ExampleEncoder(tokenizer, template, _end_ids(place))
            for row in islice(rows, count):
                try:
                    yield from ((row.place, example, tokenizer) for group in encoder(row) for example in group.examples)
                except RowError as error:
                    if not leaves_out:
                        raise DataError(first_few([f"{row.place}: {error}"], 1)) from None


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
        """Tokenises all examples as a run from `model` would, with the same messages and errors.

        `given` is the tree of settings as the user gave it.
        """
        place = resolve_model_directory(model)
        network, source, chosen = read_model_config(place), load_tokenizer(place), task.config.tuning.chat_template
        device = resolve_device(task.config.device)
        with tempfile.TemporaryDirectory() as directory:
            settings = task.config.replace(model=network.model_dump())
            task = type(task)(settings, RunDirectory(Path(directory)), task.console, Fork(place))
            with atomic_directory(task.directory) as built:
                task.build_in(built, source, _end_ids(place))
            task = task.with_row_length().with_batch(given)
            store, batches, tokenizer = task.store, task.batches(), task.tokenizer()
            with task.template(tokenizer) as template:
                marks = template.marks_answers()
            training = in_memory(task, task.config.training, given, device, chooses_rows=True)
            needed = bytes_of_a_step(task.config, training, batches.max_length, device, task.origin, task.texts_of_row)
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


def preview(example: Example, tokenizer: Tokenizer) -> Text:
    """The tokens of an example as coloured text: learnt ones green, every second one underlined."""
    text = Text()
    for number, token in enumerate(preview_tokens(example, tokenizer)):
        text.append(token["text"], style=(_LEARNT if token["supervised"] else _GIVEN)[number % 2])
    return text


def plain_preview(example: Example, tokenizer: Tokenizer) -> str:
    """The tokens of an example as plain text, with learnt ones between ``[[`` and ``]]``."""
    parts, learnt = [], False
    for token in preview_tokens(example, tokenizer):
        if token["supervised"] != learnt:
            parts.append("[[" if token["supervised"] else "]]")
            learnt = token["supervised"]
        parts.append(token["text"])
    return "".join(parts) + ("]]" if learnt else "")


def preview_tokens(example: Example, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The id, the text and `supervised` of each token; a character of several tokens is given to the last of them."""
    names = {token_id: name for name, token_id in tokenizer.special_tokens.items()}
    found: list[dict[str, Any]] = []
    held: list[int] = []
    for token_id, supervised in zip(example.ids, example.supervised, strict=True):
        if token_id in names:
            text, held = names[token_id], []
        else:
            held.append(token_id)
            try:
                text, held = b"".join(map(tokenizer.token_bytes, held)).decode("utf-8"), []
            except UnicodeDecodeError:
                text = ""
        found.append({"id": token_id, "text": visible(text), "supervised": supervised})
    return found
