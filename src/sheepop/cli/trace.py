"""``sheepop trace``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sheepop.cli.options import MODEL, Adapter, Device, Dtype, Json, Quiet, make_console, print_json, print_text
from sheepop.core.errors import UsageError
from sheepop.core.facts import counted, visible_line

if TYPE_CHECKING:
    from sheepop.jobs.trace import TraceOutcome

_MOST_SHOWN = 40
_PARTS = 8


def trace(
    model: Annotated[Path, typer.Argument(help=MODEL)],
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The prompt.", show_default=False)] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt, instead of TEXT.", show_default=False)] = None,
    target: Annotated[
        str | None, typer.Option(help="The start of an encoder-decoder's target.", show_default="nothing")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new directory for tensors, pictures and their data.")
    ] = None,
    position: Annotated[int, typer.Option(help="Explain the prediction after this token; -1 is the last.")] = -1,
    token: Annotated[
        str | None, typer.Option(help="Explain the logit of this token.", show_default="the likeliest")
    ] = None,
    against: Annotated[str | None, typer.Option(help="Subtract the logit of this token.", show_default="none")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Show how far this model is from the first.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature in the picture of the next token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Top-k in that picture.", show_default="all")] = None,
    top_p: Annotated[float, typer.Option(help="Top-p in that picture.")] = 1.0,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the directory at --output.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Trace a prompt through the network.

    Shows how each token is predicted, what each layer would predict, which heads and layers contribute most to the
    likeliest next token, and whether the equations of the network hold. --output also writes the tensors, and pictures
    of attention, lens, embeddings, probabilities and attribution with their data.

    Examples:

      sheepop trace runs/quickstart "def main("

      sheepop trace runs/quickstart --prompt "Hello World" --output traces/hello

      sheepop trace runs/quickstart "import os" --position 0 --token " os" --against " sys"
    """
    from sheepop.checkpoint.model_source import resolve_model_directory

    given = text if prompt is None else prompt
    if given is None or (text is not None and prompt is not None):
        raise UsageError("Give one prompt, as TEXT or with --prompt.")
    for place in (model, *([] if compare is None else [compare])):
        resolve_model_directory(place, make_console(quiet or as_json))
    from sheepop.core.config import validate
    from sheepop.generate import GenerationConfig
    from sheepop.jobs.trace import trace_prompt

    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    outcome = trace_prompt(
        model,
        given,
        output,
        target=target,
        position=position,
        token=token,
        rival=against,
        compare=compare,
        config=validate(GenerationConfig, settings),
        adapters=adapter or (),
        device=device or "auto",
        dtype=dtype,
        overwrite=overwrite,
        console=make_console(quiet or as_json),
    )
    if as_json:
        print_json(_as_data(outcome))
        return
    if not quiet:
        for lines in (_tokens(outcome), _layers(outcome), _parts(outcome), _changes(outcome), _checks(outcome)):
            print_text("\n".join([*lines, "", ""]) if lines else "")
    if output is not None:
        make_console(quiet).info(f"Written: {output}")


def _tokens(outcome: TraceOutcome) -> list[str]:
    """A line for each token with its prediction; only the last tokens of a long prompt."""
    trace = outcome.trace
    lines = []
    if trace.source_tokens:
        words = " ".join(repr(visible_line(token.text)) for token in trace.source_tokens[:_MOST_SHOWN])
        more = " ..." if len(trace.source_tokens) > _MOST_SHOWN else ""
        lines = [f"The encoder reads {counted(len(trace.source_tokens), 'token')}: {words}{more}", "The target:"]
    lines.append(f"{'position':>8} {'id':>7} {'probability':>11} {'rank':>6}  token")
    first = max(0, trace.num_tokens - _MOST_SHOWN)
    if first:
        lines.append(f"{'':8} ... {first:,} tokens before these")
    for token in trace.tokens[first:]:
        before = trace.predictions[token.position - 1] if token.position else None
        if before is None or before.logprob is None:
            odds = f"{'':11} {'':6}"
        else:
            odds = f"{math.exp(before.logprob):11.2%} {before.rank:6,}"
        lines.append(f"{token.position:8} {token.id:7} {odds}  {visible_line(token.text)}")
    return lines


def _layers(outcome: TraceOutcome) -> list[str]:
    """The predictions of each layer after the explained position."""
    trace, lens, position = outcome.trace, outcome.lens, outcome.attribution.position
    lines = [f"Predictions of each layer after token {position} (with the divergence from the last layer in nats):"]
    for layer in range(trace.num_layers + 1):
        name = "embedding" if layer == 0 else f"block {layer - 1}"
        rows = zip(lens.ids[layer, position].tolist(), lens.probabilities[layer, position].tolist(), strict=True)
        words = "  ".join(f"{visible_line(trace.text_of(token_id))!r} {p:.1%}" for token_id, p in list(rows)[:3])
        lines.append(f"  {name:>10} {float(lens.divergence[layer, position]):8.3f}  {words}")
    return lines


def _parts(outcome: TraceOutcome) -> list[str]:
    """The parts of the network that contribute most to a logit."""
    found, trace = outcome.attribution, outcome.trace
    against = "" if found.rival is None else f" against {visible_line(trace.text_of(found.rival))!r}"
    ranked = sorted(zip(found.values, found.names, strict=True), key=lambda part: -abs(part[0]))
    word = visible_line(trace.text_of(found.token_id))
    lines = [f"Largest contributions to {word!r}{against}, of {found.total:.2f} nats in {len(ranked)} parts:"]
    return lines + [f"  {value:+8.3f}  {name}" for value, name in ranked[:_PARTS]]


def _changes(outcome: TraceOutcome) -> list[str]:
    """How far the second model is from the first."""
    found = outcome.comparison
    if found is None:
        return []
    lines = ["Distance of the second model's residual stream from the first's, over its length (mean of the tokens):"]
    for layer, distance in enumerate(found.distance.mean(1).tolist()):
        lines.append(f"  {'embedding' if layer == 0 else f'block {layer - 1}':>10} {distance:8.4f}")
    total = counted(len(found.divergence), "position")
    return [
        *lines,
        f"Predictions: {float(found.divergence.mean()):.4f} nats apart; at {len(found.changed)} of {total} another "
        "token is likeliest.",
    ]


def _checks(outcome: TraceOutcome) -> list[str]:
    """Which invariants hold."""
    return [
        f"{'holds' if check.holds else 'BROKEN':>6}  {check.name} (error {check.error:.1e})" for check in outcome.checks
    ]


def _as_data(outcome: TraceOutcome) -> dict[str, Any]:
    found, lens = outcome.attribution, outcome.lens
    return {
        "output": None if outcome.directory is None else str(outcome.directory),
        "tokens": [token.to_dict() for token in outcome.trace.tokens],
        "source_tokens": [token.to_dict() for token in outcome.trace.source_tokens],
        "predictions": [prediction.to_dict() for prediction in outcome.trace.predictions],
        "lens": {
            "token_ids": lens.ids.tolist(),
            "probabilities": lens.probabilities.tolist(),
            "divergence": lens.divergence.tolist(),
        },
        "attribution": {
            "position": found.position,
            "token_id": found.token_id,
            "against": found.rival,
            "total": found.total,
            "parts": dict(zip(found.names, found.values, strict=True)),
        },
        "comparison": None
        if outcome.comparison is None
        else {
            "distance": outcome.comparison.distance.tolist(),
            "divergence": outcome.comparison.divergence.tolist(),
            "changed": outcome.comparison.changed,
        },
        "checks": [check.to_dict() for check in outcome.checks],
    }
