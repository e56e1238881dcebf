"""``sheepop generate``."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from sheepop.cli import generation_options as option
from sheepop.cli.options import MODEL, Adapter, Device, Dtype, Json, Quiet, make_console, print_json, print_text
from sheepop.cli.terminal import at_terminal, for_each_line
from sheepop.core.console import Console
from sheepop.core.errors import SheepOpError, UsageError
from sheepop.core.facts import counted

if TYPE_CHECKING:
    from sheepop.generate import Completion, GenerationConfig


def generate(
    model: Annotated[Path, typer.Argument(help=MODEL)],
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT|-", help="The prompt; a dash reads it from standard input.", show_default=False),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to continue, or an encoder-decoder's source; repeatable."),
    ] = None,
    file: Annotated[list[Path] | None, typer.Option("--file", "-f", help="A file with a prompt; repeatable.")] = None,
    max_new_tokens: option.MaxNewTokens = None,
    min_new_tokens: option.MinNewTokens = None,
    stop: option.Stop = None,
    window: option.Window = False,
    greedy: option.Greedy = False,
    temperature: option.Temperature = None,
    top_k: option.TopK = None,
    top_p: option.TopP = None,
    min_p: option.MinP = None,
    typical_p: option.TypicalP = None,
    repetition_penalty: option.RepetitionPenalty = None,
    presence_penalty: option.PresencePenalty = None,
    frequency_penalty: option.FrequencyPenalty = None,
    seed: option.Seed = None,
    num_completions: option.NumCompletions = None,
    best_of: option.BestOf = None,
    beams: option.Beams = None,
    length_penalty: option.LengthPenalty = None,
    top_logprobs: option.TopLogprobs = None,
    json_schema: option.JsonSchema = None,
    regex: option.Regex = None,
    choice: option.Choice = None,
    grammar: option.Grammar = None,
    guesses: option.Guesses = None,
    draft_model: option.DraftModel = None,
    no_memory: option.NoMemory = False,
    max_batch_size: option.MaxBatchSize = None,
    cache_dtype: option.CacheDtype = None,
    activations: option.Activations = None,
    batch_invariant: option.BatchInvariant = False,
    tensor_parallel: option.TensorParallel = 1,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue text with a trained model; an encoder-decoder generates the target of a source.

    Without a prompt on a terminal, it asks for prompts until Ctrl-D.

    Examples:

      sheepop generate runs/quickstart "def main("

      sheepop generate runs/quickstart

      echo "Once upon a time" | sheepop generate runs/notes - --temperature 0.7 --seed 1

      sheepop generate runs/notes -p "One" -p "Two" --greedy --json

      sheepop generate runs/notes "The answer is" --choice yes --choice no

      sheepop generate runs/pairs "reverse abc" --beams 4

      sheepop generate models/smollm "Dear" --adapter adapters/polite
    """
    from sheepop.checkpoint.model_source import resolve_model_directory
    from sheepop.generate.config import requested

    standard_input = sys.stdin.buffer if text == "-" else None
    prompts = _read_prompts(
        [*([] if text in (None, "-") else [str(text)]), *(prompt or [])], file or [], standard_input
    )
    if not prompts and not at_terminal():
        raise UsageError("There is no prompt. Give one as TEXT, --prompt TEXT, --file FILE, or - for standard input.")
    config = requested(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop=stop,
        window=window,
        greedy=greedy,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        num_completions=num_completions,
        best_of=best_of,
        beams=beams,
        length_penalty=length_penalty,
        top_logprobs=top_logprobs,
        json_schema=None if json_schema is None else option.read_schema(json_schema),
        regex=regex,
        choice=choice or None,
        grammar=None if grammar is None else option.read_text(grammar, "grammar file"),
        guesses=guesses,
        memory=not no_memory,
        max_batch_size=max_batch_size,
        cache_dtype=cache_dtype,
        activations=activations,
        batch_invariant=batch_invariant,
    )
    if top_logprobs is not None and not as_json:
        raise UsageError("Only --json shows the result of --top-logprobs. Add --json, or leave it out.")
    if draft_model is not None and not guesses:
        raise UsageError("--draft-model needs the number of guesses. Add --guesses 4, for example.")
    console = make_console(quiet)
    for place in (model, *([] if draft_model is None else [draft_model])):
        resolve_model_directory(place, console)
    from sheepop.generate import NotFiniteError
    from sheepop.jobs.generate import load_generator, write_texts  # loads torch, which nothing above needs

    generator = load_generator(
        model,
        device=device or "auto",
        dtype=dtype,
        draft_model=draft_model,
        adapters=adapter or (),
        tensor_parallel=tensor_parallel,
    )

    option.show_defaults(generator.defaults, console)
    config = config.over(generator.defaults)

    def write(requested: Sequence[str], *, echo: bool) -> None:
        streams = len(requested) == 1 and config.num_completions == 1 and config.best_of is None and not as_json
        on_text = print_text if streams else None
        begin = time.perf_counter()
        written: Sequence[Completion | None]
        failure: NotFiniteError | None = None
        try:
            written = write_texts(generator, requested, config, on_text=on_text, echo=echo)
        except NotFiniteError as error:
            if not any(error.completions):
                raise
            failure, written = error, error.completions
        seconds = time.perf_counter() - begin
        finished = [completion for completion in written if completion is not None]
        if as_json:
            print_json([completion and asdict(completion) for completion in written])
        elif streams:
            print_text("\n")
        else:
            _show_apart(written, with_prompts=echo)
        count = sum(len(completion.token_ids) for completion in finished)
        console.info(f"{counted(count, 'token')} in {seconds:.1f} s: {count / seconds:.1f} tokens a second.")
        _tell_if_context_is_full(finished, config, console)
        if failure is not None:
            raise failure

    if prompts:
        write(prompts, echo=not quiet)
    else:
        console.info("Type a text to continue. Ctrl-C stops the generation, Ctrl-D ends the program.")
        for_each_line(_warning(lambda line: write([line], echo=False), console))


def _warning(write: Callable[[str], None], console: Console) -> Callable[[str], None]:
    """Wraps `write` so that a refused prompt prints a warning and does not end the program."""

    def write_or_warn(line: str) -> None:
        try:
            write(line)
        except SheepOpError as error:
            console.warn(str(error))

    return write_or_warn


def _show_apart(completions: Sequence[Completion | None], *, with_prompts: bool) -> None:
    """Prints several texts, each below its number and optionally after its prompt; None is a text that is lost."""
    for number, completion in enumerate(completions, start=1):
        if completion is None:
            continue
        between = "" if completion.continues_prompt else "\n"
        prompt = f"{completion.prompt}{between}" if with_prompts else ""
        head = f"--- {number} ---\n" if with_prompts or len(completions) > 1 else ""
        print_text(f"{head}{prompt}{completion.text}\n")


def _tell_if_context_is_full(completions: Sequence[Completion], config: GenerationConfig, console: Console) -> None:
    for completion in completions:
        if completion.finish_reason == "length" and len(completion.token_ids) < config.max_new_tokens:
            remedy = "; use --window to continue without the oldest tokens" if completion.continues_prompt else ""
            console.info(f"The model's context is full{remedy}.")
            return


def _read_prompts(texts: Sequence[str], files: Sequence[Path], standard_input: BinaryIO | None) -> list[str]:
    """All prompts of a command: arguments, then files, then standard input if given.

    One line end at the end of a file or of standard input is not part of the prompt; the others stay as they are.
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
    return prompts


def _without_last_newline(content: bytes) -> str:
    return content.decode("utf-8").removesuffix("\n").removesuffix("\r")
