"""The kinds of normalisation, each a row of `NORMS`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.config import ModelConfig
from sheepop.model.fused import power_of_two

_WIDE = 2048  # numbers of a row that four warps of a Triton program normalise


class ZeroCenteredRMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * (1 + weight)``, so that weight decay pulls the scale towards 1 (Gemma, 2024)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension. Half precision is scaled in float32, where 1 + weight does not round."""
        # No needless conversions: for small tensors the calls cost more than the arithmetic.
        is_half = x.dtype.itemsize < torch.float32.itemsize
        normed = F.rms_norm(x.float() if is_half else x, self.weight.shape, None, self.eps)
        scaled = torch.addcmul(normed, normed, self.weight.to(normed.dtype))
        return scaled.to(x.dtype) if is_half else scaled


class HeadNorms(nn.Module):
    """The norm of kind `config.norm` over each of `count` heads, with a weight for each head and without a bias."""

    def __init__(self, config: ModelConfig, count: int, width: int) -> None:
        super().__init__()
        self.centres, self.added = config.norm == "layernorm", float(config.norm == "rmsnorm_zero_centered")
        self.weight = nn.Parameter(torch.full((count, width), 1 - self.added))
        self.eps = config.norm_eps

    def forward(self, x_BTHC: Tensor) -> Tensor:
        """Normalises the last dimension, and half precision in float32."""
        exact = x_BTHC.float() if x_BTHC.dtype.itemsize < torch.float32.itemsize else x_BTHC
        norm = F.layer_norm if self.centres else F.rms_norm
        normed = norm(exact, exact.shape[-1:], eps=self.eps)
        return (normed * (self.weight.to(normed.dtype) + self.added)).to(x_BTHC.dtype)


Scaling = tuple[Tensor, float, float]
"""What the root mean square is multiplied by, weight + number, and the eps under the root."""


def scaling_of(norm: nn.Module | None) -> Scaling | None:
    """The scaling of a norm by the root mean square with the same weight for all heads; None for any other."""
    if isinstance(norm, ZeroCenteredRMSNorm):
        return norm.weight, 1.0, norm.eps
    if isinstance(norm, nn.RMSNorm) and norm.eps is not None:
        return norm.weight, 0.0, norm.eps
    return None


def add_and_normalise(
    x_BTD: Tensor, found_BTD: Tensor, norm: nn.Module, found_norm: nn.Module | None = None
) -> tuple[Tensor, Tensor] | None:
    """Returns ``x + found_norm(found)`` and the `norm` of that, by one kernel on a GPU without gradients.

    It is for tensors of which `uses_triton` is true. Returns None for other norms, for other data types of weights, and
    where hooks of the norms would not be called.
    """
    norms = [each for each in (norm, found_norm) if each is not None]
    scaling, found_scaling = scaling_of(norm), scaling_of(norms[-1])
    if scaling is None or found_scaling is None:
        return None
    if any(each.dtype != x_BTD.dtype for each in (found_BTD, scaling[0], found_scaling[0])):
        return None
    if any(each._forward_hooks or each._forward_pre_hooks for each in norms):
        return None
    # Triton takes a second to load, and not every machine has it.
    from sheepop.model.triton_kernels import add_and_normalise as kernel

    x_BTD, found_BTD = x_BTD.contiguous(), found_BTD.contiguous()
    total_BTD, normed_BTD = torch.empty_like(x_BTD), torch.empty_like(x_BTD)
    width = x_BTD.shape[-1]
    (weight, added, eps), (found_weight, found_added, found_eps) = scaling, found_scaling
    kernel[(x_BTD.numel() // width,)](
        *(x_BTD, found_BTD, found_weight, weight, total_BTD, normed_BTD, width, found_eps, found_added, eps, added),
        COLUMNS=power_of_two(width),
        FOUND_NORMED=found_norm is not None,
        num_warps=8 if width > _WIDE else 4,
    )
    return total_BTD, normed_BTD


NORMS: dict[str, Callable[[ModelConfig, int, float], nn.Module]] = {
    # Ba et al. 2016: (x - mean) / sqrt(variance + eps), scaled by weight and shifted by bias.
    "layernorm": lambda config, width, eps: nn.LayerNorm(width, eps=eps, bias=bool(config.norm_bias)),
    # Zhang and Sennrich 2019: x / sqrt(mean(x^2) + eps), scaled by weight.
    "rmsnorm": lambda config, width, eps: nn.RMSNorm(width, eps=eps),
    "rmsnorm_zero_centered": lambda config, width, eps: ZeroCenteredRMSNorm(width, eps),
}


def build_norm(config: ModelConfig, width: int | None = None, eps: float | None = None) -> nn.Module:
    """The norm of kind `config.norm` over the last dimension, of size `width` (D if None), with `eps` or its own."""
    eps = config.norm_eps if eps is None else eps
    return NORMS[config.norm](config, config.d_model if width is None else width, eps)
