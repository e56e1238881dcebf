"""Parameter groups: the weight decay and the learning-rate factor of each parameter."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from sheepop.core.errors import ConfigError
from sheepop.model.initialization import Role, parameter_role
from sheepop.train.config import LayerConfig, TrainingConfig

# Returns the learning-rate factor of a parameter from its name and itself.
Multiplier = Callable[[str, Tensor], float]

_FACTOR = "learning_rate_factor"
_MOST_NAMES = 3
# The learning-rate factor of a table, of which a run reads each row only a few times; bench/results/minutes.md has the
# measurement.
_RATES: dict[Role, float] = {"table": 2.5}


def parameter_groups(
    parameters: Mapping[str, Tensor], config: TrainingConfig, multiplier: Multiplier = lambda name, parameter: 1.0
) -> list[dict[str, Any]]:
    """Groups of parameters with one decay and one learning-rate factor, for the optimizers of torch.

    Only matrices decay. `multiplier` gives a learning-rate factor that the network itself requires, in addition to that
    of the configuration. A step decays by the rate times the decay, so the decay is divided by that factor. Each group
    stores its factor for `set_learning_rate`.
    """
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in parameters.items():
        layer = next((layer for layer in config.layers if fnmatchcase(name, layer.pattern)), None)
        decay = config.weight_decay if layer is None or layer.weight_decay is None else layer.weight_decay
        multiple = multiplier(name, parameter) * _RATES.get(parameter_role(name, parameter.shape), 1.0)
        factor = multiple * (1.0 if layer is None else layer.learning_rate)
        groups.setdefault((factor, decay / multiple if _decays(name, parameter) else 0.0), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "lr": config.learning_rate * factor, _FACTOR: factor}
        for (factor, decay), members in groups.items()
    ]


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], learning_rate: float) -> None:
    """Sets the rate of every parameter group to `learning_rate` times the group's factor."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group.get(_FACTOR, 1.0)


def check_layers(parameters: Mapping[str, Tensor], layers: Sequence[LayerConfig]) -> None:
    """Raises `ConfigError` for an entry of `training.layers` that has no effect on this model."""
    taken: set[str] = set()
    for layer in layers:
        matching = [name for name in parameters if fnmatchcase(name, layer.pattern)]
        if not matching:
            raise ConfigError(
                f"training.layers: no parameter matches {layer.pattern!r}. {_nearest(layer.pattern, parameters)}"
            )
        if taken.issuperset(matching):
            raise ConfigError(
                f"training.layers: earlier patterns match everything that {layer.pattern!r} matches, and the first "
                "match counts. Move it up, or leave it out."
            )
        if layer.weight_decay is not None and not any(_decays(name, parameters[name]) for name in matching):
            raise ConfigError(
                f"training.layers: {layer.pattern!r} has a weight_decay but matches only vectors, such as "
                f"{matching[0]}, and only matrices are decayed. Leave its weight_decay out."
            )
        taken.update(matching)


class GroupedOptimizer(torch.optim.Optimizer):
    """An optimizer that updates the parameters of a group that have equal keys (`_key`) together."""

    def slots(self, parameter: Tensor) -> Mapping[str, tuple[int, ...] | None]:
        """The shape of each slot of a parameter after a step, None for a number."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        if closure is not None:
            raise ValueError(f"{type(self).__name__} takes no closure")
        for group in self.param_groups:
            members: dict[Any, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    members.setdefault(self._key(parameter), []).append(parameter)
            for parameters in members.values():
                gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
                self._update(parameters, gradients, group)

    def _key(self, parameter: Tensor) -> Any:
        return parameter.device

    def _update(self, parameters: list[Tensor], gradients: list[Tensor], group: Mapping[str, Any]) -> None:
        raise NotImplementedError


def _decays(name: str, parameter: Tensor) -> bool:
    return parameter_role(name, parameter.shape) not in ("vector", "table")


def _nearest(pattern: str, parameters: Iterable[str]) -> str:
    names = list(parameters)
    if nearest := difflib.get_close_matches(pattern, names, n=_MOST_NAMES, cutoff=0.4):
        return f"The nearest names are {', '.join(nearest)}."
    return f"Names look like {', '.join(names[:_MOST_NAMES])}."
