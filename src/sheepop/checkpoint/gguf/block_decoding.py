"""The integers, scales and offsets in the blocks of GGUF's quantised tensor types.

Each decoder takes the bytes of B blocks (B, bytes per block) and returns the `Groups` in them, whose numbers are those
that llama.cpp computes, bit for bit. The layouts are those of llama.cpp's ``ggml-common.h``: a block has one or two
scales in half precision, integers of 1 to 8 bits, and in types of 256 numbers further small scales for groups of 16 or
32 numbers. In the ``iq`` types, an index stands for four or eight numbers, a point of a fixed grid.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

# The numbers that four bits stand for in iq4_nl, and twice those of a float with 2 bits of exponent and 1 of mantissa.
_IQ4 = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8)
_FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
_POWERS_OF_THREE = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)
_IQ1_STEPS = 8  # between two points of the grid; each is shifted by one of them


class Groups(NamedTuple):
    """Equally long groups of integers in B blocks; a number is its integer times the group's scale, plus its offset.

    The integers are int8 (B, n), scales and offsets float32 (B, groups).
    """

    integers: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def numbers(self) -> Tensor:
        """Returns the numbers (B, n) in float32; a product is exact, and a sum is rounded."""
        found = torch.unflatten(self.integers, 1, (self.scales.shape[1], -1)) * self.scales[..., None]
        return (found if self.offsets is None else found.add_(self.offsets[..., None])).flatten(1)


def unpack(content: Tensor, width: int, run: int) -> Tensor:
    """Returns the integers (B, n) of `width` bits in bytes (B, m).

    Of each `run` bytes, first the lowest bits of all bytes are taken, then the next higher ones.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return ((content.reshape(len(content), -1, 1, run) >> shifts) & (2**width - 1)).reshape(len(content), -1)


