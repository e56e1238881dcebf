"""The names of the optimizers, and the settings that each reads, with the values that its authors recommend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sheepop.core.names import Names

OPTIMIZER_NAMES = Names("adamw", "adam", "sgd", "muon", "lion", "adafactor", "schedule_free_adamw")
OptimizerName = Annotated[str, OPTIMIZER_NAMES]


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of an optimizer besides learning rate and weight decay; None if it does not have one."""

    betas: tuple[float, float] | None = None
    eps: float | None = None
    momentum: float | None = None


CUSTOMARY: dict[str, OptimizerSettings] = {
    # The second beta of Loshchilov and Hutter is 0.999; language models are trained with 0.95 (Brown et al. 2020).
    "adamw": OptimizerSettings(betas=(0.9, 0.95), eps=1e-8),
    "adam": OptimizerSettings(betas=(0.9, 0.999), eps=1e-8),
    "sgd": OptimizerSettings(momentum=0.9),
    "muon": OptimizerSettings(betas=(0.9, 0.95), eps=1e-8, momentum=0.95),
    "lion": OptimizerSettings(betas=(0.9, 0.99)),
    "adafactor": OptimizerSettings(eps=1e-30),
    "schedule_free_adamw": OptimizerSettings(betas=(0.9, 0.999), eps=1e-8),
}
SETTINGS = ("betas", "eps", "momentum")


def check_optimizer(name: str, given: OptimizerSettings, *, schedule: str, ema_decay: float | None) -> None:
    """Raises `ValueError` for a setting that the optimizer does not read, or for contradictory settings."""
    for key in SETTINGS:
        if getattr(given, key) is not None and getattr(CUSTOMARY[name], key) is None:
            readers = ", ".join(other for other, settings in CUSTOMARY.items() if getattr(settings, key) is not None)
            raise ValueError(
                f"{key} = {getattr(given, key)} is given, but optimizer = {name} does not read it (only {readers}). "
                f"Leave {key} out"
            )
    if name != "schedule_free_adamw":
        return
    if schedule != "constant":
        raise ValueError(
            f"schedule = {schedule}, but schedule_free_adamw averages its weights instead of decaying the rate. Set "
            "schedule = constant"
        )
    if ema_decay is not None:
        raise ValueError(
            f"ema_decay = {ema_decay}, but schedule_free_adamw already averages its weights. Leave ema_decay out"
        )
    if given.betas is not None and given.betas[0] == 0:
        raise ValueError("betas: the first one must be above 0 for schedule_free_adamw, because it weighs the average")
