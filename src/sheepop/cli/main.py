"""The ``sheepop`` program: its commands, and how an error becomes one paragraph and an exit code."""

from __future__ import annotations

import errno
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Annotated, Any, TextIO, cast

import typer
from typer.core import TyperCommand

import sheepop
from sheepop.cli import (
    analyze_loops,
    bench,
    chat,
    config,
    data,
    doctor,
    evaluate,
    exchange,
    generate,
    launch,
    models,
    monitor,
    plan,
    quantize,
    quickstart,
    runs,
    scale,
    score,
    serve,
    tokenizer,
    trace,
    train,
    tune,
    ui,
)
from sheepop.cli.options import Command, ConfiguredCommand, Group
from sheepop.core.console import MessageStream, ResultStream
from sheepop.core.errors import ENDING_SIGNALS, ENDINGS, EndedWithOthers, SheepOpError, UsageError
from sheepop.core.facts import visible
from sheepop.core.plugins import commands, load_plugins

_SHOWN_CHARACTERS = 100
_REPEATED_SECONDS = 1.0
_COMMANDS_OF_PLUGINS: dict[str, Callable[..., None]] = {}

app = typer.Typer(
    name="sheepop",
    cls=Group,
    help="Train, tune, measure and serve language models: from a folder of files to a model that writes.",
    epilog="Start with: sheepop quickstart   |   With any command: --debug shows the traceback of an error, "
    "--plugin FILE first runs a Python file of yours.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_PANELS = ("Make", "Use", "Measure", "Look inside", "Move and store", "Settings and machine")
_MAKE, _USE, _MEASURE, _LOOK, _MOVE, _SET_UP = (dict[str, Any](rich_help_panel=title) for title in _PANELS)
app.command("quickstart", **_MAKE)(quickstart.quickstart)
app.command("plan", **_MAKE)(plan.plan)
app.command("train", **_MAKE)(train.train)
app.command("launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, **_MAKE)(
    launch.launch
)
app.add_typer(tune.app, name="tune", **_MAKE)
app.command("scale", **_MAKE)(scale.scale)
app.add_typer(data.app, name="data", **_MAKE)
app.add_typer(tokenizer.app, name="tokenizer", **_MAKE)
app.command("generate", cls=ConfiguredCommand, **_USE)(generate.generate)
app.command("chat", cls=ConfiguredCommand, **_USE)(chat.chat)
app.command("serve", cls=ConfiguredCommand, **_USE)(serve.serve)
app.command("score", **_MEASURE)(score.score)
app.add_typer(evaluate.app, name="eval", **_MEASURE)
app.command("bench", **_MEASURE)(bench.bench)
app.command("monitor", **_MEASURE)(monitor.monitor)
app.command("ui", cls=ConfiguredCommand, **_LOOK)(ui.ui)
app.command("trace", **_LOOK)(trace.trace)
app.add_typer(analyze_loops.app, name="analyze", **_LOOK)
app.command("runs", **_LOOK)(runs.runs)
app.command("import", **_MOVE)(exchange.import_model)
app.command("export", **_MOVE)(exchange.export_model)
app.command("push", **_MOVE)(exchange.push)
app.command("quantize", **_MOVE)(quantize.quantize)
app.add_typer(models.app, name="models", **_MOVE)
app.command("config", **_SET_UP)(config.config)
app.command("doctor", **_SET_UP)(doctor.doctor)

for group in (app, *(nested.typer_instance for nested in app.registered_groups)):
    for registered in group.registered_commands if group is not None else ():
        if not issubclass(registered.cls or TyperCommand, Command):
            registered.cls = Command


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sheepop {sheepop.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@cache
def _program() -> Any:
    """All commands with their parameters, which take longer to find out than many a command takes."""
    return typer.main.get_command(app)


def main() -> None:
    """Runs the command line of this process; the entry point of the installed program."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    try:
        with _terminating_cleanly(), _watching_output():
            arguments = _without_plugins([argument for argument in arguments if argument != "--debug"])
            _program()(args=arguments, prog_name="sheepop")
    except SystemExit as end:
        # Typer turns Ctrl-C into this exit without a message.
        if isinstance(end.code, int) and end.code in ENDINGS and not isinstance(end, EndedWithOthers):
            _report(ENDINGS[end.code], end.code)
        raise
    except SheepOpError as error:
        if debug:
            raise
        sys.exit(_report(str(error), error.exit_code))
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
        sys.exit(_report(ENDINGS[code], code))
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            # Any path of a command may be too long; its first use fails.
            sys.exit(_report(f"The name {_cut(str(error.filename))} is too long. Give a shorter one.", 2))
        fault = (
            f"Unexpected {type(error).__name__}: {error}\nRun the command again with --debug to see where it came from."
        )
        sys.exit(_report(fault, 1))


def _without_plugins(arguments: list[str]) -> list[str]:
    """Runs the file of every ``--plugin FILE`` and returns the other arguments."""
    left, paths, rest = [], [], iter(arguments)
    for argument in rest:
        name, has_value, value = argument.partition("=")
        if argument == "--":
            left += [argument, *rest]
        elif name != "--plugin":
            left.append(argument)
        elif not has_value and (value := next(rest, "")) == "":
            raise UsageError("--plugin needs a Python file.")
        else:
            paths.append(value)
    load_plugins(paths)
    _add_commands()
    return left


def _add_commands() -> None:
    """Adds the commands that plugins have registered."""
    known = {each.name for each in app.registered_commands} | {each.name for each in app.registered_groups}
    for name, function in commands.items():
        if _COMMANDS_OF_PLUGINS.get(name) is function:
            continue
        if name in known:
            raise UsageError(f"A plugin registers the command {name!r}, which already exists. Give it another name.")
        _COMMANDS_OF_PLUGINS[name] = function
        app.command(name, cls=Command)(function)
        _program.cache_clear()


@contextmanager
def _terminating_cleanly() -> Iterator[None]:
    """Raises an exception in the block for a signal that ends the command, so that partial directories are removed.

    Another signal within a second, as of a key that is pressed twice, does nothing: the command is ending already.
    Ctrl-C is one of the signals: if a KeyboardInterrupt passes through an `exec`, which libraries call while they load,
    Python finally kills itself with the signal, whatever the exit code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    ended = -math.inf

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended
        if time.monotonic() - ended >= _REPEATED_SECONDS:
            ended = time.monotonic()
            raise SystemExit(128 + number)

    # A signal that the process was started to ignore stays ignored.
    caught = [number for number in ENDING_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, end) for number in caught}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _watching_output() -> Iterator[None]:
    """Within the block, a failed write to standard output ends the command as described in `ResultStream`."""
    standard = sys.stdout
    sys.stdout = cast(TextIO, ResultStream(standard))
    try:
        yield
    finally:
        sys.stdout = standard


def _cut(name: str) -> str:
    return name if len(name) <= _SHOWN_CHARACTERS else f"{name[:_SHOWN_CHARACTERS]}... ({len(name)} characters)"


def _report(message: str, exit_code: int) -> int:
    prefix = "" if exit_code in ENDINGS else "Error: "
    sys.stdout.flush()
    print(visible(f"{prefix}{message}"), file=cast(TextIO, MessageStream(sys.stderr)))
    return exit_code
