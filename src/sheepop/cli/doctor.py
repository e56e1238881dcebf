"""``sheepop doctor``."""

from __future__ import annotations

import typer

from sheepop.cli.options import Json, print_json


def doctor(as_json: Json = False) -> None:
    """Show what this machine has, what is missing, and what each missing piece would add.

    Example:  sheepop doctor
    """
    from sheepop.jobs.doctor import doctor, render_doctor

    report = doctor()
    if as_json:
        print_json(report.to_dict())
    else:
        typer.echo(render_doctor(report))
