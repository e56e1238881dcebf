"""``sheepop tune``: post-training of a model."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sheepop.cli.options import (
    MODEL,
    ConfigFile,
    Device,
    Json,
    Overrides,
    OverwriteRun,
    Quiet,
    Resume,
    RunOutput,
    TemplateVariables,
    make_console,
    print_json,
    template_variables,
)
from sheepop.cli.train import run_command
from sheepop.core.errors import UsageError

if TYPE_CHECKING:
    from sheepop.posttrain.config import Method

_SETTINGS = "[KEY=VALUE]..."
app = typer.Typer(help="Post-train a model on conversations, preferences or rewards.", no_args_is_help=True)

Model = Annotated[Path | None, typer.Argument(metavar="MODEL", help=f"The model to start from. {MODEL}")]
Data = Annotated[
    list[Path] | None,
    typer.Option("--data", help="Examples in JSON lines, a JSON list or Parquet; repeatable."),
]
Validation = Annotated[
    list[Path] | None, typer.Option("--validation", help="Held-out examples, instead of a share of --data.")
]
_REWARD = "MODEL|FILE.py|URL|judge|code"
RewardSource = Annotated[
    str | None,
    typer.Option(
        "--reward",
        metavar=_REWARD,
        help="What scores answers: a reward model, a Python file with a function reward, a service, judge or code.",
    ),
]
EnvironmentFile = Annotated[
    str | None,
    typer.Option(
        "--environment",
        metavar="FILE.py",
        help="What the model converses with before its answer is scored: a Python file with a class Environment.",
    ),
]
Show = Annotated[
    int | None,
    typer.Option(
        "--show", min=1, help="Show N examples with the learnt tokens marked, and the template; start no run."
    ),
]


_HELP: dict[Method, str] = {
    "sft": """\
Fine-tune a model on conversations, or on prompts with their answers.

The model learns only from the answers. A line of the data has messages, or prompt and completion; the formats of \
ShareGPT, Alpaca, Dolly and FLAN work, too.

Examples:

  sheepop tune sft models/base --data chats.jsonl --show 3

  sheepop tune sft models/base --data chats.jsonl --output runs/chat

  sheepop tune sft models/base --data chats.jsonl --output runs/chat training.max_epochs=1 tuning.neftune_noise_alpha=5

  sheepop tune sft --resume runs/chat
""",
    "dpo": """\
Train a model to prefer the better of two answers.

A line of the data has prompt, chosen and rejected. Rankings and the formats of UltraFeedback and HH work, too; with \
tuning.dpo.loss_type=kto, a line has prompt, completion and label. The model stays close to the one that it starts from.

Examples:

  sheepop tune dpo runs/chat --data pairs.jsonl --output runs/polite

  sheepop tune dpo runs/chat --data pairs.jsonl --output runs/polite tuning.dpo.loss_type=ipo tuning.dpo.beta=0.5

  sheepop tune dpo runs/chat --data judged.jsonl --output runs/polite tuning.dpo.loss_type=kto
""",
    "distill": """\
Train a model on what a teacher thinks of the answers that the model writes.

A line of the data has a prompt, or messages that end with a question. The teacher is a larger model with the same \
tokenizer; the model learns its token probabilities (GKD).

Examples:

  sheepop tune distill runs/chat --data prompts.jsonl --output runs/taught tuning.distill.teacher=models/large

  sheepop tune distill runs/chat --data prompts.jsonl tuning.distill.teacher=models/large tuning.distill.beta=1
""",
    "reward": """\
Train a reward model, which scores answers.

A line of the data has prompt, chosen and rejected, as for `sheepop tune dpo`.

Examples:

  sheepop tune reward runs/chat --data pairs.jsonl --output runs/judge

  sheepop tune reward runs/chat --data pairs.jsonl --output runs/judge tuning.reward.center_rewards_coefficient=0.01
""",
    "ppo": """\
Train a model on rewards for its answers, together with a value model.

A line of the data has a prompt, or messages that end with a question, and any other fields that the reward needs.

Examples:

  sheepop tune ppo runs/chat --data prompts.jsonl --reward runs/judge --output runs/better

  sheepop tune ppo runs/chat --data prompts.jsonl --reward check.py --output runs/better tuning.ppo.epochs=2
