"""``sheepop monitor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sheepop.cli.options import Json, Quiet, make_console, print_json, print_text
from sheepop.core.errors import UsageError

_SHARES = {
    "cut": "cut at the length limit",
    "left": "client left",
    "failed": "failed",
    "empty": "empty",
    "repetitive": "repeat themselves",
    "bad": "bad, of those with votes",
}
_FIRED = 1


def monitor(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="The directory of 'sheepop serve --log'.")],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the answers of this model.", show_default="all")
    ] = None,
    alert: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHARE>BOUND",
            help="Exit with 1 if a share is beyond a bound for certain, such as bad>0.2; repeatable.",
            show_default="none",
        ),
    ] = None,
    to: Annotated[
        Literal["sft", "preferences", "eval"] | None,
        typer.Option(help="Write rows of this kind to --output.", show_default="none"),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="The file for --to.")] = None,
    unvoted: Annotated[
        bool, typer.Option("--unvoted", help="With --to sft: also take answers that nobody voted on.")
    ] = False,
    leave_out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="With --to: leave out rows that share text with this evaluation set (JSONL); repeatable.",
            show_default="none",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show how a served model does, and make data of its conversations.

    Examples:

      sheepop monitor logs/quickstart

      sheepop monitor logs/quickstart --alert 'bad>0.2' --alert 'cut>0.5'

      sheepop monitor logs/quickstart --to sft --output data/liked.jsonl

      sheepop monitor logs/quickstart --to preferences --output data/votes.jsonl --leave-out data/quiz.jsonl
    """
    from sheepop.jobs import monitor as job
    from sheepop.monitor.figures import Alert

    alerts = [Alert.of(text, _SHARES) for text in alert or ()]
    console = make_console(quiet)
    if to is None:
        if output or unvoted or leave_out or overwrite:
            raise UsageError("--output, --unvoted, --leave-out and --overwrite need --to sft, preferences or eval.")
        found = job.monitor(log, model=model, alerts=alerts)
        if faults := str(found.faults):
            console.warn(f"Lines of the log were left out: {faults}.")
        fired = [f"{name}: {each}" for name, each in found.fired]
        if as_json:
            models = {name: each.to_dict() for name, each in found.models.items()}
            print_json({"models": models, "faults": vars(found.faults), "fired": fired})
        else:
            for name, each in found.models.items():
                print_text("\n".join([f"{name}: {each.answers:,} answers", *_lines(each), ""]) + "\n")
        if fired:
            console.warn(f"Beyond a bound: {', '.join(fired)}.")
            raise typer.Exit(_FIRED)
        return
    if output is None:
        raise UsageError("--to needs --output FILE.")
    if alerts:
        raise UsageError("--alert and --to cannot be combined. Leave one of them out.")
    if unvoted and to != "sft":
        raise UsageError("--unvoted needs --to sft: other rows need votes.")
    written = job.write_rows(
        log, to, output, model=model, unvoted=unvoted, leave_out=leave_out or (), overwrite=overwrite
    )
    if as_json:
        print_json({"output": str(output), "written": written.written, "left_out": written.left_out})
        return
    for reason, count in written.left_out.items():
        console.info(f"Left out {count:,}: {reason}.")
    console.info(f"Wrote {written.written:,} rows to {output}.")


def _lines(found: object) -> list[str]:
    """The figures of a model as lines of text."""
    from sheepop.monitor.figures import Figures

    assert isinstance(found, Figures)
    lines = [f"  {_SHARES[name]:<28}{'-' if share is None else share}" for name, share in found.shares.items()]
    lines += [f"  {name:<28}{middle:,.0f}, 95% below {high:,.0f}" for name, (middle, high) in found.lengths.items()]
    lines += [f"  {name:<28}{middle:.2f} s, 95% below {high:.2f} s" for name, (middle, high) in found.times.items()]
    if found.mean_logprob is not None:
        low, middle = found.mean_logprob
        lines.append(f"  {'mean log-probability':<28}{middle:.2f}, 95% above {low:.2f}")
    if found.separation is not None:
        lines.append(f"  {'confidence tells votes':<28}{found.separation:.0%} (50%: not at all)")
    return lines
