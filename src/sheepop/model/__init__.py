"""The network on one device: configuration, layers, loss, cost, cache protocol."""

from sheepop.model.cache import Cache, KeyValueCache
from sheepop.model.config import ModelConfig
from sheepop.model.initialization import build_model
from sheepop.model.loss import IGNORE_INDEX, cross_entropy, cross_entropy_sum
from sheepop.model.transformer import Transformer

__all__ = [
    "IGNORE_INDEX",
    "Cache",
    "KeyValueCache",
    "ModelConfig",
    "Transformer",
    "build_model",
    "cross_entropy",
    "cross_entropy_sum",
]
