"""Position encodings: sinusoids added to the embedding, learned vectors added to it, or rotated queries and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheepop.model.config import ModelConfig


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


def rotary_tables(num_positions: int, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines (num_positions, head_dim / 2), of ``p base^(-2i / head_dim)`` (Su et al. 2021, 3.2.2)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    angles = torch.arange(num_positions, dtype=torch.float64, device="cpu")[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rotate(x_BHTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns column pairs (i, i + C/2) of every head by the angle of its position; norms are kept.

    `cos` and `sin` broadcast against (B, H, T, C/2). Under autocast they are float32 and `x_BHTC` is not: the
    products are taken in float32 and the result has the dtype of `x_BHTC`.
    """
    first, second = x_BHTC.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHTC.dtype)


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
    """Angles for `rotate`; one instance serves all layers."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        cos, sin = rotary_tables(config.max_seq_len, config.head_size, config.position_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, num_positions: int, positions_BT: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines that broadcast against (B, H, T, C/2)."""
        if positions_BT is None:
            return self.cos[:num_positions], self.sin[:num_positions]
        return F.embedding(positions_BT, self.cos)[:, None], F.embedding(positions_BT, self.sin)[:, None]
