"""Position encodings: vectors added to the embedding, rotated queries and keys, or distances taken off the scores."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.config import ModelConfig
from sheepop.model.fused import fused
from sheepop.model.rotary_scaling import RotaryScaling, rotary_frequencies


def sinusoidal_table(num_positions: int, d_model: int, base: float = 10000.0) -> Tensor:
    """PE (num_positions, d_model), float32: sines in even columns, cosines in odd ones.

    Column c of position p holds sin or cos of ``p / base^(2 floor(c/2) / d_model)`` (Vaswani et al. 2017, 3.5).
    Computed in float64, so that far positions keep their phase.
    """
    # An explicit device: the tables hold values even when the network is laid out on the meta device.
    columns = torch.arange(d_model, dtype=torch.float64, device="cpu")
    exponents = 2 * torch.div(columns, 2, rounding_mode="floor") / d_model
    angles = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None] / base**exponents
    return torch.where(columns.long() % 2 == 0, angles.sin(), angles.cos()).float()


def rotary_tables(
    num_positions: int, rotary_dim: int, base: float = 10000.0, scaling: RotaryScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (num_positions, rotary_dim / 2) of the angles that `rotary_frequencies` gives."""
    frequencies, factor = rotary_frequencies(rotary_dim, base, scaling)
    angles = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None] * frequencies
    return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def rotate(x_BHTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns column pairs (i, i + R/2) of the first R columns of every head by the angle of its position.

    `cos` and `sin` broadcast against (B, H, T, R/2); columns from R on stay as they are. Under autocast they are
    float32 and `x_BHTC` is not: the products are taken in float32 and the result has the dtype of `x_BHTC`.
    """
    # One kernel forward and one backward where a GPU trains; a text is begun sooner than a kernel is compiled.
    return (_fused_rotation if torch.is_grad_enabled() else _rotation)(x_BHTC, cos, sin)


def _rotation(x_BHTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    first, second, rest = torch.split(x_BHTC, [width, width, x_BHTC.shape[-1] - 2 * width], dim=-1)
    # Each product is added where it is computed: attention waits for memory here, not for arithmetic.
    turned = ((first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin))
    return torch.cat((*(part.to(x_BHTC.dtype) for part in turned), rest), dim=-1)


_fused_rotation = fused(_rotation)


def alibi_slopes(num_heads: int) -> Tensor:
    """Slopes (H,), float32: ``2^(-8 h / H)`` for h = 1..H (Press et al. 2022, section 3).

    For H that is no power of two: the slopes of the next lower one, then every second slope of the next higher one.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / lower) for head in range(1, lower + 1)]
    slopes += [2 ** (-8 * head / (2 * lower)) for head in range(1, 2 * (num_heads - lower), 2)]
    return torch.tensor(slopes, device="cpu")


class AddedPositions(nn.Module):
    """A table of position vectors that are added to the token embeddings."""

    table: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.position_encoding == "learned":
            self.table = nn.Parameter(torch.empty(config.max_seq_len, config.d_model))
        else:
            table = sinusoidal_table(config.max_seq_len, config.d_model, config.position_base)
            self.register_buffer("table", table, persistent=False)

    def forward(self, x_BTD: Tensor, positions_BT: Tensor | None) -> Tensor:
        """Adds the vector of each token's position; None means 0, 1, 2, ... in every row."""
        vectors = self.table[: x_BTD.shape[1]] if positions_BT is None else F.embedding(positions_BT, self.table)
        return x_BTD + vectors.to(x_BTD.dtype)


class RotaryPositions(nn.Module):
    """Angles for `rotate`; one instance serves all layers of one kind, those with a sliding window or the others."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, *, sliding: bool = False) -> None:
        super().__init__()
        base, scaling = config.position_base, config.rotary_scaling
        if sliding and config.sliding_position_base is not None:
            base, scaling = config.sliding_position_base, None
        cos, sin = rotary_tables(config.max_seq_len, config.rotary_dim, base, scaling)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, num_positions: int, positions_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines that broadcast against (B, H, T, R/2)."""
        if positions_BT is None:
            return self.cos[:num_positions], self.sin[:num_positions]
        return F.embedding(positions_BT, self.cos)[:, None], F.embedding(positions_BT, self.sin)[:, None]
