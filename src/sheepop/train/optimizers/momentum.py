"""What optimizers share whose whole state is one running average of gradients a parameter."""

from __future__ import annotations

import torch
from torch import Tensor


class MomentumOptimizer(torch.optim.Optimizer):
    """One slot a parameter: ``momentum``, float32 and of its shape, zero before the first step."""

    def slots(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """The state of a parameter after a step: the shape of each slot."""
        return {"momentum": tuple(parameter.shape)}

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
        momentum: Tensor = state["momentum"]
        return momentum
