"""``sheepop models``: the published and imported models in the cache."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sheepop.cli.options import Group, Json, Quiet, make_console, print_json
from sheepop.cli.terminal import at_terminal
from sheepop.core.errors import UsageError
from sheepop.core.facts import counted, visible_line

app = typer.Typer(cls=Group, invoke_without_command=True)


@app.callback()
def models(context: typer.Context, as_json: Json = False) -> None:
    """List the models in the cache: published ones, and imported files of other programs.

    A published model is fetched when a command first names it, such as Qwen/Qwen3-0.6B, and stays here. SHEEPOP_MODELS
    names another directory than ~/.cache/sheepop/models.

    Examples:

      sheepop models

      sheepop models pull Qwen/Qwen3-0.6B

      sheepop models rm Qwen/Qwen3-0.6B
    """
    if context.invoked_subcommand is not None:
        if as_json:
            raise UsageError("--json belongs after the command, for example: sheepop models pull NAME --json")
        return
    from sheepop.checkpoint.model_cache import models_directory
    from sheepop.jobs.models import list_models

    found = list_models()
    if as_json:
        print_json(found)
        return
    for model in found:
        _print(model)
    total = sum(model["bytes"] for model in found) / 1e6
    typer.echo(f"{counted(len(found), 'model')}, {total:,.1f} MB in {models_directory()}")


@app.command("pull")
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="OWNER/NAME, with @REVISION or /FILE.gguf if needed.")],
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Fetch the newest version of a published model, ahead of its use.

    Examples:

      sheepop models pull Qwen/Qwen3-0.6B

      sheepop models pull ggml-org/gemma-3-270m-GGUF/gemma-3-270m-Q8_0.gguf
    """
    from sheepop.jobs.models import pull_model

    found = pull_model(name, make_console(quiet))
    if as_json:
        print_json(found)
    elif not quiet:
        _print(found)


@app.command("rm")
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names as listed; @REVISION for one version.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Remove models from the cache.

    Example:  sheepop models rm Qwen/Qwen3-0.6B
    """
    from sheepop.jobs.models import remove_models

    def may_remove(found: list[dict[str, Any]]) -> bool:
        if yes:
            return True
        if not at_terminal():
            raise UsageError("Nobody can be asked here. Add --yes to remove the models.")
        for model in found:
            _print(model)
        return typer.confirm(f"Remove {counted(len(found), 'model')}?", err=True)

    removed = remove_models(names, may_remove)
    if as_json:
        print_json(removed)
    elif not quiet:
        freed = sum(model["bytes"] for model in removed) / 1e6
        typer.echo(f"Removed {counted(len(removed), 'model')}, {freed:,.1f} MB.")


def _print(model: dict[str, Any]) -> None:
    revision = "" if model["revision"] is None else f" at {model['revision'][:12]}"
    used = f"used {model['last_used']}" if model["finished"] else "not finished"
    size = f"{model['bytes'] / 1e6:,.1f} MB" + (f" in {', '.join(model['stored'])}" if model["stored"] else "")
    line = f"{model['name']}{revision}: {size}, {used}, {model['path']}"
    typer.echo(visible_line(line))
