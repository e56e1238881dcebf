"""``sheepop analyze``: a model and its loops as a control system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from sheepop.cli.options import MODEL, Adapter, Device, Json, Quiet, make_console

if TYPE_CHECKING:
    from sheepop.interpret.control.analyses import Analyses

Position = Annotated[int, typer.Option(help="The token whose vector is changed; -1 is the last.")]

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


@app.command()
def influence(
    model: Model,
    text: Text = None,
    prompt: Prompt = None,
    output: Output = None,
    probes: Probes = 4,
    seed: Seed = 0,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Exactness = "float32",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how far each token of a prompt reaches the states of later tokens.

    Beside it stand attention rollout and the mean attention weights, and how far they are from it.

    Examples:

      sheepop analyze influence runs/quickstart "def main("

      sheepop analyze influence runs/quickstart "def main(" --probes 16 --output analysis

    """
    given = one_prompt(text, prompt)
    run_analysis(
        "influence",
        model,
        lambda found: found.influence(given, probes=probes, seed=seed),
        output=output,
        adapter=adapter,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        quiet=quiet,
        as_json=as_json,
    )


@app.command()
def impulse(
    model: Model,
    text: Text = None,
    prompt: Prompt = None,
    output: Output = None,
    position: Position = 0,
    size: Annotated[float, typer.Option(help="Length of the change, as a share of the vector's.")] = 0.01,
    probes: Probes = 8,
    seed: Seed = 0,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Exactness = "float32",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Change the vector of one token, and follow the change through layers and later tokens.

    The network itself is run, and its response compared with that of the derivative. Before the token, the response is
    exactly 0.

    Example:

      sheepop analyze impulse runs/quickstart "def main(" --position 1 --output analysis

    """
    given = one_prompt(text, prompt)
    run_analysis(
        "impulse",
        model,
        lambda found: found.impulse(given, position, size=size, probes=probes, seed=seed),
        output=output,
        adapter=adapter,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        quiet=quiet,
        as_json=as_json,
    )


@app.command("state-space")
def state_space(
    model: Model,
    text: Text = None,
    prompt: Prompt = None,
    output: Output = None,
    position: Position = -1,
    candidates: Annotated[int, typer.Option(min=1, help="Next tokens that are tried to be reached.")] = 8,
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
    """Describe the network as a state-space system: dimensions, what can be controlled, what can be observed.

    Shows the gains of the linearised system of every block at the last token, which next tokens a change of one
    token's vector can reach, and how many directions of that vector the prediction tells apart.

    Example:

      sheepop analyze state-space runs/quickstart "def main(" --position 1

    """
    given = one_prompt(text, prompt)
    run_analysis(
        "state-space",
        model,
        lambda found: found.state_space(given, position, candidates=candidates, steps=steps, probes=probes, seed=seed),
        output=output,
        adapter=adapter,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        quiet=quiet,
        as_json=as_json,
    )


@app.command()
def blocks(
    model: Model,
    text: Text = None,
    prompt: Prompt = None,
    output: Output = None,
    layer: Annotated[int, typer.Option(min=0, help="The block whose inside is drawn.")] = 0,
    fed: Annotated[int, typer.Option(min=1, help="Written tokens that are fed back in the loop.")] = 4,
    probes: Probes = 8,
    seed: Seed = 0,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Exactness = "float32",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Draw the network's block diagrams, and reduce them step by step to one transfer function.

    Every box has its gain at the prompt. Within a pass there is no loop; the loop of generation is closed over the
    tokens that the model writes after the prompt.

    Example:

      sheepop analyze blocks runs/quickstart "def main(" --output analysis

    """
    given = one_prompt(text, prompt)
    run_analysis(
        "blocks",
        model,
        lambda found: found.blocks(given, layer=layer, fed=fed, probes=probes, seed=seed),
        output=output,
        adapter=adapter,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        quiet=quiet,
        as_json=as_json,
    )


@app.command()
def compare(
    model: Model,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help=f"The second model. {MODEL}")],
    text: Text = None,
    prompt: Prompt = None,
    output: Output = None,
    probes: Probes = 8,
    seed: Seed = 0,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Exactness = "float32",
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Show which gains and influences differ between two models, such as before and after tuning.

    Example:

      sheepop analyze compare runs/quickstart runs/tuned "def main(" --output analysis

    """
    given = one_prompt(text, prompt)

    def another() -> Analyses:
        from sheepop.checkpoint.model_source import resolve_model_directory

        resolve_model_directory(other, make_console(quiet or as_json))
        from sheepop.jobs.analyze import AnalysisRequest, open_model

        return open_model(AnalysisRequest(other, device=device or "auto", dtype=dtype))

    run_analysis(
        "compare",
        model,
        lambda found: found.compare(another(), given, probes=probes, seed=seed),
        output=output,
        adapter=adapter,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        quiet=quiet,
        as_json=as_json,
    )
