"""Which parameters are decayed, which optimizer moves them, and clipping of their gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sheepop.train.config import TrainingConfig
from sheepop.train.muon import Muon


def build_optimizers(model: nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of a run; together they hold every trainable parameter once.

    ``adamw`` (Loshchilov and Hutter 2019): weight decay on matrices only; biases and norms are left free.
    ``muon``: Muon for the matrices inside the network, AdamW for embeddings, the output head, biases and norms.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    inner = [parameter for name, parameter in parameters.items() if parameter.ndim == 2 and "blocks." in name]
    if config.optimizer == "muon":
        rest = _excluding(parameters.values(), inner)
        muon = Muon(inner, lr=config.learning_rate, weight_decay=config.weight_decay)
        return [muon, _adamw(rest, config)]
    return [_adamw(list(parameters.values()), config)]


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], learning_rate: float) -> None:
    """Gives every parameter group the rate of this step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scales all gradients by one factor so that their global norm is at most `max_norm`; returns the norm before.

    With `max_norm` None the norm is only measured (Pascanu et al. 2013, algorithm 1, over all parameters).
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm is not None and not (norm.device.type == "cpu" and norm <= max_norm):
        factor = torch.clamp(max_norm / norm, max=1.0)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))
    return norm


def _adamw(parameters: list[Tensor], config: TrainingConfig) -> torch.optim.AdamW:
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": _excluding(parameters, matrices), "weight_decay": 0.0},
    ]
    fused = all(parameter.device.type in ("cpu", "cuda", "mps") for parameter in parameters)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
    )


def _excluding(parameters: Iterable[Tensor], excluded: Iterable[Tensor]) -> list[Tensor]:
    identities = {id(parameter) for parameter in excluded}
    return [parameter for parameter in parameters if id(parameter) not in identities]
