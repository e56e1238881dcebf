"""The network on one device: its configuration, layers, loss, cost and cache protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.model.accounting.cost import num_parameters
    from sheepop.model.cache import Cache
    from sheepop.model.config import ModelConfig
    from sheepop.model.encoder_decoder import EncoderDecoder, Memory
    from sheepop.model.initialization import blank_model, build_model
    from sheepop.model.logits import IGNORE_INDEX
    from sheepop.model.loss import LossSums
    from sheepop.model.row_losses import LossTerms
    from sheepop.model.transformer import Outputs, Transformer
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "IGNORE_INDEX",
    "Cache",
    "EncoderDecoder",
    "LossSums",
    "LossTerms",
    "Memory",
    "ModelConfig",
    "Outputs",
    "Transformer",
    "blank_model",
    "build_model",
    "num_parameters",
]
