"""Options that several commands share, and how commands print."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.core.facts import visible
from sheepop.core.files import finite

MODEL = "A run, checkpoint or model directory; a GGUF file; or a published model, such as Qwen/Qwen3-0.6B."
"""The help of MODEL arguments."""
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or mps.", show_default="auto")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.", show_default="as stored")]
Activations = Annotated[
    Literal["exact", "rounded"] | None,
    typer.Option(help="rounded rounds the inputs of products on a CPU: faster, less exact.", show_default="exact"),
]
Adapter = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR|NAME",
        help="Add an adapter (PEFT, a published one, or a model with one); repeatable.",
        show_default="none",
    ),
]
TemplateVariables = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs", metavar="JSON", help="Variables for the chat template.", show_default="none"
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        help="Tokens of a window; a longer text is read in several.",
        show_default="2048, or the model's context if that is shorter",
    ),
]
TaskContext = Annotated[
    int | None,
    typer.Option(
        "--context",
        min=1,
        help="Tokens that the model reads at a time in tasks of lm-eval.",
        show_default="the model's context",
    ),
]
JudgeOfRequests = Annotated[
    str | None,
    typer.Option(
        "--by",
        metavar="URL|MODEL",
        help="The judge of answers to requests: a server's address, or a chat model.",
        show_default="none",
    ),
]
JudgeModel = Annotated[
    str | None, typer.Option("--judge-model", help="The model of the judge's server.", show_default="its first")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A YAML or JSON config file.")]
RunOutput = Annotated[
    Path | None, typer.Option("--output", "-o", help="The run directory.", show_default="runs/<date>")
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume", metavar="auto|PATH", help="Resume the run at PATH; auto: resume the run at --output, or start it."
    ),
]
Exportable = Annotated[
    bool, typer.Option("--exportable", help="Choose a model that other programs run, too (llama.cpp, transformers).")
]
OverwriteRun = Annotated[bool, typer.Option("--overwrite", help="Replace the run at --output.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings, for example training.learning_rate=0.001", metavar="[KEY=VALUE]..."),
]


# The placeholder for the value of an option in the help, by the type of the value.
_METAVARS = {"bool": "", "str": "TEXT", "int": "N", "float": "X", "path": "PATH"}


def _with_metavars(params: list[Any], ctx: Any) -> list[Any]:
    """Names the values of options for which newer versions of Typer would show the Python type."""
    for param in params:
        if param.param_type_name == "option" and param.metavar is None and hasattr(param, "display_type"):
            words = re.findall(r"\w+", (param.display_type(ctx) or "").lower())
            param.metavar = next((_METAVARS[word] for word in words if word in _METAVARS), None)
    return params


class Command(TyperCommand):
    """A command whose help shows nothing for the value of a flag, and ``PATH``, ``N`` or the like for other options."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, with named values."""
        return _with_metavars(super().get_params(ctx), ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the arguments; pydantic's name for its error, which Typer prints, is left out."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


class Group(TyperGroup):
    """Like `Command`, for a group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, with named values."""
        return _with_metavars(super().get_params(ctx), ctx)


class ConfiguredCommand(Command):
    """A command whose options set keys of the configuration.

    Such an option has its key as ``show_default``; the help shows the default of the key unless it is null.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help. The types of the arguments are click's, which newer versions of Typer bundle."""
        from sheepop.jobs.config_help import default_of

        params: list[Any] = self.params
        keys = {each: each.show_default for each in params if "." in str(getattr(each, "show_default", None))}
        for parameter, key in keys.items():
            default = default_of(key)
            parameter.show_default = False if default == "null" else default
        super().format_help(ctx, formatter)
        for parameter, key in keys.items():
            parameter.show_default = key


def make_console(quiet: bool) -> Console:
    """The console of a command."""
    return Console(quiet=quiet)


def typed_command() -> str:
    """The command line of this process, quoted for a shell."""
    return shlex.join(["sheepop", *sys.argv[1:]])


def print_json(value: Any) -> None:
    """Prints a JSON document on standard output; numbers that are not finite become null."""
    typer.echo(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def print_text(text: str) -> None:
    """Prints generated text at once: unchanged into a file or pipe, with visible control characters on a terminal."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def template_variables(text: str | None, *, is_read: bool = True) -> dict[str, Any] | None:
    """The object that ``--chat-template-kwargs`` gives as JSON; raises `ConfigError` if it is none.

    Raises `UsageError` if it is given and not `is_read`, because the chat template is not used.
    """
    from sheepop.core.config import parse_config

    if text is not None and not is_read:
        raise UsageError("--chat-template-kwargs needs --chat, which uses the chat template.")
    return None if text is None else parse_config(text, where="--chat-template-kwargs", is_json=True)
