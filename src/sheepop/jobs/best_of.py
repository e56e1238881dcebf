"""Rejection sampling: of several answers of a model the best become examples, or the best and the worst pairs."""

from __future__ import annotations

from collections.abc import Sequence
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
from sheepop.posttrain.encoding import ExampleEncoder, template_of
from sheepop.posttrain.rewards import Question, Writer, Written, open_reward
from sheepop.posttrain.rows import Prompt, RowError, Turns, read_rows

_TOGETHER = 32


@dataclass
class BestOf:
    """What became of the prompts: lines written, and those left out because no answer was good enough."""

    prompts: int = 0
    written: int = 0
    left_out: int = 0
    reward: float = 0.0  # mean over all answers
    best_reward: float = 0.0  # mean over the best answer to each prompt

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
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
    seed: int = 0,
    device: str = "auto",
    overwrite: bool = False,
    console: Console | None = None,
) -> BestOf:
    """Writes `count` answers to every prompt of files, and the best ones, finished and judged `least`, to `output`.

    With `pairs` a line has the best and the worst answer of a prompt, where they differ in worth. Raises `DataError`
    for prompts that cannot be asked, and what `open_reward` and rewards raise.
    """
    if output.exists() and not overwrite:
        raise OutputError(f"{output} already exists. Choose another name, or replace it with --overwrite.")
    loaded, console = load_model(model, resolve_device(device)), console or Console.silent()
    found, tokenizer = BestOf(), loaded.tokenizer
    judge = open_reward(reward, reward_seconds, tokenizer, device=str(loaded.model.device), batch_size=_TOGETHER)
    writer = Writer(tokenizer, judge, max_new_tokens, temperature, loaded.end_ids)
    total = sum(1 for _ in read_rows(data, Prompt))
    with (
        template_of(tokenizer) as template,
        atomic_file(output, replace=overwrite) as place,
        place.open("wb") as file,
        console.progress("Answers", total * count, "answers") as progress,
    ):
        encoder = ExampleEncoder(tokenizer, template)
        remaining, number = read_rows(data, Prompt), 0
        while rows := list(islice(remaining, _TOGETHER)):
            questions = [_question(encoder, row) for row in rows]
            written = writer(loaded.model, questions, count, derive_seed(seed, "best of", number))
            for place_of, row in enumerate(rows):
                line = _line(row, written, range(place_of * count, (place_of + 1) * count), pairs, least, found)
                if line is not None:
                    file.write(orjson.dumps(line) + b"\n")
            progress.advance(len(rows) * count)
            number += 1
    judge.close()
    found.reward /= max(1, found.prompts * count)
    found.best_reward /= max(1, found.prompts)
    return found


def _question(encoder: ExampleEncoder, row: Prompt) -> Question:
    try:
        return Question(encoder.prompt(row.prompt, row.tools).ids, row.fields)
    except RowError as error:
        raise DataError(f"{row.place}: {error}") from None


def _line(
    row: Prompt, written: Written, places: Sequence[int], pairs: bool, least: float | None, found: BestOf
) -> dict[str, Any] | None:
    """What is written for a prompt, counted in `found`; None where no answer will do."""
    ranked = sorted(places, key=lambda place: written.rewards[place], reverse=True)
    found.prompts += 1
    found.reward += sum(written.rewards[place] for place in places)
    found.best_reward += written.rewards[ranked[0]]
    # An answer that says nothing is no example, nor one without its end.
    finished = [place for place in ranked if written.is_finished[place] and written.answers[place].completion.strip()]
    best, worst = (finished[0], finished[-1]) if finished else (ranked[0], ranked[0])
    margin = written.rewards[best] - written.rewards[worst]
    too_low = least is not None and written.rewards[best] < least
    if not finished or too_low or (pairs and margin == 0):
        found.left_out += 1
        return None
    found.written += 1
    answers = [_answer(row.prompt, written.answers[place].completion) for place in (best, worst)]
    prompt = row.prompt if isinstance(row.prompt, str) else list(row.prompt)
    if pairs:
        return {"prompt": prompt, "chosen": answers[0], "rejected": answers[1], "margin": margin}
    return {"prompt": prompt, "completion": answers[0], "reward": written.rewards[best]}


def _answer(prompt: Turns, text: str) -> str | list[dict[str, str]]:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text.strip()}]
