"""``sheepop analyze``: a model and its loops as a control system."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sheepop.cli.analysis_options import Probes, Seed, Steps, at_prompt
from sheepop.cli.options import MODEL

if TYPE_CHECKING:
    from sheepop.interpret.control.analyses import Analyses
    from sheepop.interpret.control.finding import Finding

Position = Annotated[int, typer.Option(help="The token whose vector is changed; -1 is the last.")]

app = typer.Typer(help="Analyse a model as a control system: gains, influence, control, loops.", no_args_is_help=True)


@at_prompt(app, "gains")
def gains(found: Analyses, prompt: str, steps: Steps = 32, probes: Probes = 8, seed: Seed = 0) -> Finding:
    """Measure by how much each block enlarges a small change of its input.

    Shows the largest, the smallest and the typical gain of every block and of its parts at a prompt, the gain of all
    blocks together, and what a change of the stream does to the next token, in nats.

    Examples:

      sheepop analyze gains runs/quickstart "def main("

      sheepop analyze gains runs/quickstart --prompt "def main(" --output analysis
    """
    return found.gains(prompt, steps=steps, probes=probes, seed=seed)


@at_prompt(app, "influence")
def influence(found: Analyses, prompt: str, probes: Probes = 4, seed: Seed = 0) -> Finding:
    """Measure how far each token of a prompt reaches the states of later tokens.

    Beside it stand attention rollout and the mean attention weights, and how far they are from it.

    Examples:

      sheepop analyze influence runs/quickstart "def main("

      sheepop analyze influence runs/quickstart "def main(" --probes 16 --output analysis

    """
    return found.influence(prompt, probes=probes, seed=seed)


@at_prompt(app, "impulse")
def impulse(
    found: Analyses,
    prompt: str,
    position: Position = 0,
    size: Annotated[float, typer.Option(help="Length of the change, as a share of the vector's.")] = 0.01,
    probes: Probes = 8,
    seed: Seed = 0,
) -> Finding:
    """Change the vector of one token, and follow the change through layers and later tokens.

    The network itself is run, and its response compared with that of the derivative. Before the token, the response is
    exactly 0.

    Example:

      sheepop analyze impulse runs/quickstart "def main(" --position 1 --output analysis

    """
    return found.impulse(prompt, position, size=size, probes=probes, seed=seed)


@at_prompt(app, "state-space")
def state_space(
    found: Analyses,
    prompt: str,
    position: Position = -1,
    candidates: Annotated[int, typer.Option(min=1, help="Next tokens that are tried to be reached.")] = 8,
    steps: Steps = 32,
    probes: Probes = 8,
    seed: Seed = 0,
) -> Finding:
    """Describe the network as a state-space system: dimensions, what can be controlled, what can be observed.

    Shows the gains of the linearised system of every block at the last token, which next tokens a change of one
    token's vector can reach, and how many directions of that vector the prediction tells apart.

    Example:

      sheepop analyze state-space runs/quickstart "def main(" --position 1

    """
    return found.state_space(prompt, position, candidates=candidates, steps=steps, probes=probes, seed=seed)


@at_prompt(app, "blocks")
def blocks(
    found: Analyses,
    prompt: str,
    layer: Annotated[int, typer.Option(min=0, help="The block whose inside is drawn.")] = 0,
    fed: Annotated[int, typer.Option(min=1, help="Written tokens that are fed back in the loop.")] = 4,
    probes: Probes = 8,
    seed: Seed = 0,
) -> Finding:
    """Draw the network's block diagrams, and reduce them step by step to one transfer function.

    Every box has its gain at the prompt. Within a pass there is no loop; the loop of generation is closed over the
    tokens that the model writes after the prompt.

    Example:

      sheepop analyze blocks runs/quickstart "def main(" --output analysis

    """
    return found.blocks(prompt, layer=layer, fed=fed, probes=probes, seed=seed)


@at_prompt(app, "compare")
def compare(
    found: Analyses,
    prompt: str,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help=f"The second model. {MODEL}")],
    probes: Probes = 8,
    seed: Seed = 0,
) -> Finding:
    """Show which gains and influences differ between two models, such as before and after tuning.

    Example:

      sheepop analyze compare runs/quickstart runs/tuned "def main(" --output analysis

    """
    from sheepop.jobs.analyze import AnalysisRequest, open_model

    second = open_model(AnalysisRequest(other, device=found.model.device.type, dtype=found.dtype))
    return found.compare(second, prompt, probes=probes, seed=seed)
