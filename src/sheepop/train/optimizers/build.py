"""Builds the optimizers of a run from their names, and knows the state that each has for a parameter after a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sheepop.core.errors import ConfigError
from sheepop.model import ModelConfig
from sheepop.model.initialization import parameter_role
from sheepop.model.mup import Update, learning_rate_multiplier
from sheepop.train.config import CUSTOMARY, OptimizerSettings, TrainingConfig
from sheepop.train.optimizers.adafactor import Adafactor, RowAdagrad
from sheepop.train.optimizers.groups import GroupedOptimizer, check_layers, parameter_groups
from sheepop.train.optimizers.momentum import Lion, Muon
from sheepop.train.optimizers.schedule_free import ScheduleFreeAdamW

Groups = list[dict[str, Any]]
# The shape of each slot by name, None for a slot that is a number.
Slots = Mapping[str, tuple[int, ...] | None]
Build = Callable[[Groups, OptimizerSettings], torch.optim.Optimizer]
_TORCH = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
_FUSED = ("cpu", "cuda", "mps")


def build_optimizers(model: nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of a run; each trainable parameter belongs to one of them, frozen parameters to none.

    ``muon`` uses Muon for the matrices inside the network and AdamW for embeddings, the output head, biases and norms;
    every other name means one optimizer for all of these. Tables of n-grams, of which a step reads a few rows, always
    have an optimizer of their own. A network initialised by muP gets the learning rates that muP requires. Raises
    `ConfigError` if an entry of `training.layers` has no effect, muP has no rule for the optimizer, or no parameter is
    trained.
    """
    settings = optimizer_settings(config)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not parameters:
        raise ConfigError("Every parameter of the model is frozen (requires_grad is False): nothing would be trained.")
    check_layers(parameters, config.layers)
    network = getattr(model, "config", None)
    if isinstance(network, ModelConfig):
        _check_decay(network, config)

    def groups(chosen: dict[str, nn.Parameter], update: Update) -> Groups:
        def multiplier(name: str, parameter: Tensor) -> float:
            if not isinstance(network, ModelConfig):
                return 1.0
            return learning_rate_multiplier(name, parameter.shape, network, update)

        return parameter_groups(chosen, config, multiplier)

    roles = {name: parameter_role(name, parameter.shape) for name, parameter in parameters.items()}
    tables = {name: parameter for name, parameter in parameters.items() if roles[name] == "table"}
    inner = {
        name: parameter
        for name, parameter in parameters.items()
        if config.optimizer == "muon" and "blocks." in name and roles[name] != "vector"
    }
    rest = {name: parameter for name, parameter in parameters.items() if name not in tables.keys() | inner.keys()}
    built: list[torch.optim.Optimizer] = []
    if inner:
        momentum = settings.momentum
        assert momentum is not None  # Muon has a customary one
        built.append(Muon(groups(inner, "orthogonal"), lr=config.learning_rate, momentum=momentum))
    if rest:
        built.append(_BUILDERS[config.optimizer](groups(rest, _UPDATES.get(config.optimizer, "adaptive")), settings))
    if tables:
        built.append(RowAdagrad(groups(tables, "adaptive"), lr=config.learning_rate))
    return built


def _check_decay(network: ModelConfig, config: TrainingConfig) -> None:
    decays = (config.weight_decay, *(layer.weight_decay or 0.0 for layer in config.layers))
    if network.initialization == "mup" and config.optimizer == "adam" and any(decays):
        raise ConfigError(
            "model.initialization: mup and training.optimizer: adam need training.weight_decay: 0. Adam's decay is "
            "part of the gradient, whose size falls with the width; adamw's is not."
        )


def optimizer_settings(config: TrainingConfig) -> OptimizerSettings:
    """The settings of the optimizer in the configuration, with its default values in place of null."""
    customary = CUSTOMARY[config.optimizer]
    return OptimizerSettings(
        betas=customary.betas if config.betas is None else config.betas,
        eps=customary.eps if config.eps is None else config.eps,
        momentum=customary.momentum if config.momentum is None else config.momentum,
    )


def _builder(kind: Callable[..., torch.optim.Optimizer], *names: str) -> Build:
    """A function that builds optimizers of this kind, which reads the settings with these names."""

    def build(groups: Groups, settings: OptimizerSettings) -> torch.optim.Optimizer:
        given = {name: getattr(settings, name) for name in names}
        if kind in _TORCH:
            given["fused"] = _fused(groups)
        return kind(groups, **given)

    return build


# The kind of update by which muP scales the rate, for optimizers that do not move every entry by about the rate.
_UPDATES: dict[str, Update] = {"sgd": "gradient", "adafactor": "relative"}
_BUILDERS: dict[str, Build] = {
    "muon": _builder(torch.optim.AdamW, "betas", "eps"),
    # Loshchilov and Hutter 2019, algorithm 2.
    "adamw": _builder(torch.optim.AdamW, "betas", "eps"),
    # Kingma and Ba 2015, algorithm 1; the decay is added to the gradient, like an L2 penalty.
    "adam": _builder(torch.optim.Adam, "betas", "eps"),
    # Sutskever et al. 2013, with the rate outside the velocity; the decay is added to the gradient.
    "sgd": _builder(torch.optim.SGD, "momentum"),
    "lion": _builder(Lion, "betas"),
    "adafactor": _builder(Adafactor, "eps"),
    "schedule_free_adamw": _builder(ScheduleFreeAdamW, "betas", "eps"),
}


def add_builder(name: str, build: Build, tensors: Sequence[str], numbers: Sequence[str]) -> None:
    """Registers `build` under a name; `tensors` and `numbers` name the state of a parameter after a step."""

    def made(groups: Groups, settings: OptimizerSettings) -> torch.optim.Optimizer:
        optimizer = build(groups, settings)
        _SLOTS.setdefault(type(optimizer), slots)
        return optimizer

    def slots(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Slots:
        return {**dict.fromkeys(tensors, tuple(parameter.shape)), **dict.fromkeys(numbers)}

    _BUILDERS[name] = made


def _fused(groups: Iterable[dict[str, Any]]) -> bool:
    """Whether the devices of these parameters have fused kernels, which update a whole group."""
    return all(parameter.device.type in _FUSED for group in groups for parameter in group["params"])


def optimizer_slots(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: Tensor) -> Slots:
    """The slots of `parameter`, a member of `group`; raises `ValueError` for an unknown optimizer."""
    if isinstance(optimizer, GroupedOptimizer):
        return optimizer.slots(parameter)
    for kind, slots in _SLOTS.items():
        if isinstance(optimizer, kind):
            return slots(optimizer, group, parameter)
    raise ValueError(f"the slots of {type(optimizer).__name__} are not known")


def _moments(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Slots:
    shape = tuple(parameter.shape)
    return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}


def _momentum_buffer(optimizer: Any, group: Mapping[str, Any], parameter: Tensor) -> Slots:
    return {"momentum_buffer": tuple(parameter.shape)} if group["momentum"] else {}


_SLOTS: dict[type[torch.optim.Optimizer], Callable[[Any, Mapping[str, Any], Tensor], Slots]] = {
    torch.optim.Adam: _moments,
    torch.optim.AdamW: _moments,
    torch.optim.SGD: _momentum_buffer,
}