""",
    "grpo": """\
Train a model on rewards for several answers to each prompt.

A line of the data has a prompt, or messages that end with a question, and any other fields that the reward needs, \
such as the right answer.

Examples:

  sheepop tune grpo runs/chat --data sums.jsonl --reward check.py --output runs/sums

  sheepop tune grpo runs/chat --data sums.jsonl --reward http://127.0.0.1:8001/judge --output runs/sums

  sheepop tune grpo runs/chat --data sums.jsonl --reward check.py --output runs/sums tuning.grpo.group_size=16

  sheepop tune grpo runs/chat --data sums.jsonl --environment calculator.py --output runs/sums
""",
}


def _examples_command(method: Method) -> None:
    """Adds the command of a method that learns from examples."""

    @app.command(method, help=_HELP[method])
    def command(
        model: Model = None,
        overrides: Overrides = None,
        config: ConfigFile = None,
        data: Data = None,
        validation: Validation = None,
        output: RunOutput = None,
        device: Device = None,
        resume: Resume = None,
        overwrite: OverwriteRun = False,
        show: Show = None,
        quiet: Quiet = False,
        as_json: Json = False,
    ) -> None:
        _tune(
            method, model, overrides, config, data, validation, output, device, resume, overwrite, show, quiet, as_json
        )


def _rewards_command(method: Method) -> None:
    """Adds the command of a method that learns from rewards."""

    @app.command(method, help=_HELP[method])
    def command(
        model: Model = None,
        overrides: Overrides = None,
        config: ConfigFile = None,
        data: Data = None,
        validation: Validation = None,
        reward: RewardSource = None,
        environment: EnvironmentFile = None,
        output: RunOutput = None,
        device: Device = None,
        resume: Resume = None,
        overwrite: OverwriteRun = False,
        show: Show = None,
        quiet: Quiet = False,
        as_json: Json = False,
    ) -> None:
        files = (data, validation, output, device, resume, overwrite, show, quiet, as_json, reward, environment)
        _tune(method, model, overrides, config, *files)


for _method in ("sft", "dpo", "distill", "reward"):
    _examples_command(_method)
for _method in ("ppo", "grpo"):
    _rewards_command(_method)  # type: ignore[arg-type]


@app.command("best-of")
def best_of(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help=f"The model that answers. {MODEL}")],
    data: Annotated[list[Path], typer.Option("--data", help="Prompts in JSON lines, a JSON list or Parquet.")],
    reward: Annotated[
        str, typer.Option("--reward", metavar=_REWARD, help="What scores answers, as for sheepop tune ppo.")
    ],
    output: Annotated[Path, typer.Option("--output", help="The file of examples to write, in JSON lines.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings of the judge and of code, under tuning.judge and tuning.code", metavar=_SETTINGS),
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Answers to each prompt.")] = 8,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Write the best and the worst answer, as examples for sheepop tune dpo.")
    ] = False,
    least: Annotated[
        float | None, typer.Option("--least", help="Leave out prompts whose best answer has a lower reward.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Maximum number of tokens of an answer.")
    ] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.01, help="Sampling temperature.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed for sampling.")] = 0,
    chat_template_kwargs: TemplateVariables = None,
    device: Device = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file at --output.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Generate several answers to each prompt, and write the best ones as training examples.

    The output is for sheepop tune sft, or with --pairs for sheepop tune dpo and reward.

    Examples:

      sheepop tune best-of runs/chat --data prompts.jsonl --reward check.py --output best.jsonl

      sheepop tune best-of runs/chat --data prompts.jsonl --reward runs/judge --pairs --output pairs.jsonl

      sheepop tune best-of runs/chat --data prompts.jsonl --reward judge --output best.jsonl tuning.judge.by=runs/large
    """
    from sheepop.jobs.best_of import best_of as run
    from sheepop.jobs.config import load_config

    for given in overrides or ():
        if not given.startswith(("tuning.judge.", "tuning.code.")):
            raise UsageError(f"{given} has no effect here; only settings under tuning.judge and tuning.code are read.")
    options = {"tuning": {"method": "grpo", "grpo": {"reward": reward}}}
    settings = load_config(overrides=overrides or (), options=options)
    found = run(
        model,
        data,
        output,
        reward=reward,
        count=count,
        pairs=pairs,
        least=least,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        judge=settings.tuning.judge,
        code=settings.tuning.code,
        seed=seed,
        chat_template_kwargs=template_variables(chat_template_kwargs),
        device=device or "auto",
        overwrite=overwrite,
        console=make_console(quiet),
    )
    if as_json:
        print_json({"output": str(output), **found.to_dict()})
        return
    typer.echo(
        f"Wrote {output}: {found.written:,} of {found.prompts:,} prompts, {found.left_out:,} left out because no "
        f"answer was good enough. Mean reward {found.reward:.4f}, of the best answers {found.best_reward:.4f}."
    )


