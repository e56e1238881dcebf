"""Changes applied to a finished model from outside: LoRA, quantised weights, and weights read by native kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.adapt.native_products import with_native_products
    from sheepop.adapt.quantization import quantize
    from sheepop.adapt.stored_weight import StoredWeight
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = ["StoredWeight", "quantize", "with_native_products"]
