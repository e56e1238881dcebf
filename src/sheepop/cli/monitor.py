"""``sheepop monitor``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sheepop.cli.options import Device, Json, Quiet, make_console, print_json, print_text
from sheepop.core.console import Console
from sheepop.core.errors import UsageError

if TYPE_CHECKING:
    from sheepop.monitor.report import OfModel

_FIRED = 1


def monitor(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="The directory of 'sheepop serve --log'.")],
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the answers of this model.", show_default="all")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="CORPUS|RUN", help="Compare the prompts with the data of a corpus or a run.", show_default="none"
        ),
    ] = None,
    alert: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHARE>BOUND",
            help="Exit with 1 if a share is beyond a bound for certain, such as bad>0.2; repeatable.",
            show_default="none",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page.", show_default="none")] = None,
    review: Annotated[
        bool, typer.Option("--review", help="Serve a page on which you keep, mend or drop each answer.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --review: the port; 0 is a free one.")] = 0,
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
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show how a served model does, and make data of its conversations.

    Examples:

      sheepop monitor logs/quickstart

      sheepop monitor logs/quickstart --against runs/quickstart --html report.html

      sheepop monitor logs/quickstart --alert 'bad>0.2' --alert 'cut>0.5'

      sheepop monitor logs/quickstart --review

      sheepop monitor logs/quickstart --to preferences --output data/votes.jsonl --leave-out data/quiz.jsonl
    """
    console = make_console(quiet)
    if review:
        if to or alert or against or html or output or unvoted or leave_out or overwrite or as_json:
            raise UsageError("--review takes --model and --port alone. Leave the other options out.")
        from sheepop.jobs.review import review as serve_review

        serve_review(log, model=model, port=port, console=console)
    elif to is None:
        if output or unvoted or leave_out or overwrite:
            raise UsageError("--output, --unvoted, --leave-out and --overwrite need --to sft, preferences or eval.")
        _look(log, model, against, alert or [], html, device or "auto", console, as_json=as_json)
    elif output is None:
        raise UsageError("--to needs --output FILE.")
    elif alert or against or html:
        raise UsageError("--to writes rows alone. Leave --alert, --against and --html out.")
    elif unvoted and to != "sft":
        raise UsageError("--unvoted needs --to sft: other rows need votes.")
    else:
        from sheepop.jobs import monitor as job

        written = job.write_rows(
            log, to, output, model=model, unvoted=unvoted, leave_out=leave_out or (), overwrite=overwrite
        )
        if as_json:
            print_json({"output": str(output), "written": written.written, "left_out": written.left_out})
            return
        for reason, count in written.left_out.items():
            console.info(f"Left out {count:,}: {reason}.")
        console.info(f"Wrote {written.written:,} rows to {output}.")


def _look(
    log: Path,
    model: str | None,
    against: Path | None,
    alert: list[str],
    html: Path | None,
    device: str,
    console: Console,
    *,
    as_json: bool,
) -> None:
    """Prints what a log says, and writes it to a page; exits with 1 if an alert fires."""
    from sheepop.jobs import monitor as job
    from sheepop.monitor.figures import DRIFT, Alert
    from sheepop.monitor.report import page_of

    alerts = [Alert.of(text) for text in alert]
    if against is None and any(each.share == DRIFT for each in alerts):
        raise UsageError("--alert drift needs --against CORPUS or RUN.")
    found = job.monitor(log, model=model, alerts=alerts, against=against, device=device)
    if faults := str(found.faults):
        console.warn(f"Lines of the log were left out: {faults}.")
    fired = [f"{name}: {each}" for name, each in found.fired]
    if html is not None:
        page_of(found, str(log), None if against is None else str(against)).write(html)
        console.info(f"Page: {html}")
    if as_json:
        print_json(
            {
                "models": {name: each.to_dict() for name, each in found.models.items()},
                "drift": {name: each.to_dict() for name, each in found.drift.items()},
                "faults": vars(found.faults),
                "fired": fired,
            }
        )
    else:
        for name, each in found.models.items():
            print_text("\n".join([f"{name}: {each.figures.answers:,} answers", *_lines(each), ""]) + "\n")
        for name, drift in found.drift.items():
            words = f", by words such as {', '.join(drift.words)}" if drift.words and drift.is_certain else ""
            print_text(f"  {f'told from the data by {name}':<40}{drift.told}{words}\n")
    if fired:
        console.warn(f"Beyond a bound: {', '.join(fired)}.")
        raise typer.Exit(_FIRED)


def _lines(found: OfModel) -> list[str]:
    """The figures of a model and the kinds of its prompts as lines of text."""
    from sheepop.monitor.figures import SHARES

    figures = found.figures
    lines = [f"  {words:<28}{figures.shares[name] or '-'}" for name, words in SHARES.items()]
    lines += [f"  {name:<28}{middle:,.0f}, 95% below {high:,.0f}" for name, (middle, high) in figures.lengths.items()]
    lines += [f"  {name:<28}{middle:.2f} s, 95% below {high:.2f} s" for name, (middle, high) in figures.times.items()]
    if figures.mean_logprob is not None:
        low, middle = figures.mean_logprob
        lines.append(f"  {'mean log-probability':<28}{middle:.2f}, 95% above {low:.2f}")
    if figures.separation is not None:
        lines.append(f"  {'confidence tells votes':<28}{figures.separation}, where 50% is not at all")
    if figures.calibration is not None:
        lines.append(f"  {'calibration error':<28}{figures.calibration.ece:.3f}")
    for kind in found.kinds:
        if kind.is_worse:
            lines.append(f"  bad more often: {', '.join(kind.words) or kind.examples[0][:60]}: {kind.bad}")
    return lines
