"""The interface of attention kernels: a kernel reports what it lacks, prepares a pass, and attends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sheepop.model.attention.features import KERNEL_FEATURES
from sheepop.model.attention.sight import CPU, Sight, number_documents
from sheepop.model.probe import Probe


def absorbs(num_queries: int, num_keys: int, latents: tuple[int, int]) -> bool:
    """Whether queries attend to latents themselves, since computing the keys and values of all heads takes longer.

    Then queries instead of keys are multiplied by the matrices of `AttentionKind.latents`, but scores and weighted sums
    are as wide as latents (DeepSeek-V2, 2024, section 2.1.2).
    """
    rank, width = latents
    return (num_keys - num_queries) * rank * width > num_queries * num_keys * (2 * rank - width)


@dataclass(frozen=True)
class AttentionKind:
    """The properties that layers with the same attention share: what queries see, and what the kernel must support.

    A query sees `window` keys, its own included (all if None); `slopes` (H,) times the distance to a key is subtracted
    from its score. `watched`: scores or weights are observed. `compiled`: the layers are compiled. `cached`: a cache is
    used. `dtype` is the data type of queries, keys and values. `latents` are the widths of the latents and of what is
    computed from one in each head, without the shared key; None is attention without latents.
    """

    window: int | None = None
    slopes: Tensor | None = None
    causal: bool = True
    head_dim: int = 0
    value_dim: int = 0
    dropout: float = 0.0
    soft_cap: bool = False
    sinks: bool = False
    backend: str = "auto"
    watched: bool = False
    compiled: bool = False
    cached: bool = False
    latents: tuple[int, int] | None = None
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    @property
    def features(self) -> frozenset[str]:
        """The entries of `KERNEL_FEATURES` that a kernel needs, except those of the mask, which `Sight` lists."""
        required = {
            "dropout": self.dropout > 0,
            "distances": self.slopes is not None,
            "sinks": self.sinks,
            "soft cap": self.soft_cap,
            "visible scores": self.watched,
        }
        return frozenset(feature for feature, needed in required.items() if needed)

    def sight(
        self,
        num_queries: int,
        num_keys: int | None = None,
        *,
        document_ids: Tensor | None = None,
        starts: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Sight:
        """Returns which of S keys (T if None) T queries of these layers may see; raises the errors of `Sight`."""
        num_keys = num_queries if num_keys is None else num_keys
        documents = None if document_ids is None else number_documents(document_ids)
        return Sight(num_queries, num_keys, self.causal, self.window, documents, starts, key_mask, self.device)


class Score(NamedTuple):
    """How one layer computes scores and weights from queries and keys.

    `scale` is 1 / sqrt(C) if None. A `soft_cap` c turns scores s into ``c tanh(s / c)`` before masking (Gemma 2, 2024).
    `sinks` (H,) are logits that take part in each query's softmax but have no value (Agarwal et al. 2025, gpt-oss).
    `dropout` applies to the weights. `probes` see scores and weights, if the kernel has them.
    """

    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    probes: tuple[Probe, Probe] | None = None

    def check(self, kernel: str) -> None:
        """Raises `ValueError` for a feature that `kernel` lacks, because it was chosen for another `AttentionKind`."""
        used = {"soft cap": self.soft_cap is not None, "sinks": self.sinks is not None, "dropout": self.dropout > 0}
        for feature, needed in used.items():
            if needed and feature not in KERNEL_FEATURES[kernel]:
                raise ValueError(f"{kernel} attention has no {feature}; choose_kernel did not know of it")


PLAIN = Score()


class Attending(Protocol):
    """A kernel prepared for one pass, which all layers of a kind share."""

    def attend(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, score: Score = PLAIN) -> Tensor:
        """Returns softmax(scale Q K^T + M) V (Vaswani et al. 2017, equation 1), (B, H, T, C).

        Each of K key-value heads serves H / K query heads (Ainslie et al. 2023). Raises `ValueError` for a feature that
        the kernel lacks.
        """


class Kernel(Protocol):
    """One way to compute attention."""

    @property
    def name(self) -> str:
        """Its key in `KERNEL_FEATURES`."""

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """Returns why this kernel is not suitable, as the rest of a sentence that begins with its name, or None."""

    def prepare(self, kind: AttentionKind, sight: Sight) -> Attending:
        """Prepares the tensors that all layers of the kind share in one pass."""


def missing(kernel: str, kind: AttentionKind, sight: Sight) -> str | None:
    """Returns the needed features that `kernel` lacks, as the rest of a sentence, or None."""
    absent = (kind.features | sight.features) - KERNEL_FEATURES[kernel]
    return f"has no {' and no '.join(sorted(absent))}" if absent else None
