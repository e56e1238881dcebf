"""Position encodings: vectors added to embeddings, rotations of queries and keys, or a distance bias on scores."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.config import ModelConfig
from sheepop.model.fused import fused, power_of_two, uses_triton
from sheepop.model.norms import Scaling
from sheepop.model.rotary_frequencies import rotary_frequencies
from sheepop.model.rotary_scaling import RotaryScaling

_FIRST_POSITIONS = 2048


def sinusoidal_table(num_positions: int, d_model: int, base: float = 10000.0) -> Tensor:
    """Returns PE (num_positions, d_model), float32, with sines in even columns and cosines in odd ones.

    Column c of position p is the sin or cos of ``p / base^(2 floor(c/2) / d_model)`` (Vaswani et al. 2017, 3.5).
    Computed in float64, so that far positions keep their phase.
    """
    # An explicit device, so that the tables have values even if the network is built on the meta device.
    columns = torch.arange(d_model, dtype=torch.float64, device="cpu")
    exponents = 2 * torch.div(columns, 2, rounding_mode="floor") / d_model
    angles = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None] / base**exponents
    return torch.where(columns.long() % 2 == 0, angles.sin(), angles.cos()).float()


def rotary_tables(
    num_positions: int, rotary_dim: int, base: float = 10000.0, scaling: RotaryScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines (num_positions, rotary_dim / 2) of the angles of `rotary_frequencies`."""
    frequencies, factor = rotary_frequencies(rotary_dim, base, scaling)
    angles = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None] * frequencies
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


Angles = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles."""


def rotated(x_BHTC: Tensor, angles: Angles | None) -> Tensor:
    """What `rotate` returns; `x_BHTC` itself without angles."""
    return x_BHTC if angles is None else rotate(x_BHTC, *angles)


def rotate(x_BHTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates column pairs (i, i + R/2) of the first R columns of each head by the angle of its position.

    `cos` and `sin` broadcast against (B, H, T, R/2); columns from R on are unchanged. Under autocast `cos` and `sin`
    are float32 and `x_BHTC` is not: the products are computed in float32 and the result has the dtype of `x_BHTC`.
    """
    if torch.is_grad_enabled():
        return _fused_rotation(x_BHTC, cos, sin)
    return rotate_by_triton(x_BHTC, cos, sin) if uses_triton(x_BHTC) else _rotation(x_BHTC, cos, sin)


def _rotation(x_BHTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    first, second, rest = torch.split(x_BHTC, [width, width, x_BHTC.shape[-1] - 2 * width], dim=-1)
    # In place, because memory bandwidth limits this step, not arithmetic.
    turned = ((first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin))
    return torch.cat((*(part.to(x_BHTC.dtype) for part in turned), rest), dim=-1)


_fused_rotation = fused(_rotation)


def rotate_by_triton(x_BHTC: Tensor, cos: Tensor, sin: Tensor, norm: Scaling | None = None) -> Tensor:
    """What `rotate` returns, by one kernel that computes in float32, without gradients.

    A `norm` of each head, of those that `norms.scaling_of` knows, comes first.
    """
    # Triton takes a second to load, and not every machine has it.
    from sheepop.model.triton_kernels import rotate_heads

    rows, heads, tokens, width = x_BHTC.shape
    half = cos.shape[-1]
    x_BHTC = x_BHTC if x_BHTC.stride(-1) == 1 else x_BHTC.contiguous()
    cos, sin = (table.contiguous().expand(rows, 1, tokens, half) for table in (cos, sin))
    y_BHTC = torch.empty_like(x_BHTC, memory_format=torch.contiguous_format)
    weight, added, eps = (x_BHTC, 0.0, 0.0) if norm is None else norm
    rotate_heads[(rows * tokens,)](
        *(x_BHTC, cos, sin, weight, y_BHTC, heads, tokens),
        *(*x_BHTC.stride()[:3], cos.stride(0), cos.stride(2), eps, added),
        WIDTH=width,
        HALF=half,
        HEADS=power_of_two(heads),
        COLUMNS=power_of_two(width),
        HALVES=power_of_two(half),
        NORMED=norm is not None,
    )
    return y_BHTC


def alibi_slopes(num_heads: int) -> Tensor:
    """Returns the slopes (H,), float32: ``2^(-8 h / H)`` for h = 1..H (Press et al. 2022, section 3).

    If H is not a power of two: the slopes of the next lower power, then every second slope of the next higher one.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / lower) for head in range(1, lower + 1)]
    slopes += [2 ** (-8 * head / (2 * lower)) for head in range(1, 2 * (num_heads - lower), 2)]
    return torch.tensor(slopes, device="cpu")


class AddedPositions(nn.Module):
    """A table of position vectors, which are added to the token embeddings."""

    table: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.position_encoding == "learned":
            self.table = nn.Parameter(torch.empty(config.max_seq_len, config.d_model))
        else:
            table = sinusoidal_table(config.max_seq_len, config.d_model, config.position_base)
            self.register_buffer("table", table, persistent=False)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None) -> Tensor:
        """Adds the vector of each token's position; positions of None are 0, 1, 2, ... in every row."""
        vectors = self.table[: x_BTD.shape[1]] if positions_BT is None else F.embedding(positions_BT, self.table)
        return x_BTD + vectors.to(x_BTD.dtype)


class RotaryPositions(nn.Module):
    """Tables of angles for `rotate`, shared by all layers with a sliding window or by all layers without.

    They have the first positions of a long context, and grow when others are needed.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, *, sliding: bool = False) -> None:
        super().__init__()
        base, scaling = config.position_base, config.rotary_scaling
        if sliding and config.sliding_position_base is not None:
            base, scaling = config.sliding_position_base, None
        self._angles = config.rotary_width(sliding=sliding), base, scaling
        self._longest = config.max_seq_len
        cos, sin = rotary_tables(min(_FIRST_POSITIONS, self._longest), *self._angles)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, num_positions: int, positions_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines that broadcast against (B, H, T, R/2)."""
        if len(self.cos) < self._longest:
            self._grow(num_positions, positions_BT)
        if positions_BT is None:
            return self.cos[:num_positions], self.sin[:num_positions]
        return F.embedding(positions_BT, self.cos)[:, None], F.embedding(positions_BT, self.sin)[:, None]

    def _grow(self, num_positions: int, positions_BT: Tensor | None) -> None:
        if positions_BT is not None:
            # Reading positions would wait for a GPU, so the tables there get all positions at once.
            on_cpu = positions_BT.device.type == "cpu" and positions_BT.numel() > 0
            num_positions = int(positions_BT.max()) + 1 if on_cpu else self._longest
        if num_positions <= len(self.cos):
            return
        with torch.inference_mode(False):  # gradients need ordinary tensors
            cos, sin = rotary_tables(min(self._longest, 1 << (num_positions - 1).bit_length()), *self._angles)
            # Another thread that sees the longer cosines must find sines for them.
            self.sin = sin.to(self.sin)
            self.cos = cos.to(self.cos)
