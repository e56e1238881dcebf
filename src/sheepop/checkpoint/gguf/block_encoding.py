"""Writes numbers as the blocks of GGUF's quantised tensor types: the inverse of `block_decoding`.

Each encoder takes the numbers of B blocks (B, numbers per block) in float32 and returns their bytes (B, bytes per
block). The scales are chosen as llama.cpp does. In blocks of 32 numbers the outermost ones fix them. In blocks of 256,
a scale, or a scale and an offset, is fitted to each group of 16 or 32 numbers by weighted least squares: for a range of
first guesses the numbers are rounded, and the pair that fits these integers best is kept if its error is the smallest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sheepop.checkpoint.gguf.block_decoding import pack
from sheepop.core.errors import CheckpointError

# The smallest number that becomes infinite in half precision.
_BEYOND_HALF = 65520.0
# Numbers below are treated as zero when scales are fitted.
_SMALLEST = 1e-15


def _q4_0(blocks: Tensor) -> Tensor:
    scales, integers = _from_outermost(blocks, 8)
    return torch.cat((_halves(scales), pack(integers, 4, 16)), dim=1)


def _q5_0(blocks: Tensor) -> Tensor:
    scales, integers = _from_outermost(blocks, 16)
    return torch.cat((_halves(scales), pack(integers >> 4, 1, 1), pack(integers & 15, 4, 16)), dim=1)


def _q5_1(blocks: Tensor) -> Tensor:
    least = blocks.amin(dim=1, keepdim=True)
    scales = (blocks.amax(dim=1, keepdim=True) - least) / 31
    integers = ((blocks - least) * _inverse(scales) + 0.5).trunc().clamp_(0, 31).to(torch.uint8)
    high, low = pack(integers >> 4, 1, 1), pack(integers & 15, 4, 16)
    return torch.cat((_halves(scales), _halves(least), high, low), dim=1)


def _q8_0(blocks: Tensor) -> Tensor:
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    scaled = blocks * _inverse(scales)
    whole = scaled.abs().floor()
    # Not floor(|x| + 0.5): in single precision that sum can round up to the next integer.
    integers = scaled.sign() * (whole + (scaled.abs() - whole >= 0.5))
    return torch.cat((_halves(scales), integers.to(torch.int8).view(torch.uint8)), dim=1)


def _q4_k(blocks: Tensor) -> Tensor:
    head, integers = _with_offsets(blocks, largest=15, first=-1.0, steps=21)
    return torch.cat((head, pack(integers, 4, 32)), dim=1)


def _q5_k(blocks: Tensor) -> Tensor:
    head, integers = _with_offsets(blocks, largest=31, first=-0.5, steps=16)
    return torch.cat((head, pack(integers >> 4, 1, 32), pack(integers & 15, 4, 32)), dim=1)


def _q6_k(blocks: Tensor) -> Tensor:
    require_storable(blocks, _BEYOND_HALF * 128 * 32)  # beyond, also their cubes are not finite
    groups = blocks.reshape(len(blocks), 16, 16)
    fitted = _fit_scale(groups, 32)
    outermost = _outermost(fitted)
    inverse = torch.where(outermost.abs() < _SMALLEST, 0.0, -128 / outermost)
    scale = torch.where(inverse == 0, 0.0, 1 / inverse)
    halves = _halves(scale)
    small = (inverse * fitted).round().clamp_(-128, 127)
    steps = halves.view(torch.float16).float() * small
    integers = (groups / steps[..., None]).round().clamp_(-32, 31).masked_fill_(steps[..., None] == 0, 0) + 32
    integers = integers.to(torch.uint8).reshape(len(blocks), -1)
    low, high = pack(integers & 15, 4, 64), pack(integers >> 4, 2, 32)
    return torch.cat((low, high, small.to(torch.int8).view(torch.uint8), halves), dim=1)


def _from_outermost(blocks: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Returns scales for which the number with the largest magnitude becomes ``-half``, and integers from 0."""
    scales = _outermost(blocks) / -half
    integers = (blocks * _inverse(scales) + (half + 0.5)).trunc().clamp_(0, 2 * half - 1)
    return scales, integers.to(torch.uint8)


def _outermost(numbers: Tensor) -> Tensor:
    """Returns the number with the largest magnitude along the last dimension, the first one in a tie."""
    return numbers.gather(-1, numbers.abs().argmax(dim=-1, keepdim=True))


def _inverse(scales: Tensor) -> Tensor:
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    # A scale with an infinite inverse is so small that it is stored as 0, so the integers do not matter.
    return torch.where(inverse.isinf(), 0.0, inverse)


