"""Which class builds which architecture."""

from __future__ import annotations

from sheepop.model.config import Architecture, ModelConfig
from sheepop.model.encoder_decoder import EncoderDecoder
from sheepop.model.transformer import Transformer

ARCHITECTURES: dict[Architecture, type[Transformer]] = {
    network.architecture: network for network in (Transformer, EncoderDecoder)
}


def blank_model(config: ModelConfig) -> Transformer:
    """The network of `config`, with weights that are not set yet; see `sheepop.model.initialization`."""
    return ARCHITECTURES[config.architecture](config)
