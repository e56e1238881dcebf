"""``sheepop eval``: measures models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sheepop.cli.arena import arena
from sheepop.cli.generation_options import TensorParallel
from sheepop.cli.options import (
    MODEL,
    Activations,
    Adapter,
    ConfiguredCommand,
    Context,
    Device,
    Dtype,
    Json,
    JudgeModel,
    JudgeOfRequests,
    Quiet,
    TaskContext,
    TemplateVariables,
    make_console,
    print_json,
    print_text,
    template_variables,
    typed_command,
)
from sheepop.core.console import Console
from sheepop.core.errors import UsageError

if TYPE_CHECKING:
    from sheepop.jobs.evaluate import Evaluate, How, Outcome

app = typer.Typer(help="Measure models on text, tasks and programs, by judges and by people.", no_args_is_help=True)

Models = Annotated[list[Path], typer.Argument(metavar="MODEL...", help=f"{MODEL} Several are compared.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="A new directory for the report.", show_default="evaluations/<date>"),
]
NoRecord = Annotated[
    bool, typer.Option("--no-record", help="Do not write the scores into the models' provenance and model cards.")
]
Checkpoints = Annotated[bool, typer.Option("--checkpoints", help="Evaluate every checkpoint of a run, with curves.")]
Stride = Annotated[
    int | None, typer.Option(min=1, help="New tokens that each window predicts.", show_default="half the window")
]
DataToPredict = Annotated[
    list[Path] | None,
    typer.Option("--data", help="Text files, folders, JSON lines or corpora.", show_default="the run's held-out text"),
]
TaskNames = Annotated[
    list[str] | None,
    typer.Option(
        "--tasks",
        metavar="NAME|FILE.jsonl",
        help="copying, brackets, arithmetic, cloze, a file of questions, or a task of lm-eval; repeatable.",
        show_default="the first four",
    ),
]
Include = Annotated[
    list[Path] | None, typer.Option("--include", help="A directory with task files of lm-eval.", show_default="none")
]
Fewshot = Annotated[
    int | None, typer.Option("--fewshot", min=0, help="Examples before each question.", show_default="the task's own")
]
Chat = Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="Repeat with N seeds; intervals are over the seeds.")]
Robustness = Annotated[bool, typer.Option("--robustness", help="Also ask every question in other words.")]
Training = Annotated[
    Path | None,
    typer.Option(
        "--training-data", help="The corpus to search for the questions.", show_default="that of the model's run"
    ),
]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The API key of the judge's server.")]


@app.command()
def perplexity(
    models: Models,
    data: DataToPredict = None,
    output: Output = None,
    context: Context = None,
    stride: Stride = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read about N texts, evenly spaced.", show_default="all")
    ] = None,
    compressors: Annotated[bool, typer.Option(help="Compare the models with gzip and xz.")] = True,
    checkpoints: Checkpoints = False,
    no_record: NoRecord = False,
    tensor_parallel: TensorParallel = 1,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
    activations: Activations = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how well models predict text: bits per byte, perplexity, accuracy, calibration.

    A window slides over each text, and every token is predicted once. The report shows the scores by source, by context
    length and by text length, and the bits per byte of gzip, of xz, and of xz that has read the training text.

    Examples:

      sheepop eval perplexity runs/quickstart

      sheepop eval perplexity runs/small runs/large --data books/ --output evaluations/books

      sheepop eval perplexity runs/quickstart --checkpoints --limit 100
    """
    how = _how(
        output, device, dtype, adapter, activations, tensor_parallel, checkpoints=checkpoints, no_record=no_record
    )

    def kind(console: Console) -> Evaluate:
        from sheepop.jobs.evaluation_kinds import Perplexity

        return Perplexity(data or (), context, stride, limit, compressors, console)

    _evaluate(models, kind, how, quiet=quiet, as_json=as_json)


