"""The features of each attention kernel. The configuration reads them too, so this module does not load torch."""

from __future__ import annotations

_FUSED = frozenset({"documents", "windows", "distances", "sinks", "dropout", "bidirectional attention", "partial rows"})
# All kernels support causal attention and fewer key-value heads than query heads.
KERNEL_FEATURES: dict[str, frozenset[str]] = {
    "blocks": frozenset({"documents", "windows", "distances", "sinks", "soft cap"}),
    "products": frozenset({"documents"}),
    "strips": frozenset({"windows", "dropout"}),
    "segments": frozenset({"documents", "windows", "distances", "dropout"}),
    "fused": _FUSED,
    "stepwise": _FUSED | {"soft cap", "visible scores"},
}
FEATURES = KERNEL_FEATURES["stepwise"]

# The kernels of each `attention_backend`; `auto` may use any.
BACKEND_KERNELS: dict[str, tuple[str, ...]] = {
    "eager": ("stepwise",),
    "sdpa": ("products", "strips", "segments", "fused"),
    "flex": ("blocks",),
}
BACKEND_FEATURES: dict[str, frozenset[str]] = {
    backend: frozenset().union(*(KERNEL_FEATURES[name] for name in names)) for backend, names in BACKEND_KERNELS.items()
}
