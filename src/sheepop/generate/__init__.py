"""Text generation: the sampler, the paged cache, the scheduler and engine, and the generator that uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.generate.config import GenerationConfig
    from sheepop.generate.generator import Generator
    from sheepop.generate.request import Completion, FinishReason
    from sheepop.generate.updates import NotFiniteError
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = ["Completion", "FinishReason", "GenerationConfig", "Generator", "NotFiniteError"]
