"""Keys and values in blocks, as they lie in memory, and where the tokens of a pass find theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class HeldBlocks:
    """Keys or values of a layer in blocks (blocks, K, S, C): floats, or int8 with a scale for each head of a token."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, *, in_int8: bool
    ) -> None:
        self.dtype = dtype
        self.numbers = torch.zeros(shape, dtype=torch.int8 if in_int8 else dtype, device=device)
        self.scales = torch.zeros(shape[:3], device=device) if in_int8 else None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is stored."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)

    def store(self, blocks: Tensor, slots: Tensor, x_NKC: Tensor) -> Tensor:
        """Puts what belongs to N tokens in their places; what will be read from there."""
        if self.scales is None:
            self.numbers[blocks, :, slots] = x_NKC.to(self.dtype)  # another one under autocast
            return x_NKC
        scales_NK = x_NKC.abs().amax(-1).float().clamp(min=torch.finfo(torch.float32).tiny) / 127
        rounded_NKC = (x_NKC / scales_NK[..., None]).round().to(torch.int8)
        self.numbers[blocks, :, slots], self.scales[blocks, :, slots] = rounded_NKC, scales_NK
        return (rounded_NKC * scales_NK[..., None]).to(self.dtype)

    def gather(self, blocks: Tensor, num_keys: int) -> Tensor:
        """The first entries of these blocks (B, blocks), one behind the other: (B, K, S, C)."""
        heads = torch.arange(self.numbers.shape[1], device=self.numbers.device)[:, None]
        found, *scales = (held[blocks[:, None, :], heads].flatten(2, 3)[:, :, :num_keys] for held in self.tensors)
        return (found * scales[0][..., None]).to(self.dtype) if scales else found

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies whole blocks."""
        for held in self.tensors:
            held[target] = held[source]


@dataclass(frozen=True)
class Places:
    """Tokens of a pass, those of `rows`, whose keys are read where they lie.

    The blocks of the text of each (R, M), the first and last place that it sees, and where it is stored itself.
    """

    rows: Tensor
    table: Tensor
    firsts: Tensor
    lasts: Tensor
    blocks: Tensor
    slots: Tensor
