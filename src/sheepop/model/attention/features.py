"""What each kernel of attention can do, in words. The configuration reads this too, so nothing here loads torch."""

from __future__ import annotations

# Causal attention, and fewer key-value heads than query heads, are common to all of them.
KERNEL_FEATURES: dict[str, frozenset[str]] = {
    "blocks": frozenset({"documents", "windows", "distances", "sinks", "soft cap"}),
    "products": frozenset({"documents"}),
    "strips": frozenset({"windows", "dropout"}),
    "segments": frozenset({"documents", "windows", "distances", "dropout"}),
    "fused": frozenset(
        {"documents", "windows", "distances", "sinks", "dropout", "bidirectional attention", "partial rows"}
    ),
    "stepwise": frozenset(
        {
            "documents",
            "windows",
            "distances",
            "sinks",
            "dropout",
            "bidirectional attention",
            "partial rows",
            "soft cap",
            "visible scores",
        }
    ),
}
FEATURES = KERNEL_FEATURES["stepwise"]

# What `attention_backend` asks for; the choice is free where it says auto.
BACKEND_KERNELS: dict[str, tuple[str, ...]] = {
    "eager": ("stepwise",),
    "sdpa": ("products", "strips", "segments", "fused"),
    "flex": ("blocks",),
}
BACKEND_FEATURES: dict[str, frozenset[str]] = {
    backend: frozenset().union(*(KERNEL_FEATURES[name] for name in names)) for backend, names in BACKEND_KERNELS.items()
}
