"""The network on one device: configuration, layers, loss, cost, cache protocol."""

from sheepop.model.cache import Cache, KeyValueCache
from sheepop.model.config import ModelConfig
from sheepop.model.encoder_decoder import EncoderDecoder, Memory
from sheepop.model.initialization import blank_model, build_model
from sheepop.model.logits import IGNORE_INDEX
from sheepop.model.loss import (
    LossSums,
    LossTerms,
    cross_entropy,
    cross_entropy_sum,
    linear_cross_entropy,
    linear_log_probabilities,
    score_tokens,
)
from sheepop.model.transformer import Outputs, Transformer

__all__ = [
    "IGNORE_INDEX",
    "Cache",
    "EncoderDecoder",
    "KeyValueCache",
    "LossSums",
    "LossTerms",
    "Memory",
    "ModelConfig",
    "Outputs",
    "Transformer",
    "blank_model",
    "build_model",
    "cross_entropy",
    "cross_entropy_sum",
    "linear_cross_entropy",
    "linear_log_probabilities",
    "score_tokens",
]
