"""Decorators that add activations, optimizers and objectives to SheepOp under a name.

``sheepop --plugin my.py train ...`` runs the file first. A setting can then name the decorated function::

    import sheepop

    @sheepop.register.activation("cubed_relu")
    def cubed_relu(x):
        return x.relu() ** 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from sheepop.core.plugins import commands
from sheepop.model.feedforward import ACTIVATIONS
from sheepop.model.options import ACTIVATION_NAMES, GATED
from sheepop.train.config import CUSTOMARY, OBJECTIVE_NAMES, OPTIMIZER_NAMES, OptimizerSettings, TrainingConfig
from sheepop.train.objective import OBJECTIVES, Objective
from sheepop.train.optimizers.build import add_builder

Activation = TypeVar("Activation", bound=Callable[[Tensor], Tensor])
Build = TypeVar("Build", bound=Callable[[list[dict[str, Any]], OptimizerSettings], torch.optim.Optimizer])
Command = TypeVar("Command", bound=Callable[..., None])
MakeObjective = TypeVar("MakeObjective", bound=Callable[[TrainingConfig], Objective])


def activation(name: str, *, gated: bool = False) -> Callable[[Activation], Activation]:
    """Registers a function of a tensor for `model.activation`; `gated` applies it to a gate, as in SwiGLU."""

    def register(function: Activation) -> Activation:
        ACTIVATION_NAMES.add(name)
        ACTIVATIONS[name] = function
        if gated:
            GATED.add(name)
        return function

    return register


def optimizer(
    name: str, settings: OptimizerSettings | None = None, *, tensors: Sequence[str] = (), numbers: Sequence[str] = ()
) -> Callable[[Build], Build]:
    """Registers a function from parameter groups and settings to an optimizer, for `training.optimizer`.

    `settings` are the defaults of the settings that it reads in addition to learning rate and weight decay. The state
    of a parameter consists of `tensors`, which have the parameter's shape, and plain `numbers`; these are their names.
    A checkpoint contains all of them, and a resumed run requires them.
    """

    def register(build: Build) -> Build:
        OPTIMIZER_NAMES.add(name)
        CUSTOMARY[name] = settings or OptimizerSettings()
        add_builder(name, build, tensors, numbers)
        return build

    return register


def objective(name: str) -> Callable[[MakeObjective], MakeObjective]:
    """Registers a function from the training settings to an `Objective`, for `training.objective`."""

    def register(make: MakeObjective) -> MakeObjective:
        OBJECTIVE_NAMES.add(name)
        OBJECTIVES[name] = make
        return make

    return register


def command(name: str) -> Callable[[Command], Command]:
    """Registers a function as the command ``sheepop NAME``; Typer makes arguments and options of its parameters."""

    def register(function: Command) -> Command:
        commands[name] = function
        return function

    return register