def _tune(
    method: Method,
    model: Path | None,
    overrides: list[str] | None,
    config: Path | None,
    data: list[Path] | None,
    validation: list[Path] | None,
    output: Path | None,
    device: Any,
    resume: str | None,
    overwrite: bool,
    show: int | None,
    quiet: bool,
    as_json: bool,
    reward: str | None = None,
    environment: str | None = None,
) -> None:
    """Starts or resumes a run of a method, or shows its examples."""
    if model is not None and "=" in str(model) and not model.exists():  # a setting, and no model
        overrides, model = [str(model), *(overrides or ())], None
    options: dict[str, Any] = {"tuning": {"method": method}}
    if data:
        options["data"] = {"paths": [str(path) for path in data]}
    if validation:
        options["tuning"]["validation_paths"] = [str(path) for path in validation]
    given = {"reward": reward, "environment": None if environment is None else {"file": environment}}
    if found := {name: value for name, value in given.items() if value is not None}:
        options["tuning"][method] = found
    if device is not None:
        options["device"] = device
    if model is None and resume in (None, "auto"):
        raise UsageError(f"Give the model to start from: sheepop tune {method} MODEL --data FILE")
    if model is not None and resume not in (None, "auto"):
        raise UsageError("--resume continues a run, which has its own model; leave out MODEL.")
    if show is not None:
        if output is not None or resume is not None or overwrite:
            raise UsageError("--show starts no run, so it cannot be combined with --output, --resume or --overwrite.")
        _show(model, options, overrides or [], config, show, quiet, as_json)
        return
    run_command(
        options,
        overrides=overrides or (),
        config=config,
        output=output,
        resume=resume,
        fork=model,
        overwrite=overwrite,
        quiet=quiet,
        as_json=as_json,
    )


def _show(
    model: Path | None,
    options: dict[str, Any],
    overrides: list[str],
    config: Path | None,
    count: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """Prints the first examples with the learnt tokens marked, and what a run would do."""
    from rich.console import Console as RichConsole

    from sheepop.checkpoint import RunDirectory, resolve_model_directory
    from sheepop.core.console import Console
    from sheepop.jobs.run.open import task_of
    from sheepop.jobs.run.request import RunRequest
    from sheepop.jobs.task.examples import ExampleTask
    from sheepop.jobs.task.shown import Decision, plain_preview, preview, preview_tokens, shown_examples

    if model is None:
        raise UsageError("--show needs the model, whose tokenizer and chat template it shows.")
    said = io.StringIO()
    console = Console(file=said) if as_json else make_console(quiet)
    request = RunRequest.of(options, overrides=overrides, config=config, fork=model, console=console)
    resolve_model_directory(model, console)  # which fetches a published model
    terminal, shown = RichConsole(highlight=False, soft_wrap=True), []
    task = task_of(request.completed().config, RunDirectory(Path()), console)
    assert isinstance(task, ExampleTask)
    for place, example, tokenizer in shown_examples(task, model, count):
        if as_json:
            shown.append({"place": place, "tokens": preview_tokens(example, tokenizer)})
            continue
        learnt = sum(example.supervised)
        typer.echo(f"{place}: {len(example):,} tokens, {learnt:,} of them learnt")
        if terminal.is_terminal and not terminal.no_color:
            terminal.print(preview(example, tokenizer))
        else:
            typer.echo(plain_preview(example, tokenizer))
        typer.echo("")
    decision = Decision.of(task, model, request.given)
    if as_json:
        print_json({"examples": shown, **asdict(decision), "said": said.getvalue().splitlines()})
    else:
        typer.echo("\n".join(decision.lines()))
