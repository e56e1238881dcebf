"""Chooses the kernel that computes attention, and explains the choice."""

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

# The first kernel that lacks nothing is chosen; the last one supports everything.
KERNELS: tuple[Kernel, ...] = (Blocks(), Products(), Strips(), Segments(), Fused(), Stepwise())


@dataclass(frozen=True)
class Choice:
    """The chosen kernel, and the kernels tried before it, each with what it lacks."""

    kernel: Kernel
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def why(self) -> str:
        """An explanation, such as ``strips, since blocks needs an NVIDIA GPU, and products has no windows``."""
        reasons = ", and ".join(f"{name} {reason}" for name, reason in self.passed_over)
        return f"{self.kernel.name}, since {reasons}" if reasons else f"{self.kernel.name}, the first choice"


def choose_kernel(kind: AttentionKind, sight: Sight) -> Choice:
    """Returns the first of `KERNELS` that has all needed features and is worth its overhead.

    Raises `ConfigError` if the configuration requires FlexAttention and this device does not support it.
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
    """Chooses a kernel and prepares it for a pass."""
    return choose_kernel(kind, sight).kernel.prepare(kind, sight)


def require_backend(backend: str, device: torch.device, narrowest: int) -> None:
    """Raises `ConfigError` when `backend` cannot compute heads of at least `narrowest` columns on `device`."""
    if backend == "flex" and not has_block_kernel(device, narrowest):
        raise ConfigError(
            f"model.attention_backend: flex {NEEDS}; this network runs on {device.type} with heads of {narrowest}. "
            "Set it to auto."
        )


def _left_out(kernel: str, backend: str) -> str | None:
    """Returns why the configuration excludes a kernel, or None if it does not.

    `fused` stays available to flex, which cannot attend with partial rows, and `stepwise` to all backends, since no
    other kernel has visible scores.
    """
    if backend == "auto" or kernel == "stepwise" or (kernel, backend) == ("fused", "flex"):
        return None
    return None if kernel in BACKEND_KERNELS[backend] else f"is left out by attention_backend: {backend}"
