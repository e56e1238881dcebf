"""What a file of yours may add to SheepOp by name: activations, optimizers, objectives.

``sheepop --plugin my.py train ...`` runs the file first. A function becomes one that a setting can name::

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
from sheepop.model.config import ACTIVATION_NAMES, GATED
from sheepop.model.feedforward import ACTIVATIONS
from sheepop.train.config import TrainingConfig
from sheepop.train.objective import OBJECTIVES, Objective
from sheepop.train.objective_names import OBJECTIVE_NAMES
from sheepop.train.optimizer_settings import CUSTOMARY, OPTIMIZER_NAMES, OptimizerSettings
from sheepop.train.optimizers.build import add_builder

Activation = TypeVar("Activation", bound=Callable[[Tensor], Tensor])
Build = TypeVar("Build", bound=Callable[[list[dict[str, Any]], OptimizerSettings], torch.optim.Optimizer])
Command = TypeVar("Command", bound=Callable[..., None])
MakeObjective = TypeVar("MakeObjective", bound=Callable[[TrainingConfig], Objective])


def activation(name: str, *, gated: bool = False) -> Callable[[Activation], Activation]:
    """Registers a function of a tensor for `model.activation`; `gated` makes it that of a gate, as in SwiGLU."""

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
    """Registers a function of parameter groups and settings for `training.optimizer`, which gives an optimizer.

    `settings` are the customary values of what it reads beside learning rate and weight decay. `tensors` names its
    state for each parameter that has the parameter's shape, and `numbers` the rest, plain numbers: a checkpoint holds
    all of it, and a resumed run requires it.
    """

    def register(build: Build) -> Build:
        OPTIMIZER_NAMES.add(name)
        CUSTOMARY[name] = settings or OptimizerSettings()
        add_builder(name, build, tensors, numbers)
        return build

    return register


def objective(name: str) -> Callable[[MakeObjective], MakeObjective]:
    """Registers a function of the training settings for `training.objective`, which gives an `Objective`."""

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
