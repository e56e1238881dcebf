"""Position encodings: vectors added to embeddings, rotations of queries and keys, or a distance bias on scores."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.config import ModelConfig
from sheepop.model.fused import fused
from sheepop.model.rotary_frequencies import rotary_frequencies
from sheepop.model.rotary_scaling import RotaryScaling


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


def rotate(x_BHTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates column pairs (i, i + R/2) of the first R columns of each head by the angle of its position.

    `cos` and `sin` broadcast against (B, H, T, R/2); columns from R on are unchanged. Under autocast `cos` and `sin`
    are float32 and `x_BHTC` is not: the products are computed in float32 and the result has the dtype of `x_BHTC`.
    """
    # Training on a GPU uses one fused kernel for each pass; generation does not wait for it to compile.
    return (_fused_rotation if torch.is_grad_enabled() else _rotation)(x_BHTC, cos, sin)


def _rotation(x_BHTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    first, second, rest = torch.split(x_BHTC, [width, width, x_BHTC.shape[-1] - 2 * width], dim=-1)
    # In place, because memory bandwidth limits this step, not arithmetic.
    turned = ((first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin))
    return torch.cat((*(part.to(x_BHTC.dtype) for part in turned), rest), dim=-1)


_fused_rotation = fused(_rotation)


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
    """Tables of angles for `rotate`, shared by all layers with a sliding window or by all layers without."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, *, sliding: bool = False) -> None:
        super().__init__()
        base, scaling = config.position_base, config.rotary_scaling
        if sliding and config.sliding_position_base is not None:
            base, scaling = config.sliding_position_base, None
        cos, sin = rotary_tables(config.max_seq_len, config.rotary_width(sliding=sliding), base, scaling)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, num_positions: int, positions_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines that broadcast against (B, H, T, R/2)."""
        if positions_BT is None:
            return self.cos[:num_positions], self.sin[:num_positions]
        return F.embedding(positions_BT, self.cos)[:, None], F.embedding(positions_BT, self.sin)[:, None]
