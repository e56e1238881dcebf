"""Traces a prompt through a model: tensors, checks, pictures and their data in one directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sheepop.core.console import Console
from sheepop.core.errors import OutputError, UsageError
from sheepop.core.facts import counted
from sheepop.core.files import atomic_directory, write_checksums, write_json
from sheepop.generate import GenerationConfig
from sheepop.interpret.checks import Check, check_trace
from sheepop.interpret.lens import Lens, TraceComparison, compare_traces, logit_lens
from sheepop.interpret.parts import Attribution, direct_attribution
from sheepop.interpret.pictures import (
    Picture,
    attention_pictures,
    attribution_picture,
    comparison_picture,
    embedding_picture,
    lens_picture,
    next_token_picture,
    norms_picture,
)
from sheepop.interpret.store import write_trace
from sheepop.interpret.trace import Trace, attentions_of
from sheepop.jobs.generate import load_adapted
from sheepop.report import save_png, save_svg
from sheepop.tokenizer import Tokenizer

# Attention maps of more tokens would have less than a point of paper per token.
_MOST_DRAWN = 512


@dataclass(frozen=True)
class TraceOutcome:
    """A trace, its checks and the analyses made from it."""

    directory: Path | None
    trace: Trace
    checks: list[Check]
    lens: Lens
    attribution: Attribution
    comparison: TraceComparison | None = None


def trace_prompt(
    model: str | Path,
    prompt: str,
    output: Path | None = None,
    *,
    target: str | None = None,
    position: int = -1,
    token: str | None = None,
    rival: str | None = None,
    compare: str | Path | None = None,
    config: GenerationConfig | None = None,
    adapters: Sequence[str | Path] = (),
    device: str = "auto",
    dtype: str | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> TraceOutcome:
    """Traces `prompt` through a model and, with an `output`, writes the results into that directory.

    An encoder-decoder reads the prompt as its source; `target` is the start of its target.

    The prediction after `position` is attributed to the parts of the network: the logit of `token` (None: the
    likeliest) minus that of `rival`, if given. `compare` is a second model, for example one tuned from the first.
    Raises `OutputError` if `output` exists, and `UsageError` for a position outside the text and for a `token` or
    `rival` that is not a single token.
    """
    if output is not None and output.exists() and not overwrite:
        raise OutputError(f"{output} already exists. Choose another name, or replace it with --overwrite.")
    console = console or Console.silent()
    loaded = load_adapted(model, adapters, device=device, dtype=dtype)
    trace = Trace.of(loaded.model, loaded.tokenizer, prompt, target)
    text = "prompt" if trace.source is None else "target"
    if not -trace.num_tokens <= position < trace.num_tokens:
        raise UsageError(
            f"--position {position} is outside the {text}, which has {counted(trace.num_tokens, 'token')}."
        )
    position %= trace.num_tokens
    wanted = trace.predictions[position].top[0][0] if token is None else _single(loaded.tokenizer, token)
    attribution = direct_attribution(
        trace, position, wanted, None if rival is None else _single(loaded.tokenizer, rival)
    )
    comparison = None
    if compare is not None:
        other = load_adapted(compare, device=device, dtype=dtype)
        comparison = compare_traces(trace, Trace.of(other.model, other.tokenizer, prompt, target))
    outcome = TraceOutcome(output, trace, check_trace(trace), logit_lens(trace), attribution, comparison)
    if output is not None:
        _write(outcome, output, str(loaded.directory), config or GenerationConfig(), overwrite, console)
    return outcome


def _single(tokenizer: Tokenizer, text: str) -> int:
    """The id of a text that is a single token; raises `UsageError` for any other text."""
    ids = tokenizer.encode(text, allow_special=True)
    if len(ids) != 1:
        raise UsageError(f"{text!r} is {len(ids)} tokens of this model, not one. A leading space may be missing.")
    return ids[0]


def _write(
    outcome: TraceOutcome, output: Path, model: str, config: GenerationConfig, overwrite: bool, console: Console
) -> None:
    trace = outcome.trace
    pictures: list[Picture] = [
        lens_picture(trace, outcome.lens),
        norms_picture(trace),
        embedding_picture(trace),
        next_token_picture(trace, outcome.attribution.position, config),
        attribution_picture(trace, outcome.attribution),
    ]
    if outcome.comparison is not None:
        pictures.append(comparison_picture(trace, outcome.comparison))
    with atomic_directory(output, replace=overwrite) as directory:
        write_trace(trace, directory, outcome.checks, model)
        drawn = sum(len(attentions_of(block)) for stream in trace.streams for block in stream.blocks)
        count = len(pictures) + drawn
        with console.progress("Pictures", count, "pictures") as progress:
            for picture in pictures:
                _save(picture, directory)
                progress.advance()
            if max(stream.num_tokens for stream in trace.streams) > _MOST_DRAWN:
                console.warn(f"Attention maps of more than {_MOST_DRAWN} tokens are not drawn.")
            else:
                for picture in attention_pictures(trace):
                    _save(picture, directory)
                    progress.advance()
        write_checksums(directory)


def _save(picture: Picture, directory: Path) -> None:
    save_png(picture.figure, directory / f"{picture.name}.png")
    save_svg(picture.figure, directory / f"{picture.name}.svg")
    write_json(directory / f"{picture.name}.json", picture.data)
