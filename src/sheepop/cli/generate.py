"""``sheepop generate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from sheepop.cli.options import Device, Dtype, Json, Quiet, make_console, print_json, print_text
from sheepop.core.errors import UsageError


def generate(
    model: Annotated[Path, typer.Argument(help="A run, checkpoint or model directory.")],
    standard_input: Annotated[
        str | None, typer.Argument(metavar="[-]", help="A dash reads the prompt from standard input.")
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to continue, or an encoder-decoder's source; may be repeated."),
    ] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="A file whose text is a prompt; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="The most tokens to write.", show_default="generation.max_new_tokens")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token (temperature 0).")] = False,
    temperature: Annotated[
        float | None,
        typer.Option(help="Above 1 is wilder, below 1 tamer, 0 is greedy.", show_default="generation.temperature"),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K likeliest tokens.", show_default="all")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the likeliest tokens whose probabilities add up to P.", show_default="generation.top_p"
        ),
    ] = None,
    beams: Annotated[
        int | None,
        typer.Option(
            help="Search for the likeliest text, following this many at a time.", show_default="generation.num_beams"
        ),
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            help="How much --beams favours long texts; 0 compares probabilities.",
            show_default="generation.length_penalty",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1 discourages tokens already seen.", show_default="generation.repetition_penalty"),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End before this text ($'\\n' is a line end); may be repeated."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.", show_default="random")] = None,
    window: Annotated[bool, typer.Option("--window", help="Drop the oldest tokens when the context is full.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Recompute everything for each token.")] = False,
    apart: Annotated[bool, typer.Option("--apart", help="Run several prompts one by one, not as a batch.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue text with a trained model; an encoder-decoder writes the target of a source.

    Examples:

      sheepop generate runs/quickstart --prompt "def main("

      echo "Once upon a time" | sheepop generate runs/notes - --temperature 0.7 --seed 1

      sheepop generate runs/notes -p "One" -p "Two" --greedy --json

      sheepop generate runs/pairs -p "reverse abc" --beams 4
    """
    from sheepop.checkpoint.run_directory import resolve_model_directory
    from sheepop.generate.config import requested

    if standard_input not in (None, "-"):
        raise UsageError(
            f"{standard_input!r} is not understood. Give a prompt with --prompt TEXT, --file FILE, or - to read one "
            "from standard input."
        )
    prompts = _read_prompts(prompt or [], file or [], sys.stdin.buffer if standard_input == "-" else None)
    config = requested(
        max_new_tokens=max_new_tokens,
        greedy=greedy,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        beams=beams,
        length_penalty=length_penalty,
        repetition_penalty=repetition_penalty,
        stop=stop,
        seed=seed,
        window=window,
        cache=not no_cache,
    )
    streaming = len(prompts) == 1 and not as_json

    def show(index: int, text: str) -> None:
        print_text(text)

    resolve_model_directory(model)
    from sheepop.jobs.generate import generate_text  # loads torch, which nothing above needs

    completions = generate_text(
        model,
        prompts,
        config,
        device=device or "auto",
        dtype=dtype,
        batched=not apart,
        on_text=show if streaming else None,
        echo=not quiet,
    )
    if as_json:
        print_json([asdict(completion) for completion in completions])
    elif streaming:
        print_text("\n")
    else:
        for number, completion in enumerate(completions, start=1):
            between = "" if completion.continues_prompt else "\n"
            head = "" if quiet else f"--- {number} ---\n{completion.prompt}{between}"
            print_text(f"{head}{completion.text}\n")
    for completion in completions:
        if completion.finish_reason == "length" and len(completion.token_ids) < config.max_new_tokens:
            remedy = "; use --window to continue without the oldest tokens" if completion.continues_prompt else ""
            make_console(quiet).info(f"The model's context is full{remedy}.")
            break


def _read_prompts(texts: Sequence[str], files: Sequence[Path], standard_input: BinaryIO | None) -> list[str]:
    """All prompts of a command: arguments, then files, then standard input when it is given.

    One line end at the end of a file or of standard input is not part of the prompt; line ends in it stay as they are.
    """
    prompts = list(texts)
    for file in files:
        try:
            prompts.append(_without_last_newline(file.read_bytes()))
        except FileNotFoundError:
            raise UsageError(f"The prompt file {file} does not exist.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"The prompt file {file} cannot be read as UTF-8 text: {error}.") from None
    if standard_input is not None:
        try:
            prompts.append(_without_last_newline(standard_input.read()))
        except UnicodeDecodeError as error:
            raise UsageError(f"Standard input is not UTF-8 text: {error}.") from None
    if not prompts:
        raise UsageError("There is no prompt. Give one with --prompt TEXT, --file FILE, or - for standard input.")
    return prompts


def _without_last_newline(content: bytes) -> str:
    return content.decode("utf-8").removesuffix("\n").removesuffix("\r")
