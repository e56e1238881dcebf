"""Evaluates models, by scores or by a judge, compares them, writes a report, and records the scores with the models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Any

import sheepop
from sheepop.checkpoint import RunDirectory
from sheepop.checkpoint.model_card import record_scores
from sheepop.checkpoint.model_source import resolve_model_directory
from sheepop.core.console import Console
from sheepop.core.errors import CheckpointError, ConfigError, OutputError, StorageError, UsageError
from sheepop.core.files import storage_errors
from sheepop.core.json_lines import read_json_lines
from sheepop.data import Corpus
from sheepop.evaluate.answers import answers_of
from sheepop.evaluate.endpoint import Endpoint
from sheepop.evaluate.judge import Judge, LocalJudge, judge_pairs, read_prompts
from sheepop.evaluate.report import ModelResults, read_report, write_report
from sheepop.evaluate.results import Compared, Evaluation, compare, scores_of
from sheepop.evaluate.verdicts import judged
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.config import Activations
from sheepop.jobs.generate import Loader, load_generator
from sheepop.jobs.run.record import find_corpus, view_run_config
from sheepop.model.corpus_memory import CorpusMemory
from sheepop.parallel.ranks import ALONE, Ranks
from sheepop.tokenizer import ChatTemplate

_URLS = ("http://", "https://")


@dataclass(frozen=True)
class Place:
    """A model on disk: its name, its directory, and the run and step that it comes from."""

    name: str
    directory: Path
    run: RunDirectory | None = None
    step: int | None = None

    def corpus(self) -> Corpus | None:
        """The corpus that its run was trained on, if it still exists."""
        if self.run is None:
            return None
        try:
            config = view_run_config(self.run)
        except (ConfigError, OSError):
            config = None
        found = find_corpus(self.run, config)
        return None if found is None else Corpus.open(found, verify=False)

    def about(self) -> dict[str, Any]:
        """The facts about the model that the report shows."""
        run = None if self.run is None else str(self.run.path)
        return {"directory": str(self.directory), "run": run, "step": self.step}


@dataclass(frozen=True)
class Subject:
    """A loaded model to evaluate: its `generator` is the network alone, `memory` that of its training text, if any."""

    place: Place
    generator: Generator
    memory: CorpusMemory | None = None


Evaluate = Callable[[Subject], Sequence[Evaluation]]


@dataclass(frozen=True)
class How:
    """How models are loaded, and where the results go.

    Rounded `activations` show what rounding the inputs of products costs.

    `checkpoints` evaluates every checkpoint of a run instead of its best one. `records` writes the scores into the
    model directories: ``provenance.json`` and the model card. `tensor_parallel` is the number of processes that each
    model is split over. `requested` is shown in the report.
    """

    output: Path | None = None
    device: str = "auto"
    dtype: str | None = None
    activations: Activations = "exact"
    adapters: Sequence[str | Path] = ()
    checkpoints: bool = False
    records: bool = True
    tensor_parallel: int = 1
    requested: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The scores, the comparisons, and the directory of the report."""

    results: list[ModelResults]
    compared: list[Compared]
    directory: Path

    def to_dict(self) -> dict[str, Any]:
        """The scores and differences as plain data, without the single items."""
        return {
            "models": {
                result.model: [evaluation.to_dict() for evaluation in result.evaluations] for result in self.results
            },
            "compared": [asdict(found) for found in self.compared],
        }


def run_evaluations(
    models: Sequence[str | Path], evaluate: Evaluate, how: How, console: Console, ranks: Ranks = ALONE
) -> Outcome:
    """Evaluates every model, compares each pair of them, and writes the report.

    Several `ranks` call this with the same arguments and share the requests to each model; the first one compares and
    writes. Raises `UsageError` for a model that is given twice, `OutputError` for an output that exists, and whatever
    `evaluate` raises.
    """
    if ranks.are_several and how.tensor_parallel > 1:
        raise UsageError(
            "--tensor-parallel starts its own processes, so it cannot be combined with several ranks. Choose one."
        )
    output, results = output_of(how), list[ModelResults]()
    ranks.connect(how.device)
    load = Loader(
        how.adapters,
        device=how.device,
        dtype=how.dtype,
        activations=how.activations,
        tensor_parallel=how.tensor_parallel,
    )
    try:
        for place in found_models(models, console, checkpoints=how.checkpoints):
            console.info(f"Evaluating {place.name}")
            loaded = load(place.directory)
            memory = None if how.adapters else loaded.memory
            generator = Generator(loaded.model, loaded.tokenizer, end_ids=loaded.end_ids, ranks=ranks)
            evaluations = list(evaluate(Subject(place, generator, memory)))
            results.append(ModelResults(place.name, evaluations, place.about()))
            generator.close()
            if how.records and not how.adapters and how.activations == "exact" and ranks.is_first:
                _record(place.directory, evaluations, console)
    except BaseException:
        if results and ranks.is_first:
            finished(results, output, how)
            console.warn(f"The results so far are in {output}.")
        raise
    with ranks.together():
        return finished(results, output, how) if ranks.is_first else Outcome(results, [], output)


