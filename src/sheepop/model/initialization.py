"""Initial weights, each a pure function of (seed, parameter name)."""

from __future__ import annotations

import math

import torch
from torch import nn

from sheepop.core.random import torch_generator
from sheepop.model.config import ModelConfig
from sheepop.model.transformer import Transformer

INITIAL_STD = 0.02


def build_model(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> Transformer:
    """A network with initial weights in float32 on `device`.

    GPT-2's scheme (Radford et al. 2019): matrices N(0, 0.02^2), those that end a residual branch divided by
    sqrt(2 num_layers), biases 0, norms 1. Under sinusoidal positions the embedding, which is multiplied by
    sqrt(d_model), starts at N(0, 1/d_model), so that token vectors and sinusoids have like size.
    """
    model = Transformer(config)
    residual_std = INITIAL_STD / math.sqrt(2 * config.num_layers)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                if module.weight is not model.embedding.weight:
                    ends_branch = name.endswith((".o_proj", ".down_proj"))
                    _normal(module.weight, residual_std if ends_branch else INITIAL_STD, seed, f"{name}.weight")
                if module.bias is not None:
                    module.bias.zero_()
        sinusoidal = config.position_encoding == "sinusoidal"
        _normal(
            model.embedding.weight,
            config.d_model**-0.5 if sinusoidal else INITIAL_STD,
            seed,
            "embedding.weight",
        )
        if config.position_encoding == "learned":
            assert model.added_positions is not None
            _normal(model.added_positions.table, INITIAL_STD, seed, "added_positions.table")
    return model.to(device)


def _normal(parameter: torch.Tensor, std: float, seed: int, name: str) -> None:
    parameter.normal_(0.0, std, generator=torch_generator(seed, "initial weights", name))
