"""What a kernel of attention is: it says what it lacks, prepares a pass, and attends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sheepop.model.attention.features import KERNEL_FEATURES
from sheepop.model.attention.sight import CPU, Sight, number_documents
from sheepop.model.probe import Probe


@dataclass(frozen=True)
class AttentionKind:
    """What some layers of a network have in common: what they see, and what their kernel has to be able to do.

    A query sees `window` keys, itself included (all when None); `slopes` (H,) times the distance to a key is taken off
    its score. `watched` says that someone looks at scores or weights, `compiled` that the layers are compiled, and
    `cached` that a cache takes part. `dtype` is that of queries, keys and values on `device`.
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
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32

    @property
    def features(self) -> frozenset[str]:
        """What it asks of a kernel, in the words of `KERNEL_FEATURES`; what is seen is asked for by `Sight`."""
        asked = {
            "dropout": self.dropout > 0,
            "distances": self.slopes is not None,
            "sinks": self.sinks,
            "soft cap": self.soft_cap,
            "visible scores": self.watched,
        }
        return frozenset(feature for feature, needed in asked.items() if needed)

    def sight(
        self,
        num_queries: int,
        num_keys: int | None = None,
        *,
        document_ids: Tensor | None = None,
        starts: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Sight:
        """What T queries of these layers may see of S keys (T when None); see `Sight`, which may raise."""
        num_keys = num_queries if num_keys is None else num_keys
        documents = None if document_ids is None else number_documents(document_ids)
        return Sight(num_queries, num_keys, self.causal, self.window, documents, starts, key_mask, self.device)


class Score(NamedTuple):
    """How one layer makes scores and weights of queries and keys.

    `scale` is 1 / sqrt(C) when None. With `soft_cap` c scores s become ``c tanh(s / c)`` before any is hidden (Gemma 2,
    2024). `sinks` (H,) are logits that take part in every query's softmax and have no value (Agarwal et al. 2025,
    gpt-oss). `dropout` falls on the weights. `probes` see scores and weights where a kernel has them.
    """

    scale: float | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    probes: tuple[Probe, Probe] | None = None

    def check(self, kernel: str) -> None:
        """Raises `ValueError` for what `kernel` cannot do: it was chosen for another kind of attention."""
        asked = {"soft cap": self.soft_cap is not None, "sinks": self.sinks is not None, "dropout": self.dropout > 0}
        for feature, needed in asked.items():
            if needed and feature not in KERNEL_FEATURES[kernel]:
                raise ValueError(f"attention by {kernel} has no {feature}; choose_kernel was not told of it")


PLAIN = Score()


class Attending(Protocol):
    """A kernel made ready for one pass; all layers of a kind share it."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What was made ready, such as a mask."""

    def attend(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, score: Score = PLAIN) -> Tensor:
        """softmax(scale Q K^T + M) V (Vaswani et al. 2017, equation 1), (B, H, T, C).

        K key-value heads serve H query heads in groups of H / K (Ainslie et al. 2023). Raises `ValueError` for what
        the kernel cannot do.
        """


class Kernel(Protocol):
    """One way to compute attention."""

    @property
    def name(self) -> str:
        """Its name among `KERNEL_FEATURES`."""

    def lacks(self, kind: AttentionKind, sight: Sight) -> str | None:
        """Why it is not to be taken here, as the rest of a sentence about it; None where it is."""

    def prepare(self, kind: AttentionKind, sight: Sight) -> Attending:
        """Makes ready what all layers of the kind share in one pass."""


def missing(kernel: str, kind: AttentionKind, sight: Sight) -> str | None:
    """The features that are asked for and that `kernel` does not have, as the rest of a sentence."""
    absent = (kind.features | sight.features) - KERNEL_FEATURES[kernel]
    return f"has no {' and no '.join(sorted(absent))}" if absent else None
