"""``sheepop analyze``: a model and its loops as a control system."""

from __future__ import annotations

import typer

from sheepop.cli.analysis_options import (
    Exactness,
    Model,
    Output,
    Overwrite,
    Probes,
    Prompt,
    Seed,
    Steps,
    Text,
    one_prompt,
    run_analysis,
)
from sheepop.cli.options import Adapter, Device, Json, Quiet

app = typer.Typer(help="Analyse a model as a control system: gains, influence, control, loops.", no_args_is_help=True)


@app.command()
def gains(
    model: Model,
    text: Text = None,
    prompt: Prompt = None,
    output: Output = None,
    steps: Steps = 32,
    probes: Probes = 8,
    seed: Seed = 0,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Exactness = "float32",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure by how much each block enlarges a small change of its input.

    Shows the largest, the smallest and the typical gain of every block and of its parts at a prompt, the gain of all
    blocks together, and what a change of the stream does to the next token, in nats.

    Examples:

      sheepop analyze gains runs/quickstart "def main("

      sheepop analyze gains runs/quickstart --prompt "def main(" --output analysis
    """
    given = one_prompt(text, prompt)
    run_analysis(
        "gains",
        model,
        lambda found: found.gains(given, steps=steps, probes=probes, seed=seed),
        output=output,
        adapter=adapter,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        quiet=quiet,
        as_json=as_json,
    )
