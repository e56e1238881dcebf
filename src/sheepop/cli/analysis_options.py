"""The options that the verbs of ``sheepop analyze`` share, and how they run and print."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from sheepop.cli.options import MODEL, Adapter, Device, Json, Quiet, make_console, print_json, print_text
from sheepop.core.errors import UsageError

if TYPE_CHECKING:
    from sheepop.interpret.control.finding import Finding

Model = Annotated[Path, typer.Argument(help=MODEL)]
Text = Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The prompt.", show_default=False)]
Prompt = Annotated[str | None, typer.Option(help="The prompt, instead of TEXT.", show_default=False)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="A directory for numbers and pictures.")]
Exactness = Annotated[str, typer.Option("--dtype", help="float32 or float64.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the result of this verb at --output.")]
Steps = Annotated[int, typer.Option(min=2, help="The most steps of each search for singular values.")]
Probes = Annotated[int, typer.Option(min=4, help="Random directions for each estimate.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random directions.")]


def at_prompt(app: typer.Typer, verb: str) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
    """Adds a command to `app` whose function analyses a model at a prompt, and leaves the function as it is.

    The function takes the analyses of the model and the prompt, and then what the command has of its own: arguments
    that are paths of further models, which stand behind MODEL, and options. The command also has the options that all
    verbs share.
    """

    def add(function: Callable[..., Finding]) -> Callable[..., Finding]:
        own = list(signature(function).parameters.values())[2:]

        def command(
            model: Model,
            text: Text = None,
            prompt: Prompt = None,
            output: Output = None,
            adapter: Adapter = None,
            device: Device = None,
            dtype: Exactness = "float32",
            overwrite: Overwrite = False,
            quiet: Quiet = False,
            as_json: Json = False,
            **given: Any,
        ) -> None:
            asked = one_prompt(text, prompt)
            from sheepop.checkpoint.model_source import resolve_model_directory

            for place in (model, *(each for each in given.values() if isinstance(each, Path))):
                resolve_model_directory(place, make_console(quiet or as_json))
            from sheepop.jobs.analyze import AnalysisRequest, analyze

            request = AnalysisRequest(model, output, adapter or (), device or "auto", dtype, overwrite)
            found = analyze(request, verb, lambda analyses: function(analyses, asked, **given))
            print_finding(found, output, quiet=quiet, as_json=as_json)

        first, *shared = list(signature(command).parameters.values())[:-1]
        required = [each for each in own if each.default is each.empty]
        options = [each for each in own if each.default is not each.empty]
        hints = get_type_hints(function, localns={"Analyses": Any, "Finding": Any}, include_extras=True)
        hints |= get_type_hints(command, include_extras=True)
        order = [first, *required, *shared[:3], *options, *shared[3:]]
        command.__signature__ = Signature([each.replace(annotation=hints[each.name]) for each in order])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: hints[each.name] for each in order}
        command.__doc__ = function.__doc__
        app.command(verb)(command)
        return function

    return add


def one_prompt(text: str | None, prompt: str | None) -> str:
    """The prompt of a command; raises `UsageError` unless there is one."""
    given = text if prompt is None else prompt
    if given is None or (text is not None and prompt is not None):
        raise UsageError("Give one prompt, as TEXT or with --prompt.")
    return given


def print_finding(found: Finding, output: Path | None, *, quiet: bool, as_json: bool) -> None:
    """Prints the result of an analysis, and says where it was written."""
    if as_json:
        print_json(found.to_dict())
    elif not quiet:
        parts = ["\n".join(lines) for lines in (found.table(), found.sentences(), found.notes) if lines]
        print_text("\n\n".join(parts) + "\n")
    if output is not None:
        make_console(quiet or as_json).info(f"Written: {output}")