def pack(integers: Tensor, width: int, run: int) -> Tensor:
    """Reverses `unpack`; the integers (B, n) are uint8 below ``2 ** width``."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    parts = integers.reshape(len(integers), -1, 8 // width, run) << shifts
    return parts.sum(dim=2, dtype=torch.uint8).reshape(len(integers), -1)


def _q1_0(content: Tensor) -> Groups:
    scale, signs = _parts(content, 2, 16)
    return Groups(2 * _signed(unpack(signs, 1, 1)) - 1, _halves(scale))


def _q2_0(content: Tensor) -> Groups:
    scale, low = _parts(content, 2, 16)
    return Groups(_signed(unpack(low, 2, 1)) - 1, _halves(scale))


def _q4_0(content: Tensor) -> Groups:
    scale, low = _parts(content, 2, 16)
    return Groups(_signed(unpack(low, 4, 16)) - 8, _halves(scale))


def _q4_1(content: Tensor) -> Groups:
    scale, least, low = _parts(content, 2, 2, 16)
    return Groups(_signed(unpack(low, 4, 16)), _halves(scale), _halves(least))


def _q5_0(content: Tensor) -> Groups:
    scale, high, low = _parts(content, 2, 4, 16)
    return Groups(_signed(unpack(low, 4, 16) | unpack(high, 1, 1) << 4) - 16, _halves(scale))


def _q5_1(content: Tensor) -> Groups:
    scale, least, high, low = _parts(content, 2, 2, 4, 16)
    return Groups(_signed(unpack(low, 4, 16) | unpack(high, 1, 1) << 4), _halves(scale), _halves(least))


def _q8_0(content: Tensor) -> Groups:
    scale, integers = _parts(content, 2, 32)
    return Groups(_signed(integers), _halves(scale))


def _q2_k(content: Tensor) -> Groups:
    small, low, scale, least = _parts(content, 16, 64, 2, 2)
    return Groups(_signed(unpack(low, 2, 32)), _halves(scale) * (small & 15), -_halves(least) * (small >> 4))


def _q3_k(content: Tensor) -> Groups:
    high, low, small, scale = _parts(content, 32, 64, 12, 2)
    scales = _signed(unpack(small[:, :8], 4, 8) | unpack(small[:, 8:], 2, 4) << 4) - 32
    return Groups(_signed(unpack(low, 2, 32) | unpack(high, 1, 32) << 2) - 4, _halves(scale) * scales)


def _q4_k(content: Tensor) -> Groups:
    scale, least, small, low = _parts(content, 2, 2, 12, 128)
    scales, offsets = _six_bits(small)
    return Groups(_signed(unpack(low, 4, 32)), _halves(scale) * scales, -_halves(least) * offsets)


def _q5_k(content: Tensor) -> Groups:
    scale, least, small, high, low = _parts(content, 2, 2, 12, 32, 128)
    scales, offsets = _six_bits(small)
    integers = _signed(unpack(low, 4, 32) | unpack(high, 1, 32) << 4)
    return Groups(integers, _halves(scale) * scales, -_halves(least) * offsets)


def _q6_k(content: Tensor) -> Groups:
    low, high, small, scale = _parts(content, 128, 64, 16, 2)
    integers = _signed(unpack(low, 4, 64) | unpack(high, 2, 32) << 4) - 32
    return Groups(integers, _halves(scale) * _signed(small))


def _tq1_0(content: Tensor) -> Groups:
    """Five digits of base three fill a byte: it is their fraction of 243, times 256, rounded up."""
    most, rest, scale = _parts(content, 48, 4, 2)
    parts = [
        (piece.reshape(len(piece), 1, -1) * _POWERS_OF_THREE[:count, None]).reshape(len(piece), -1)
        for piece, count in ((most[:, :32], 5), (most[:, 32:], 5), (rest, 4))
    ]
    digits = (torch.cat(parts, dim=1).int() * 3) >> 8
    return Groups(digits.to(torch.int8) - 1, _halves(scale))


def _tq2_0(content: Tensor) -> Groups:
    low, scale = _parts(content, 64, 2)
    return Groups(_signed(unpack(low, 2, 32)) - 1, _halves(scale))


def _mxfp4(content: Tensor) -> Groups:
    """A scale is a power of two, halved because the numbers are doubled (OCP Microscaling Formats 1.0, 5.1)."""
    exponent, low = _parts(content, 1, 16)
    scales = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent.int() - 128)
    return Groups(_FP4[unpack(low, 4, 16).int()], scales)


def _nvfp4(content: Tensor) -> Groups:
    """Each 16 numbers share a scale with 4 bits of exponent and 3 of mantissa, halved because they are doubled."""
    small, low = _parts(content, 4, 32)
    exponent, mantissa = (small.int() >> 3) & 15, (small & 7).float()
    scales = torch.where(exponent == 0, mantissa * 2.0**-10, torch.ldexp(1 + mantissa / 8, exponent - 8)).masked_fill(
        (small == 0) | (small == 127), 0
    )
    return Groups(_FP4[unpack(low, 4, 8).int()], scales)


def _iq4_nl(content: Tensor) -> Groups:
    scale, low = _parts(content, 2, 16)
    return Groups(_IQ4[unpack(low, 4, 16).int()], _halves(scale))


def _iq4_xs(content: Tensor) -> Groups:
    scale, high, small, low = _parts(content, 2, 2, 4, 128)
    scales = _signed(unpack(small, 4, 1) | unpack(high, 2, 1) << 4) - 32
    return Groups(_IQ4[unpack(low, 4, 16).int()], _halves(scale) * scales)


def _iq2_xxs(content: Tensor) -> Groups:
    scale, words = _parts(content, 2, 64)
    indices, rest = words.reshape(len(words), 8, 2, 4).unbind(dim=2)
    signs, small = _signs_and_scale(rest.reshape(len(words), -1))
    return Groups(_signed_points("iq2_xxs", indices, signs), _halves(scale) * (0.5 + small) * 0.25)


def _iq2_xs(content: Tensor) -> Groups:
    scale, words, small = _parts(content, 2, 64, 8)
    found = _words(words)
    scales = _halves(scale) * (0.5 + unpack(small, 4, 1).float()) * 0.25
    return Groups(_signed_points("iq2_xs", found & 511, _with_parity(found >> 9)), scales)


def _iq2_s(content: Tensor) -> Groups:
    scale, low, signs, high, small = _parts(content, 2, 32, 32, 8, 8)
    indices = low.int() | unpack(high, 2, 1).int() << 8
    return Groups(_signed_points("iq2_s", indices, signs), _halves(scale) * (0.5 + unpack(small, 4, 1).float()) * 0.25)


def _iq3_xxs(content: Tensor) -> Groups:
    scale, indices, rest = _parts(content, 2, 64, 32)
    signs, small = _signs_and_scale(rest)
    return Groups(_signed_points("iq3_xxs", indices, signs), _halves(scale) * (0.5 + small) * 0.5)


def _iq3_s(content: Tensor) -> Groups:
    scale, low, high, signs, small = _parts(content, 2, 64, 8, 32, 4)
    indices = low.int() | unpack(high, 1, 1).int() << 8
    return Groups(_signed_points("iq3_s", indices, signs), _halves(scale) * (1 + 2 * unpack(small, 4, 1).float()))


def _iq1_s(content: Tensor) -> Groups:
    scale, low, rest = _parts(content, 2, 32, 16)
    words = _words(rest)
    high = torch.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], dim=-1)
    points = _grid("iq1_s")[low.int() | high.reshape(low.shape) << 8].reshape(len(low), 8, -1)
    scales = _halves(scale) * (2 * (words >> 12 & 7) + 1).float() / _IQ1_STEPS
    return Groups(_shifted(points, words & 2**15 == 0), scales)


def _iq1_m(content: Tensor) -> Groups:
    low, high, rest = _parts(content, 32, 16, 8)
    words, nibbles = _words(rest), unpack(high, 4, 1).int()
    # The four highest bits of each word are a quarter of the scale.
    bits = torch.stack([(words[:, part] >> 12) << 4 * part for part in range(4)]).sum(dim=0)
    scale = bits.to(torch.uint16).view(torch.float16).float()
    small = torch.stack([words >> shift & 7 for shift in (0, 3, 6, 9)], dim=-1).reshape(len(low), -1)
    points = _grid("iq1_s")[low.int() | (nibbles & 7) << 8]
    return Groups(_shifted(points, nibbles & 8 == 0), scale[:, None] * (2 * small + 1).float() / _IQ1_STEPS)


def _parts(content: Tensor, *widths: int) -> tuple[Tensor, ...]:
    """Returns the fields of blocks with these numbers of bytes."""
    return torch.split(content, list(widths), dim=1)


def _copied(content: Tensor) -> Tensor:
    """Returns a copy, whose bytes begin where numbers of any size can."""
    return content.clone(memory_format=torch.contiguous_format)


def _halves(content: Tensor) -> Tensor:
    """Returns the numbers (B, n) in half precision as float32."""
    return _copied(content).view(torch.float16).float()


def _words(content: Tensor) -> Tensor:
    """Returns unsigned numbers of two bytes as int32."""
    return _copied(content).view(torch.uint16).int()


def _signed(integers: Tensor) -> Tensor:
    """Returns bytes as int8."""
    return integers.contiguous().view(torch.int8)


def _six_bits(small: Tensor) -> tuple[Tensor, Tensor]:
    """Returns eight scales and eight offsets from 12 bytes: four of each, with the upper bits of the other four."""
    first, second, lower = _parts(small, 4, 4, 4)
    scales = torch.cat((first & 63, lower & 15 | first >> 2 & 48), dim=1)
    offsets = torch.cat((second & 63, lower >> 4 | second >> 2 & 48), dim=1)
    return scales, offsets


def _signs_and_scale(content: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the signs (B, 4n) of each eight numbers as bits, and a scale (B, n), from n integers of four bytes."""
    integers = _copied(content).view(torch.uint32).long()
    signs = torch.stack([integers >> shift & 127 for shift in (0, 7, 14, 21)], dim=-1)
    return _with_parity(signs.reshape(len(content), -1)), (integers >> 28).float()


