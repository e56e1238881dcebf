"""Builds networks and their initial weights; each weight is a pure function of (seed, parameter name)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sheepop.core.random import torch_generator
from sheepop.model.attention.convolution import ShortConvolution
from sheepop.model.config import ModelConfig
from sheepop.model.encoder_decoder import EncoderDecoder
from sheepop.model.options import Architecture
from sheepop.model.transformer import Transformer

ARCHITECTURES: dict[Architecture, type[Transformer]] = {
    network.architecture: network for network in (Transformer, EncoderDecoder)
}

# vector: biases, norms, sinks, decays, per-channel convolutions. embedding: rows that are looked up. matrix: between
# activations whose width grows with the network's. router: to one score for each expert. head: to logits. table: rows
# that are looked up, few of many in a step.
Role = Literal["vector", "embedding", "matrix", "router", "head", "table"]

_ROLES: dict[str, Role] = {
    "embedding": "embedding",
    "added_positions.table": "embedding",
    "ngrams.table": "table",
    "taps": "vector",
    "router": "router",
    "shared_gate": "router",
    "lm_head": "head",
}


def parameter_role(name: str, shape: Sequence[int]) -> Role:
    """Returns the role of the parameter with this state dict name.

    Stacked vectors, the biases of experts and the weights of norms of heads, are vectors too.
    """
    owner = name.removesuffix(".weight")
    if len(shape) < 2 or owner.endswith(("_bias", "_norm")):
        return "vector"
    words = owner.split(".")
    return _ROLES.get(".".join(words[-2:])) or _ROLES.get(words[-1], "matrix")


@dataclass(frozen=True)
class Matrix:
    """The properties of a matrix that initialization schemes use.

    `branches` is the number of residual branches in its stack of layers if the matrix ends one, otherwise 0.
    """

    fan_in: int
    fan_out: int
    role: Role
    branches: int = 0


def _residual(matrix: Matrix) -> float:
    """Returns 1 over the root of the number of summed residual branches (Radford et al. 2019, section 2.3)."""
    return 1 / math.sqrt(matrix.branches) if matrix.branches else 1.0


# The standard deviation of a matrix under each scheme.
SCHEMES: dict[str, Callable[[ModelConfig, Matrix], float]] = {
    "normal": lambda config, matrix: config.initial_std,
    "gpt2": lambda config, matrix: config.initial_std * _residual(matrix),
    # Glorot and Bengio 2010, equations 12 and 16.
    "xavier_normal": lambda config, matrix: math.sqrt(2 / (matrix.fan_in + matrix.fan_out)),
    "xavier_uniform": lambda config, matrix: math.sqrt(2 / (matrix.fan_in + matrix.fan_out)),
    # N(0, 1/n) and U(-1/sqrt(n), 1/sqrt(n)) for n inputs; the second has a third of the variance.
    "fan_in_normal": lambda config, matrix: math.sqrt(1 / matrix.fan_in),
    "fan_in_uniform": lambda config, matrix: math.sqrt(1 / (3 * matrix.fan_in)),
    # He et al. 2015, equation 10.
    "he": lambda config, matrix: math.sqrt(2 / matrix.fan_in),
    "mup": lambda config, matrix: (
        config.initial_std * config.width_multiplier ** _MUP_POWERS[matrix.role] * _residual(matrix)
    ),
}
# Yang et al. 2022, table 8: the variance of hidden matrices falls with the width; that of the head, whose input is
# divided by the width multiplier, does not. Table 3: without that divisor it falls with the square of the width.
_MUP_POWERS: dict[Role, float] = {"matrix": -0.5, "router": -1.0, "head": 0.0}
_UNIFORM = frozenset({"xavier_uniform", "fan_in_uniform"})
_ENDS_BRANCH = ("o_proj", "down_proj")
_DRAWS = frozenset({nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_})


def blank_model(config: ModelConfig) -> Transformer:
    """Returns the network of `config` with uninitialised weights; see `build_model`.

    Norms scale by 1 and shift by 0; weights that PyTorch would draw at random stay uninitialised memory.
    """
    with _Undrawn():
        return ARCHITECTURES[config.architecture](config)


def build_model(config: ModelConfig, seed: int, device: torch.device | str = "cpu") -> Transformer:
    """Returns a network with initial weights in float32 on `device`.

    Matrices follow `config.initialization`; biases, sinks and vectors of n-grams are 0, norms scale by 1, convolutions
    are the identity, factors are 1, and a Gated DeltaNet forgets by factors between almost 0 and 1.
    Embeddings and learned positions are N(0, `initial_std`^2). With sinusoidal positions, which multiply embeddings by
    the root of their width, embeddings are N(0, 1 / width), so that token vectors and sinusoids are of similar size.
    Layer inputs, which the root of their width multiplies too, are N(0, 1 / width).
    """
    model = blank_model(config)
    with torch.no_grad():
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                _initialise(model, module, parameter, f"{path}.{name}" if path else name, seed)
    return model.to(device)


def _initialise(model: Transformer, module: nn.Module, parameter: Tensor, name: str, seed: int) -> None:
    config = model.config
    if parameter is model.embedding.weight:
        if module is model.embedding:
            width = config.mup_base_d_model or config.d_model
            sinusoidal = config.position_encoding == "sinusoidal"
            _draw(parameter, width**-0.5 if sinusoidal else config.initial_std, False, seed, name)
    elif name == "layer_inputs.embedding.weight" and config.layer_inputs is not None:
        _draw(parameter, config.layer_inputs.width**-0.5, False, seed, name)
    elif name == "added_positions.table":
        _draw(parameter, config.initial_std, False, seed, name)
    elif (role := parameter_role(name, parameter.shape)) == "table":
        parameter.zero_()
    elif role != "vector":
        branches = _num_branches(config, name) if name.removesuffix(".weight").endswith(_ENDS_BRANCH) else 0
        matrix = Matrix(fan_in=parameter.shape[-1], fan_out=parameter.shape[-2], role=role, branches=branches)
        std = SCHEMES[config.initialization](config, matrix)
        _draw(parameter, std, config.initialization in _UNIFORM, seed, name)
    elif name.endswith(".mixer.decay"):
        parameter.uniform_(0.01, 16.0, generator=torch_generator(seed, "initial weights", name)).log_()
    elif name.endswith((".mixer.decay_bias", ".factor", ".expert_scale")):
        parameter.fill_(1.0)
    elif "norm" not in name or name.endswith(".bias"):
        parameter.zero_()
        if isinstance(module, ShortConvolution) and module.own_tap and parameter is module.taps:
            parameter[0] = 1.0


def _num_branches(config: ModelConfig, name: str) -> int:
    """Returns the branches in the stack: two in each layer, and one more for cross-attention or layer inputs."""
    if name.startswith("encoder_blocks."):
        return 2 * (config.num_encoder_layers or 0)
    has_third = config.architecture == "encoder_decoder" or config.layer_inputs is not None
    return (3 if has_third else 2) * config.num_layers


def _draw(parameter: Tensor, std: float, uniform: bool, seed: int, name: str) -> None:
    generator = torch_generator(seed, "initial weights", name)
    if uniform:
        parameter.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std, generator=generator)
    else:
        parameter.normal_(0.0, std, generator=generator)


class _Undrawn(TorchFunctionMode):
    """Skips the random initialization of PyTorch's modules, whose values would be overwritten.

    It takes time, and on the meta device it makes PyTorch load its whole compiler.
    """

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        settings = settings or {}
        if function in _DRAWS:
            return settings["tensor"] if "tensor" in settings else arguments[0]
        return function(*arguments, **settings)