def compare_reports(directories: Sequence[Path], how: How) -> Outcome:
    """Compares the models of existing reports; raises `UsageError` if they have only one model."""
    output = output_of(how)
    results = [result for directory in directories for result in read_report(directory)]
    names = [result.model for result in results]
    if len(set(names)) < 2:
        raise UsageError("These reports have only one model, so there is nothing to compare. Give another report.")
    about = {result.model: result.about for result in results}
    merged = [
        ModelResults(
            name, [each for result in results if result.model == name for each in result.evaluations], about[name]
        )
        for name in dict.fromkeys(names)
    ]
    return finished(merged, output, how)


def output_of(how: How) -> Path:
    """The directory of the report; raises `OutputError` if it exists."""
    output = how.output or Path("evaluations") / datetime.now(UTC).astimezone().strftime("%Y-%m-%d-%H%M%S")
    if output.exists():
        raise OutputError(f"{output} already exists. Choose another --output, or remove it.")
    return output


def finished(results: list[ModelResults], output: Path, how: How) -> Outcome:
    """Compares all pairs of models and writes the report."""
    compared = [
        found
        for one, other in combinations(results, 2)
        if one.about.get("run") is None or one.about["run"] != other.about["run"]
        for found in compare(one.model, one.evaluations, other.model, other.evaluations)
    ]
    about = {
        **how.requested,
        "version": f"SheepOp {sheepop.__version__}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    write_report(output, results, compared, about)
    return Outcome(results, compared, output)


def found_models(models: Sequence[str | Path], console: Console, *, checkpoints: bool = False) -> list[Place]:
    """The given models on disk, or all `checkpoints` of given runs; raises `UsageError` for one given twice."""
    found = [place for model in models for place in _places(Path(model), console, checkpoints=checkpoints)]
    names = [place.name for place in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"{sorted(twice)[0]} is given twice. Give each model once.")
    return found


def _places(model: Path, console: Console, *, checkpoints: bool) -> list[Place]:
    directory = resolve_model_directory(model, console)
    inside = directory.parent.parent
    run = RunDirectory(inside) if directory.parent == RunDirectory(inside).checkpoints else None
    if not checkpoints:
        return [Place(str(model), directory, run, None if run is None else _step(run, directory))]
    if run is None or not RunDirectory(model).holds_run():
        raise UsageError(f"{model} is not a run, so it has no checkpoints to evaluate. Leave out --checkpoints.")
    return [Place(f"{model} step {step:,}", run.checkpoint(step), run, step) for step in run.steps()]


def _step(run: RunDirectory, directory: Path) -> int | None:
    return next((step for step in run.steps() if run.checkpoint(step) == directory), None)


def _record(directory: Path, evaluations: Sequence[Evaluation], console: Console) -> None:
    """Writes scores into a model directory; warns if that fails."""
    try:
        record_scores(directory, [score for evaluation in evaluations for score in scores_of(evaluation)])
    except (CheckpointError, StorageError) as error:
        console.warn(f"The scores were not recorded with the model: {error}")


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
def open_judge(
    judge: str, judge_model: str | None, api_key: str | None, how: How, seconds: float = 600.0
) -> Iterator[Judge]:
    """Opens a judge: `judge_model` of the server at the address `judge`, or the chat model in the directory `judge`.

    A reply of the server may take `seconds`.
    """
    if judge.startswith(_URLS):
        yield Endpoint(judge, model=judge_model, api_key=api_key, timeout=seconds, settings={"temperature": 0})
        return
    if judge_model is not None or api_key is not None:
        raise UsageError("--judge-model and --api-key are only for a judge on a server (--by http://...).")
    generator = load_generator(judge, device=how.device, dtype=how.dtype)
    with ChatTemplate.of(generator.tokenizer) as template:
        yield LocalJudge(generator, template)


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
