"""``sheepop serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sheepop.checkpoint.model_source import absolute_source
from sheepop.cli.options import (
    MODEL,
    Activations,
    ConfigFile,
    Device,
    Dtype,
    Quiet,
    TemplateVariables,
    make_console,
    template_variables,
)
from sheepop.core.errors import UsageError


def serve(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help=f"{MODEL} NAME=MODEL names it.")],
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DIR",
            help="Also serve the first MODEL with this adapter, as NAME; repeatable.",
            show_default="none",
        ),
    ] = None,
    adapter_directory: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Let clients load and drop adapters in DIR.", show_default="server.adapter_directory"
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL", help="Another name of the model called MODEL; repeatable.", show_default="none"
        ),
    ] = None,
    memory_budget: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Memory for all models together.", show_default="server.memory_budget"),
    ] = None,
    cache_dtype: Annotated[
        Literal["auto", "int8", "fp8"] | None,
        typer.Option(help="int8 and fp8 cache keys and values in 8 bits.", show_default="server.cache_dtype"),
    ] = None,
    activations: Activations = None,
    keep_alive: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="How long an idle model stays loaded, such as 5m.", show_default="server.keep_alive"
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on.", show_default="server.host")] = None,
    port: Annotated[int | None, typer.Option(help="The port to listen on.", show_default="server.port")] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(help="A JSON file of the API keys that clients may use.", show_default="server.api_keys"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", envvar="SHEEPOP_API_KEY", help="An API key that clients must send.", show_default="none"
        ),
    ] = None,
    ui: Annotated[bool, typer.Option("--ui", help="Also serve the web page of sheepop ui, at /ui.")] = False,
    votes: Annotated[
        Path | None, typer.Option(help="The file that stores the votes given on the page.", show_default="server.votes")
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Record conversations in DIR, with placeholders for personal data; clients are told.",
            show_default="server.log",
        ),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"] | None,
        typer.Option(help="Run in this process or on a Ray cluster.", show_default="server.engine"),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Copies of the models, with --engine ray.", show_default="server.replicas")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Split models over N processes, one per GPU.", show_default="server.tensor_parallel"
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="A chat template in Jinja, or chatml, gemma or llama3 for a model without one.",
            show_default="the model's",
        ),
    ] = None,
    chat_template_kwargs: TemplateVariables = None,
    config: ConfigFile = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting such as server.max_running=8; repeatable."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    quiet: Quiet = False,
) -> None:
    """Serve models over HTTP, for any client of OpenAI's API.

    Examples:

      sheepop serve runs/quickstart

      sheepop serve small=runs/small large=runs/large --port 8080 --api-keys keys.json

      sheepop serve models/smollm --adapter polite=adapters/polite

      sheepop serve runs/small runs/large --memory-budget 12 --keep-alive 5m --alias gpt-4o=large

      sheepop serve models/smollm --adapter-directory adapters

      sheepop serve runs/quickstart --ui

      sheepop serve runs/quickstart --log logs/quickstart

      sheepop serve Qwen/Qwen3-0.6B --chat-template-kwargs '{"enable_thinking": false}'

      sheepop serve models/large --tensor-parallel 4

      sheepop serve runs/quickstart --engine ray --replicas 4
    """
    given = {
        "host": host, "port": port, "api_keys": api_keys and str(api_keys), "api_key": api_key, "engine": engine,
        "replicas": replicas, "votes": votes and str(votes), "tensor_parallel": tensor_parallel,
        "log": log and str(log),
        "chat_template": chat_template, "memory_budget": memory_budget,
        "cache_dtype": cache_dtype, "activations": activations,
        "keep_alive": keep_alive, "adapter_directory": adapter_directory and str(adapter_directory),
        "aliases": _aliased(alias) if alias else None,
        "chat_template_kwargs": template_variables(chat_template_kwargs),
    }  # fmt: skip
    options: dict[str, Any] = {"server": {key: value for key, value in given.items() if value is not None}}
    if ui:
        options["server"]["ui"] = True
    start(models, options, config, settings or [], adapter or [], device=device, dtype=dtype, quiet=quiet)


def start(
    models: list[str],
    options: dict[str, Any],
    config: Path | None,
    settings: list[str],
    adapter: list[str],
    *,
    device: str | None,
    dtype: str | None,
    quiet: bool,
    for_page: bool = False,
) -> None:
    """Serves `models` with the settings of `options`, `config` and ``key=value`` `settings`.

    A server `for_page` alone writes no access log, and opens the page in the browser of this screen.
    """
    from sheepop.checkpoint.model_source import resolve_model_directory
    from sheepop.checkpoint.run_directory import RunDirectory
    from sheepop.jobs.config import SheepOpConfig, load_config

    if device is not None:
        options["device"] = device
    chosen: SheepOpConfig = load_config(config, settings, options=options)
    places = named_places(models)
    adapted = _adapted(adapter, places)
    for place in places.values():
        # The page also shows a run without a checkpoint; an adapter needs one.
        if adapted or not (chosen.server.ui and RunDirectory(place).holds_run()):
            resolve_model_directory(place, make_console(quiet))
    try:
        from sheepop.jobs.serve import serve as run
    except ImportError as error:
        raise UsageError(f'Serving needs more packages: pip install "sheepop[serve]" ({error})') from None
    run(places, chosen, adapters=adapted, dtype=dtype, console=make_console(quiet), for_page=for_page)


def _aliased(given: list[str]) -> dict[str, str]:
    """The names behind the aliases; raises `UsageError` for one that is given twice."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, model = text.partition("=")
        if not equals or not name or not model:
            raise UsageError(f"--alias {text} is not NAME=MODEL, for example gpt-4o=quickstart.")
        if name in found:
            raise UsageError(f"--alias {text}: the name {name} is already taken. Choose another.")
        found[name] = model
    return found


def _adapted(given: list[str], places: dict[str, Path]) -> dict[str, Path]:
    """The directories of the adapters by the names that they are served as."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, place = text.partition("=")
        if not equals or not name or not place or "/" in name:
            raise UsageError(f"--adapter {text} is not NAME=DIR, for example polite=adapters/polite.")
        if name in found or name in places:
            raise UsageError(f"--adapter {text}: the name {name} is already taken. Choose another.")
        found[name] = absolute_source(place)
    return found


def named_places(models: list[str]) -> dict[str, Path]:
    """The directories of models by the names that they are served as; raises `UsageError` if two names are equal."""
    places = dict(_named(model) for model in models)
    if len(places) < len(models):
        raise UsageError(f"Two models have the same name: {', '.join(places)}. Name one of them with NAME=DIRECTORY.")
    return places


def _named(model: str) -> tuple[str, Path]:
    """The name of a model and its directory, absolute so that other machines find it too."""
    name, equals, place = model.partition("=")
    if not equals or not name or "/" in name:
        name, place = Path(model).name or model, model
    return name, absolute_source(place)
