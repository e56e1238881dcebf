"""``sheepop tune``: a finished model learns to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sheepop.cli.options import (
    ConfigFile,
    Device,
    Json,
    Overrides,
    OverwriteRun,
    Quiet,
    Resume,
    RunOutput,
    print_json,
)
from sheepop.cli.train import run_command
from sheepop.core.errors import UsageError

app = typer.Typer(help="Teach a finished model to answer.", no_args_is_help=True)


@app.command("sft")
def sft(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="The model to begin with: a model directory or a run.")
    ] = None,
    overrides: Overrides = None,
    config: ConfigFile = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Examples in JSON lines, a JSON list or Parquet; may be repeated."),
    ] = None,
    validation: Annotated[
        list[Path] | None, typer.Option("--validation", help="Held-out examples, instead of a share of --data.")
    ] = None,
    output: RunOutput = None,
    device: Device = None,
    resume: Resume = None,
    overwrite: OverwriteRun = False,
    show: Annotated[
        int | None, typer.Option("--show", min=1, help="Show N examples with what is learnt of them; start no run.")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a model on conversations, or on prompts with their answers.

    Only the answers are learnt. A line of DATA has messages, or prompt and completion; the shapes of ShareGPT, Alpaca,
    Dolly and FLAN are read, too.

    Examples:

      sheepop tune sft models/base --data chats.jsonl --show 3

      sheepop tune sft models/base --data chats.jsonl --output runs/chat

      sheepop tune sft models/base --data chats.jsonl --output runs/chat training.max_epochs=1 tuning.neftune_alpha=5

      sheepop tune sft --resume runs/chat
    """
    if model is not None and "=" in str(model) and not model.exists():  # settings without a model before them
        overrides, model = [str(model), *(overrides or ())], None
    options: dict[str, Any] = {"tuning": {"method": "sft"}}
    if data:
        options["data"] = {"paths": [str(path) for path in data]}
    if validation:
        options["tuning"]["validation_paths"] = [str(path) for path in validation]
    if device is not None:
        options["device"] = device
    if model is None and resume in (None, "auto"):
        raise UsageError("Say which model to begin with: sheepop tune sft MODEL --data FILE")
    if model is not None and resume not in (None, "auto"):
        raise UsageError("--resume continues a run, which has its model; leave out MODEL.")
    if show is not None:
        _show(model, options, overrides or [], config, show, as_json)
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
    model: Path | None, options: dict[str, Any], overrides: list[str], config: Path | None, count: int, as_json: bool
) -> None:
    """Prints the first examples with what is learnt of them marked."""
    from rich.console import Console as RichConsole

    from sheepop.jobs.config import load_config
    from sheepop.jobs.tuning import first_of
    from sheepop.posttrain.preview import plain_preview, preview, preview_tokens

    if model is None:
        raise UsageError("--show needs the model, whose tokenizer and chat template it shows.")
    settings = load_config(config, overrides, options=options)
    terminal, shown = RichConsole(highlight=False, soft_wrap=True), []
    for place, example, tokenizer in first_of(settings, model, count):
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
    if as_json:
        print_json(shown)