def require_storable(numbers: Tensor, largest: float = torch.inf) -> None:
    """Raises `CheckpointError` for a number that is not finite, or not below `largest`."""
    if not bool((numbers.abs() < largest).all()):
        raise CheckpointError(
            "it contains a number that is not finite, or too large for the scale of a block. Choose f32."
        )


def _halves(numbers: Tensor) -> Tensor:
    require_storable(numbers, _BEYOND_HALF)
    return numbers.to(torch.float16).view(torch.uint8)


def _with_offsets(blocks: Tensor, *, largest: int, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """Returns the scales and offsets of a block as bytes (B, 16), and its integers (B, 256) up to `largest`."""
    groups = blocks.reshape(len(blocks), 8, 32)
    scales, offsets = _fit_scale_and_offset(groups, largest, first, steps)
    scale, small_scales = _six_bits(scales)
    offset, small_offsets = _six_bits(offsets)
    head = torch.cat((_halves(scale), _halves(offset)), dim=1)
    stored = head.view(torch.float16).float()
    step = (stored[:, :1] * small_scales)[..., None]
    shifted = groups + (stored[:, 1:] * small_offsets)[..., None]
    integers = (shifted / step).round().clamp_(0, largest).masked_fill_(step == 0, 0)
    mine, other = small_scales.to(torch.uint8), small_offsets.to(torch.uint8)
    upper = torch.cat((mine[:, :4] | mine[:, 4:] >> 4 << 6, other[:, :4] | other[:, 4:] >> 4 << 6), dim=1)
    lower = mine[:, 4:] & 15 | other[:, 4:] << 4
    return torch.cat((head, upper, lower), dim=1), integers.to(torch.uint8).reshape(len(blocks), -1)


def _six_bits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a scale (B, 1) for numbers (B, 8) from 0, and their nearest multiples of it as integers up to 63."""
    most = numbers.amax(dim=1, keepdim=True).clamp_min(0)
    integers = (torch.where(most > 0, 63 / most, 0.0) * numbers).round().clamp_(0, 63)
    return most / 63, integers


def _fit_scale(groups: Tensor, half: int) -> Tensor:
    """Returns the scales (...) of groups (..., n) whose integers are from ``-half`` up to ``half - 1``.

    The weights of the squared errors are the squared numbers.
    """
    outermost = _outermost(groups).masked_fill_(groups.abs().amax(dim=-1, keepdim=True) < _SMALLEST, 0)
    cubes = groups * groups * groups
    squares = groups * groups
    scales = best = torch.zeros(groups.shape[:-1])
    for guess in (0, *range(-9, 0), *range(1, 10)):
        integers = (groups * (-(half + 0.1 * guess) / outermost)).round_().clamp_(-half, half - 1)
        product, square = (cubes * integers).sum(dim=-1), (squares * integers.square_()).sum(dim=-1)
        better = (square > 0) & (product * product > best * square)
        scales = torch.where(better, product / square, scales)
        best = torch.where(better, product * product / square, best)
    return torch.where(outermost.squeeze(-1) == 0, 0.0, scales)


def _fit_scale_and_offset(groups: Tensor, largest: int, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """Returns scales and offsets (...) of groups (..., n): numbers are near ``scale * integer - offset``.

    The weights of the squared errors are the magnitudes, plus the root of the mean square of the group.
    """
    weights = groups.square().mean(dim=-1, keepdim=True).sqrt() + groups.abs()
    weighted = weights * groups
    sum_w, sum_x = weights.sum(dim=-1), weighted.sum(dim=-1)
    most, least = groups.amax(dim=-1), groups.amin(dim=-1).clamp_max(0)
    scales, best = (most - least) / largest, torch.full_like(most, torch.inf)
    for step in (None, *range(steps)):
        guess = largest if step is None else largest + first + 0.1 * step
        inverse = guess / (most - least)
        integers = ((groups - least[..., None]) * inverse[..., None]).round_().clamp_(0, largest)
        if step is None:
            scale, low = scales, least
        else:
            products = weights * integers
            sum_l, sum_ll, sum_xl = (
                products.sum(dim=-1),
                (products * integers).sum(dim=-1),
                (weighted * integers).sum(dim=-1),
            )
            determinant = sum_w * sum_ll - sum_l * sum_l
            scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
            low = (sum_ll * sum_x - sum_l * sum_xl) / determinant
            scale, low = torch.where(low > 0, sum_xl / sum_ll, scale), low.clamp_max(0)
            low = torch.where(determinant > 0, low, torch.nan)
        misses = integers.mul_(scale[..., None]).add_(low[..., None]).sub_(groups)
        error = (weights * misses.square_()).sum(dim=-1)
        better = error < best
        scales, least = torch.where(better, scale, scales), torch.where(better, low, least)
        best = torch.where(better, error, best)
    return scales, -least


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "q4_0": _q4_0, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip
"""The function that writes blocks, by type."""
