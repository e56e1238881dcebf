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


def require_analysis(config: SheepOpConfig, ranks: Ranks) -> None:
    """Raises `ConfigError` for a run whose loss or optimizer the `analysis` settings cannot measure."""
    analysis, training, tuning = config.analysis, config.training, config.tuning
    if not analysis.quantities:
        return
    what = f"analysis.quantities = {', '.join(analysis.quantities)}"
    if ranks.are_several:
        raise ConfigError(f"{what} needs the whole model in one process. Set it to [], or train in one process.")
    if tuning.method not in (None, "sft") or tuning.teacher is not None or training.objective != "next_token":
        raise ConfigError(f"{what} measures the loss of the next token, which this run does not minimise. Set it to [].")
    if training.precision == "fp8":
        raise ConfigError(f"{what} computes in float32, and the layers of training.precision = fp8 do not. Set it to [].")
    if "sharpness" not in analysis.quantities:
        return
    if training.optimizer in _WITHOUT_LIMIT:
        raise ConfigError(
            f"analysis.quantities: the limit of training.optimizer = {training.optimizer} is not known, because its "
            "step is not a scaled gradient. Leave sharpness out, or use adamw, adam, muon or sgd."
        )
    if config.model.experts is not None:
        raise ConfigError(
            "analysis.quantities: the products of experts have no second derivative. Leave sharpness out."
        )


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
    return TrainingAnalysis(placement, optimizers, analysis, interval, rows, config.seed, console.warn)
