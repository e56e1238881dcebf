"""Rejection sampling: writes the best of several answers as examples, or the best and the worst as pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from sheepop.checkpoint import load_model
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.errors import DataError, OutputError
from sheepop.core.files import atomic_file
from sheepop.core.random import derive_seed
from sheepop.jobs.task.reward_sources import open_reward
from sheepop.posttrain.config import CodeConfig, JudgeConfig
from sheepop.posttrain.conversations import Question
from sheepop.posttrain.encoding import ExampleEncoder
from sheepop.posttrain.rewards import Writer, Written
from sheepop.posttrain.rows import Prompt, RowError, Turns, read_rows
from sheepop.tokenizer.ready_templates import template_of

_BATCH_SIZE = 32


@dataclass
class BestOf:
    """Counts of prompts and mean rewards. A prompt is left out if no answer is good enough."""

    prompts: int = 0
    written: int = 0
    left_out: int = 0
    reward: float = 0.0  # mean over all answers
    best_reward: float = 0.0  # mean over the best answer to each prompt

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)


def best_of(
    model: str | Path,
    data: Sequence[Path],
    output: Path,
    *,
    reward: str,
    count: int,
    pairs: bool = False,
    least: float | None = None,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    reward_seconds: float = 10.0,
    judge: JudgeConfig | None = None,
    code: CodeConfig | None = None,
    seed: int = 0,
    device: str = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> BestOf:
    """Generates `count` answers to every prompt in `data` and writes the best ones to `output`, as JSON lines.

    Written answers are finished and not empty, and the best one has a reward of at least `least`. With `pairs`, a line
    has the best and the worst answer to a prompt, if their rewards differ. `judge` and `code` are the settings of these
    sources of rewards. The chat template of the model reads
    `chat_template_kwargs`. Raises `DataError` for a prompt that cannot be encoded, `OutputError` if `output` exists,
    and whatever `open_reward` and rewards raise.
    """
    if output.exists() and not overwrite:
        raise OutputError(f"{output} already exists. Choose another name, or replace it with --overwrite.")
    loaded, console = load_model(model, resolve_device(device)), console or Console.silent()
    found, tokenizer = BestOf(), loaded.tokenizer
    options: dict[str, Any] = {"device": str(loaded.model.device), "batch_size": _BATCH_SIZE}
    source = open_reward(reward, reward_seconds, tokenizer, **options, judge=judge, code=code)
    writer = Writer(tokenizer, {reward: (1.0, source)}, max_new_tokens, temperature, loaded.end_ids)
    total = sum(1 for _ in read_rows(data, Prompt))
    with (
        template_of(tokenizer, chat_template_kwargs) as template,
        atomic_file(output, replace=overwrite) as temporary,
        temporary.open("wb") as file,
        console.progress("Answers", total * count, "answers") as progress,
    ):
        encoder = ExampleEncoder(tokenizer, template, loaded.end_ids)
        remaining, number = read_rows(data, Prompt), 0
        while rows := list(islice(remaining, _BATCH_SIZE)):
            questions = [_question(encoder, row) for row in rows]
            written = writer(loaded.model, questions, count, derive_seed(seed, "best of", number))
            for index, row in enumerate(rows):
                line = _line(row, written, range(index * count, (index + 1) * count), pairs, least, found)
                if line is not None:
                    file.write(orjson.dumps(line) + b"\n")
            progress.advance(len(rows) * count)
            number += 1
    source.close()
    found.reward /= max(1, found.prompts * count)
    found.best_reward /= max(1, found.prompts)
    return found


def _question(encoder: ExampleEncoder, row: Prompt) -> Question:
    try:
        (group,) = encoder(row)
        return Question.of(group.examples[0].ids, group.fields or {})
    except RowError as error:
        raise DataError(f"{row.place}: {error}") from None


def _line(
    row: Prompt, written: Written, indices: Sequence[int], pairs: bool, least: float | None, found: BestOf
) -> dict[str, Any] | None:
    """The line of a prompt with its answers at `indices`, or None if no answer is good enough; counted in `found`."""
    ranked = sorted(indices, key=lambda index: written.rewards[index], reverse=True)
    found.prompts += 1
    found.reward += sum(written.rewards[index] for index in indices)
    found.best_reward += written.rewards[ranked[0]]
    # Empty and unfinished answers make bad examples.
    finished = [index for index in ranked if written.is_finished[index] and written.answers[index].completion.strip()]
    best, worst = (finished[0], finished[-1]) if finished else (ranked[0], ranked[0])
    margin = written.rewards[best] - written.rewards[worst]
    too_low = least is not None and written.rewards[best] < least
    if not finished or too_low or (pairs and margin == 0):
        found.left_out += 1
        return None
    found.written += 1
    answers = [_answer(row.prompt, written.answers[index].completion) for index in (best, worst)]
    prompt = row.prompt if isinstance(row.prompt, str) else list(row.prompt)
    if pairs:
        return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1], "margin": margin}
    return {"prompt": prompt, "completion": answers[0], "reward": written.rewards[best]}


def _answer(prompt: Turns, text: str) -> str | list[dict[str, str]]:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text.strip()}]