@app.command()
def tasks(
    models: Models,
    tasks: TaskNames = None,
    output: Output = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Questions of each task.", show_default="all; 500 of a generated task")
    ] = None,
    fewshot: Fewshot = None,
    chat: Chat = False,
    chat_template_kwargs: TemplateVariables = None,
    include: Include = None,
    context: TaskContext = None,
    seeds: Seeds = 1,
    robustness: Robustness = False,
    training_data: Training = None,
    by: JudgeOfRequests = None,
    judge_model: JudgeModel = None,
    api_key: ApiKey = None,
    checkpoints: Checkpoints = False,
    no_record: NoRecord = False,
    tensor_parallel: TensorParallel = 1,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
    activations: Activations = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Ask models questions: small tasks of SheepOp, your own questions, and all tasks of lm-eval.

    Your own questions are lines of JSON with prompt, choices and answer. Questions that occur in the model's training
    text are scored separately. A file of requests, lines of JSON with prompt and should (answer, refuse or abstain),
    needs a judge. Tasks of lm-eval need the extra eval: pip install "sheepop\\[eval]"

    Examples:

      sheepop eval tasks runs/quickstart

      sheepop eval tasks runs/quickstart --tasks copying --checkpoints

      sheepop eval tasks models/smollm --tasks hellaswag --tasks arc_easy --limit 200

      sheepop eval tasks runs/base runs/chat --tasks questions.jsonl --robustness --seeds 3

      sheepop eval tasks runs/chat --tasks requests.jsonl --by http://localhost:8000
    """
    how = _how(
        output, device, dtype, adapter, activations, tensor_parallel, checkpoints=checkpoints, no_record=no_record
    )
    variables = template_variables(chat_template_kwargs, is_read=chat)

    def kind(console: Console) -> Evaluate:
        from sheepop.evaluate.questions import is_own
        from sheepop.jobs.evaluate import open_judge
        from sheepop.jobs.evaluation_kinds import Harness, Tasks

        if by is None and judge_model is not None:
            raise UsageError("--judge-model needs a judge. Name one with --by.")
        if context is not None and all(map(is_own, tasks or ())):
            raise UsageError("--context is for tasks of lm-eval, such as wikitext. Name one with --tasks.")
        harness = Harness(include or (), fewshot, limit, chat, variables, console, context)
        judge = None if by is None else partial(open_judge, by, judge_model, api_key, how)
        return Tasks(tasks or (), limit, range(seeds), robustness, training_data, harness, console, judge)

    _evaluate(models, kind, how, quiet=quiet, as_json=as_json)


@app.command()
def code(
    models: Models,
    data: Annotated[list[Path], typer.Option("--data", help="Problems as in HumanEval or MBPP, in JSON lines.")],
    output: Output = None,
    samples: Annotated[int, typer.Option(min=1, help="Programs to generate for each problem.")] = 1,
    k: Annotated[
        list[int] | None, typer.Option("-k", min=1, help="The k of pass@k; repeatable.", show_default="1")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.2,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of a program.")] = 512,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time limit of a program in seconds.")] = 10.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N problems.", show_default="all")] = None,
    chat: Chat = False,
    chat_template_kwargs: TemplateVariables = None,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    no_record: NoRecord = False,
    tensor_parallel: TensorParallel = 1,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
    activations: Activations = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Let models write programs, and run their tests in a sandbox without network and files, with a time limit.

    If the system cannot isolate programs, nothing is run.

    Examples:

      sheepop eval code runs/coder --data humaneval.jsonl

      sheepop eval code runs/coder --data mbpp.jsonl --samples 20 -k 1 -k 10 --temperature 0.8
    """
    how = _how(output, device, dtype, adapter, activations, tensor_parallel, no_record=no_record)
    variables = template_variables(chat_template_kwargs, is_read=chat)

    def kind(console: Console) -> Evaluate:
        from sheepop.jobs.evaluation_kinds import Code

        return Code(
            data, samples, k or [1], temperature, max_new_tokens, seconds, limit, seed, chat, variables, console
        )

    _evaluate(models, kind, how, quiet=quiet, as_json=as_json)