def _with_parity(signs: Tensor) -> Tensor:
    """Adds the eighth sign to seven, so that the number of negative signs is even."""
    parity = torch.stack([signs >> shift for shift in range(7)]).sum(dim=0) & 1
    return (signs | parity << 7).to(torch.uint8)


def _signed_points(grid: str, indices: Tensor, signs: Tensor) -> Tensor:
    """Returns the points of a grid with the signs of their coordinates."""
    points = _grid(grid)[indices.int()].reshape(len(indices), -1)
    return points * (1 - 2 * _signed(unpack(signs, 1, 1)))


def _shifted(points: Tensor, is_up: Tensor) -> Tensor:
    """Returns the coordinates (B, parts, n) of points in steps, shifted by one step up or down in each part."""
    return (_IQ1_STEPS * points + torch.where(is_up, 1, -1).to(torch.int8)[..., None]).flatten(1)


@cache
def _grid(name: str) -> Tensor:
    """Returns the points (n, coordinates) of a grid."""
    found = json.loads(resources.files(__package__).joinpath("grids.json").read_text(encoding="utf-8"))[name]
    width, coordinates = (4, 4) if name.startswith("iq3") else (2, 8)
    content = torch.tensor([list(bytes.fromhex("".join(found["points"])))], dtype=torch.uint8)
    return torch.tensor(found["values"], dtype=torch.int8)[unpack(content, width, 1).int()].reshape(-1, coordinates)


DECODERS: dict[str, Callable[[Tensor], Groups]] = {
    "q1_0": _q1_0, "q2_0": _q2_0,
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "tq1_0": _tq1_0, "tq2_0": _tq2_0, "mxfp4": _mxfp4, "nvfp4": _nvfp4,
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s,
    "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s, "iq1_s": _iq1_s, "iq1_m": _iq1_m,
}  # fmt: skip
"""The function that reads blocks, by type."""
