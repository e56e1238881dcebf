"""What each way of computing attention supports, so that a configuration that asks for more is refused in words."""

from __future__ import annotations

FEATURES = frozenset({"dropout", "soft cap", "sinks", "bidirectional attention"})

# Causal attention, documents, padding, windows, distance biases and grouped heads are common to all of them.
BACKEND_FEATURES: dict[str, frozenset[str]] = {
    "eager": FEATURES,
    "sdpa": frozenset({"dropout", "sinks", "bidirectional attention"}),
    "flex": frozenset({"soft cap", "sinks"}),
}
