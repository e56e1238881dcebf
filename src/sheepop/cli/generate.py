"""``sheepop generate``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sheepop.cli.options import Device, Dtype, Json, Quiet, make_console, print_json
from sheepop.core.errors import UsageError


def generate(
    model: Annotated[Path, typer.Argument(help="A run, checkpoint or model directory.")],
    standard_input: Annotated[
        str | None, typer.Argument(metavar="[-]", help="A dash reads the prompt from standard input.")
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Text to continue; may be repeated.")
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="A file whose text is a prompt; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to write.")] = 256,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token (temperature 0).")] = False,
    temperature: Annotated[float, typer.Option(help="Above 1 is wilder, below 1 tamer, 0 is greedy.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K likeliest tokens.", show_default="all")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that together reach P.")] = 0.95,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 discourages tokens already seen.")] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End before this text ($'\\n' is a line end); may be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat a text exactly.", show_default="random")] = None,
    window: Annotated[bool, typer.Option("--window", help="Drop the oldest tokens when the context is full.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Recompute everything for each token.")] = False,
    apart: Annotated[bool, typer.Option("--apart", help="Run several prompts one by one, not as a batch.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue text with a trained model.

    Examples:

      sheepop generate runs/quickstart --prompt "def main("

      echo "Once upon a time" | sheepop generate runs/notes - --temperature 0.7 --seed 1

      sheepop generate runs/notes -p "One" -p "Two" --greedy --json
    """
    from sheepop.core.config import validate
    from sheepop.generate import GenerationConfig
    from sheepop.jobs.generate import generate_text, read_prompts

    if standard_input not in (None, "-"):
        raise UsageError(
            f"{standard_input!r} is not understood. Give a prompt with --prompt TEXT, --file FILE, or - to read one "
            "from standard input."
        )
    prompts = read_prompts(prompt or [], file or [], sys.stdin if standard_input == "-" else None)
    config = validate(
        GenerationConfig,
        {
            "max_new_tokens": max_new_tokens,
            "temperature": 0.0 if greedy else temperature,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
            "stop": stop or (),
            "seed": seed,
            "use_cache": not no_cache,
            "on_overflow": "window" if window else "refuse",
        },
    )
    streaming = len(prompts) == 1 and not as_json
    # Printed with the first piece of text, so that a refused request prints nothing on standard output.
    ahead = [] if quiet else [prompts[0]]

    def show(index: int, text: str) -> None:
        sys.stdout.write("".join(ahead) + text)
        sys.stdout.flush()
        ahead.clear()

    completions = generate_text(
        model,
        prompts,
        config,
        device=device or "auto",
        dtype=dtype,
        batched=not apart,
        on_text=show if streaming else None,
    )
    if as_json:
        print_json([asdict(completion) for completion in completions])
    elif streaming:
        typer.echo("".join(ahead))
    else:
        for number, completion in enumerate(completions, start=1):
            head = "" if quiet else f"--- {number} ---\n{completion.prompt}"
            typer.echo(f"{head}{completion.text}")
    if any(c.finish_reason == "length" and len(c.token_ids) < max_new_tokens for c in completions):
        make_console(quiet).info("The model's context is full; --window writes on without its oldest tokens.")