@app.command()
def compare(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL... | REPORT...", help="Two or more models, or evaluations of them.")
    ],
    data: DataToPredict = None,
    context: Context = None,
    tasks: TaskNames = None,
    output: Output = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Texts, and questions of each task.", show_default="all; 500 of a generated task"),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare models item by item, and test whether chance explains the differences.

    All models answer the same tasks and predict the same text, by default the held-out text of the first one's run.
    Directories that `sheepop eval` wrote are compared without running the models.

    Examples:

      sheepop eval compare runs/base runs/chat --tasks copying --tasks arithmetic

      sheepop eval compare evaluations/monday evaluations/tuesday
    """
    from sheepop.jobs.evaluation_kinds import compare_models

    console = make_console(quiet or as_json)
    how = _how(output, device, dtype, None, no_record=True)
    outcome = compare_models(models, data or (), context, tasks or (), limit, how, console)
    _show(outcome, quiet=quiet, as_json=as_json)


@app.command()
def judge(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="Two or more models.")],
    data: Annotated[Path, typer.Option("--data", help="Prompts in JSON lines, with prompt or messages.")],
    by: Annotated[
        str, typer.Option("--by", metavar="URL|MODEL", help="The judge: a server's address, or a chat model.")
    ],
    judge_model: JudgeModel = None,
    api_key: ApiKey = None,
    output: Output = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts.", show_default="all")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of an answer.")] = 512,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature of the models; the judge is greedy.")
    ] = 0.7,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    chat_template_kwargs: TemplateVariables = None,
    workers: Annotated[int, typer.Option(min=1, help="Parallel requests to the judge.")] = 4,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Let a judge decide whose answers are better: any server with OpenAI's API, or a chat model.

    Each pair of answers is judged in both orders, and verdicts that disagree count as a tie. The report has win rates,
    raw and corrected for length, the judge's position bias, and a ranking with intervals.

    Examples:

      sheepop eval judge runs/base runs/chat --data prompts.jsonl --by http://localhost:8000

      sheepop eval judge runs/a runs/b runs/c --data prompts.jsonl --by models/judge --output evaluations/judged
    """
    from sheepop.jobs.evaluate import Judging, judge_models

    how = _how(output, device, dtype, None, no_record=True)
    variables = template_variables(chat_template_kwargs)
    requested = Judging(data, by, judge_model, api_key, limit, max_new_tokens, temperature, seed, variables, workers)
    outcome = judge_models(models, requested, how, make_console(quiet or as_json))
    _show(outcome, quiet=quiet, as_json=as_json)


app.command("arena", cls=ConfiguredCommand)(arena)


def _how(
    output: Path | None,
    device: str | None,
    dtype: str | None,
    adapter: list[Path] | None,
    activations: Any = None,
    tensor_parallel: int = 1,
    *,
    checkpoints: bool = False,
    no_record: bool,
) -> How:
    from sheepop.jobs.evaluate import How

    return How(
        output=output,
        device=device or "auto",
        dtype=dtype,
        activations=activations or "exact",
        adapters=adapter or (),
        checkpoints=checkpoints,
        records=not no_record,
        tensor_parallel=tensor_parallel,
        requested={"command": typed_command()},
    )


def _evaluate(models: list[Path], kind: Callable[[Console], Evaluate], how: How, *, quiet: bool, as_json: bool) -> None:
    """Runs the evaluation that `kind` returns, together with the other ranks if any, and prints the scores."""
    from sheepop.jobs.evaluate import run_evaluations
    from sheepop.parallel.ranks import Ranks

    with Ranks.joined() as ranks:
        ranks.require_agreement(how.requested)
        console = make_console(quiet or as_json) if ranks.is_first else Console.silent()
        outcome = run_evaluations(models, kind(console), how, console, ranks)
    if ranks.is_first:
        _show(outcome, quiet=quiet, as_json=as_json)


def _show(outcome: Outcome, *, quiet: bool, as_json: bool) -> None:
    """Prints the scores as a table or as JSON, and the path of the report."""
    if as_json:
        print_json({"output": str(outcome.directory), **outcome.to_dict()})
        return
    lines = [line for result in outcome.results for line in _scores(result.model, result.evaluations)]
    lines += [_difference(found) for found in outcome.compared]
    print_text("\n".join([*lines, ""]))
    if not quiet:
        make_console(quiet).info(f"Report: {outcome.directory / 'report.html'}")


def _scores(model: str, evaluations: Any) -> list[str]:
    from sheepop.evaluate.report import with_interval

    lines = [f"{model}:"]
    for evaluation in evaluations:
        for measure in evaluation.measures:
            lines.append(f"  {evaluation.name:<16} {measure.name:<20} {with_interval(measure)}")
        lines += [f"  Note: {note}" for note in evaluation.notes]
    return lines


def _difference(found: Any) -> str:
    from sheepop.report import shown

    low, high = found.difference.interval
    verdict = "no difference beyond chance" if found.better is None else f"{found.better} is better"
    return (
        f"{found.name}, {found.measure}: {found.first} minus {found.second} is {shown(found.difference.value)} "
        f"({shown(low)} to {shown(high)}), p = {shown(found.difference.p)}: {verdict}"
    )
