"""The analysis of a run while it trains: which runs can have one, and the callback of the loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.core.facts import counted
from sheepop.jobs.config import SheepOpConfig
from sheepop.parallel.ranks import Ranks
from sheepop.train.loop import Observe, overlooked
from sheepop.train.placement import Placement

_WITHOUT_LIMIT = ("lion", "adafactor", "schedule_free_adamw")


def obstacle(config: SheepOpConfig, quantities: Sequence[str]) -> str | None:
    """Why these quantities cannot be measured on such a run, as a sentence; None if they can."""
    training, tuning = config.training, config.tuning
    if tuning.method not in (None, "sft") or tuning.teacher is not None or training.objective != "next_token":
        return "The loss of the next token is measured, and this run minimises another one."
    if training.precision == "fp8":
        return "It is measured in float32, and the layers of training.precision = fp8 compute in float8."
    if "sharpness" not in quantities:
        return None
    if training.optimizer in _WITHOUT_LIMIT:
        return (
            f"The limit of training.optimizer = {training.optimizer} is not known, because its step is not a scaled "
            "gradient; sharpness is measured for adamw, adam, muon and sgd."
        )
    if config.model.experts is not None:
        return "The products of experts have no second derivative, which sharpness needs."
    return None


def require_analysis(config: SheepOpConfig, ranks: Ranks) -> None:
    """Raises `ConfigError` for a run that cannot measure what `analysis` asks for."""
    analysis = config.analysis
    if not analysis.quantities:
        return
    what = f"analysis.quantities = {', '.join(analysis.quantities)}"
    if ranks.are_several:
        raise ConfigError(f"{what} needs the whole model in one process. Set it to [], or train in one process.")
    if (why := obstacle(config, analysis.quantities)) is not None:
        raise ConfigError(f"{what} does not go with this run. {why} Leave it out.")


def build_analysis(
    config: SheepOpConfig, placement: Placement, optimizers: Sequence[torch.optim.Optimizer], console: Console
) -> Observe:
    """The callback of the loop that measures what `analysis` asks for; says how often, and at what cost."""
    analysis, training = config.analysis, config.training
    if not analysis.quantities:
        return overlooked
    from sheepop.interpret.control.watching import TrainingAnalysis, cost_in_steps, measuring_interval

    rows, micro_rows = training.global_batch_size, training.resolved().micro_batch_size
    interval = measuring_interval(analysis, rows, micro_rows)
    cost = cost_in_steps(analysis, rows, micro_rows)
    console.info(
        f"Analysis of {', '.join(analysis.quantities)} every {counted(interval, 'step')}, at the cost of about "
        f"{cost:.1f} steps, {cost / interval:.1%} of the run."
    )
    steps = training.resolved().total_steps
    return TrainingAnalysis(placement, optimizers, analysis, interval, rows, steps, config.seed, console.warn)
