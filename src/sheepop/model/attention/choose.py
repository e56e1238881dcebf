"""Which kernel computes attention, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sheepop.core.errors import ConfigError
from sheepop.model.attention.blocks import NEEDS, Blocks, has_block_kernel
from sheepop.model.attention.features import BACKEND_KERNELS
from sheepop.model.attention.fused import Fused
from sheepop.model.attention.kernel import Attending, AttentionKind, Kernel
from sheepop.model.attention.products import Products
from sheepop.model.attention.segments import Segments
from sheepop.model.attention.sight import Sight
from sheepop.model.attention.stepwise import Stepwise
from sheepop.model.attention.strips import Strips

# The first that lacks nothing is taken; the last lacks nothing ever.
KERNELS: tuple[Kernel, ...] = (Blocks(), Products(), Strips(), Segments(), Fused(), Stepwise())


@dataclass(frozen=True)
class Choice:
    """The kernel that was chosen, and those before it with what each of them lacks."""

    kernel: Kernel
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def why(self) -> str:
        """The choice in words: ``strips, since blocks needs an NVIDIA GPU, and products has no windows``."""
        reasons = ", and ".join(f"{name} {reason}" for name, reason in self.passed_over)
        return f"{self.kernel.name}, since {reasons}" if reasons else f"{self.kernel.name}, the first choice"


def choose_kernel(kind: AttentionKind, sight: Sight) -> Choice:
    """The first of `KERNELS` that can do what is asked for, and pays.

    Raises `ConfigError` where the configuration asks for FlexAttention and this device has none.
    """
    require_backend(kind.backend, kind.device, min(kind.head_dim, kind.value_dim))
    passed_over: list[tuple[str, str]] = []
    for kernel in KERNELS:
        reason = _left_out(kernel.name, kind.backend) or kernel.lacks(kind, sight)
        if reason is None:
            return Choice(kernel, tuple(passed_over))
        passed_over.append((kernel.name, reason))
    raise AssertionError("the last kernel lacks nothing")


def prepare_attention(kind: AttentionKind, sight: Sight) -> Attending:
    """The chosen kernel, made ready for a pass."""
    return choose_kernel(kind, sight).kernel.prepare(kind, sight)


def require_backend(backend: str, device: torch.device, narrowest: int) -> None:
    """Raises `ConfigError` when `backend` cannot compute heads of at least `narrowest` columns on `device`."""
    if backend == "flex" and not has_block_kernel(device, narrowest):
        raise ConfigError(
            f"model.attention_backend: flex {NEEDS}; this network runs on {device.type} with heads of {narrowest}. "
            "Set it to auto."
        )


def _left_out(kernel: str, backend: str) -> str | None:
    """Why the configuration leaves a kernel out. What all of its own lack falls to `fused` and `stepwise`.

    FlexAttention is for whole rows, and no fused kernel has scores to look at.
    """
    if backend == "auto" or kernel == "stepwise" or kernel in BACKEND_KERNELS[backend]:
        return None
    if kernel == "fused" and backend == "flex":
        return None
    return f"is left out by attention_backend: {backend}"
