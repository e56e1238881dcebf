"""``sheepop config``."""

from __future__ import annotations

from typing import Annotated

import typer

from sheepop.cli.options import Json, print_json


def config(
    key: Annotated[str | None, typer.Argument(help="A key or a section.", metavar="[KEY]", show_default="all")] = None,
    as_json: Json = False,
) -> None:
    """Show the settings: every key with its default, the values it takes and its meaning.

    A section or the whole configuration is printed as a config file.

    Examples:

      sheepop config training.learning_rate

      sheepop config data.clean

      sheepop config

      sheepop config training --json
    """
    from sheepop.jobs.config_help import all_settings, render

    settings = all_settings(key)
    if as_json:
        print_json([setting.to_dict() for setting in settings])
    else:
        typer.echo(render(settings))
