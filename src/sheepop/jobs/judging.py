"""Compares models by a judge: they answer the same prompts, and another model says which answers are better."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.files import storage_errors
from sheepop.evaluate.answers import answers_of
from sheepop.evaluate.endpoint import Endpoint
from sheepop.evaluate.judge import Judge, LocalJudge, judge_pairs, read_prompts
from sheepop.evaluate.report import ModelResults
from sheepop.evaluate.verdicts import judged
from sheepop.generate import GenerationConfig
from sheepop.jobs.evaluate import How, Outcome, finished, found_models, output_of
from sheepop.jobs.generate import load_generator
from sheepop.tokenizer import ChatTemplate
from sheepop.train.metrics import read_json_lines

_URLS = ("http://", "https://")


@dataclass(frozen=True)
class Judging:
    """The prompts, the judge (a server's URL or a chat model's directory), and how the models answer.

    `chat_template_kwargs` are for the templates of the models, not of the judge.
    """

    data: Path
    judge: str
    judge_model: str | None
    api_key: str | None
    limit: int | None
    max_new_tokens: int
    temperature: float
    seed: int
    chat_template_kwargs: Mapping[str, Any] | None
    workers: int


def judge_models(models: Sequence[Path], requested: Judging, how: How, console: Console) -> Outcome:
    """Lets the models answer, lets the judge compare each pair in both orders, and writes the report.

    Verdicts are kept in a file beside the output until the report is written, so that an interrupted evaluation can
    resume. Raises `UsageError` for fewer than two models, and as `run_evaluations` does.
    """
    if len(models) < 2:
        raise UsageError("A judge compares the answers of at least two models. Name another model.")
    output = output_of(how)
    prompts = read_prompts(requested.data)[: requested.limit]
    answers: dict[str, list[str]] = {}
    config = GenerationConfig(
        max_new_tokens=requested.max_new_tokens,
        temperature=requested.temperature,
        seed=requested.seed,
        on_overflow="window",
    )
    for place in found_models(models, console):
        generator = load_generator(place.directory, device=how.device, dtype=how.dtype)
        with console.progress(f"Answers of {place.name}", len(prompts), "answers") as progress:
            # A single question also works for a model without a chat template.
            texts = [p.messages[0]["content"] if len(p.messages) == 1 else list(p.messages) for p in prompts]
            variables = requested.chat_template_kwargs
            answers[place.name] = answers_of(generator, texts, config, variables, on_done=progress.advance)
        generator.close()
    # The mark keeps verdicts of different judges apart. A last line that was cut off by a kill is judged again.
    judge_mark = blake2b(f"{requested.judge} {requested.judge_model}".encode(), digest_size=4).hexdigest()
    known_rows = output.with_name(f"{output.name}.{judge_mark}.verdicts.jsonl")
    known, _ = read_json_lines(known_rows)
    pairs = len(prompts) * len(models) * (len(models) - 1) // 2
    with (
        open_judge(requested.judge, requested.judge_model, requested.api_key, how) as judge,
        storage_errors(known_rows),
        _made(known_rows).open("a", encoding="utf-8") as file,
        console.progress("Judging", pairs, "pairs") as progress,
    ):

        def keep(row: dict[str, Any]) -> None:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            progress.advance()

        verdicts = judge_pairs(judge, prompts, answers, workers=requested.workers, known=known, on_done=keep)
    about: dict[str, Any] = {"judge": requested.judge, "judge_model": requested.judge_model}
    if requested.chat_template_kwargs:
        about["chat_template_kwargs"] = dict(requested.chat_template_kwargs)
    found = zip(verdicts.models, judged(verdicts, requested.data.stem), strict=True)
    outcome = finished([ModelResults(name, [each], about) for name, each in found], output, how)
    known_rows.unlink(missing_ok=True)
    return outcome


@contextmanager
def open_judge(judge: str, judge_model: str | None, api_key: str | None, how: How) -> Iterator[Judge]:
    """Opens a judge: `judge_model` of the server at the address `judge`, or the chat model in the directory `judge`."""
    if judge.startswith(_URLS):
        yield Endpoint(judge, model=judge_model, api_key=api_key, settings={"temperature": 0})
        return
    if judge_model is not None or api_key is not None:
        raise UsageError("--judge-model and --api-key are only for a judge on a server (--by http://...).")
    generator = load_generator(judge, device=how.device, dtype=how.dtype)
    with ChatTemplate.of(generator.tokenizer) as template:
        yield LocalJudge(generator, template)


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
