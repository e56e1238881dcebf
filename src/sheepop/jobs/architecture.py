"""What the architecture of a network asks of the data it is trained on."""

from __future__ import annotations

from sheepop.core.errors import ConfigError
from sheepop.data import Corpus
from sheepop.data.pairs import pair_settings
from sheepop.jobs.config import SheepOpConfig


def reads_pairs(config: SheepOpConfig) -> bool:
    """Whether the network of `config` learns from pairs of source and target."""
    return config.model.architecture == "encoder_decoder"


def fit_data_to_architecture(config: SheepOpConfig, asked: SheepOpConfig) -> SheepOpConfig:
    """`config` with the settings under `data` that its architecture implies; `asked` is what the user gave.

    Raises `ConfigError` for settings that the architecture cannot have.
    """
    if not reads_pairs(config):
        if config.data.extract.pair is not None:
            raise ConfigError(
                "data.extract.pair reads pairs of source and target, which a decoder cannot learn from. Set "
                "model.architecture=encoder_decoder, or use data.extract.template to turn each record into text."
            )
        return config
    if config.training.sequence_length_warmup:
        raise ConfigError(
            "training.sequence_length_warmup cuts rows of text, but the pairs of an encoder-decoder are never cut. "
            "Leave it out."
        )
    return config.replace(data=pair_settings(config.data, asked.data).model_dump())


def require_fitting_corpus(config: SheepOpConfig, corpus: Corpus) -> None:
    """Raises `ConfigError` unless the corpus holds what the network of `config` learns from."""
    if reads_pairs(config) and not corpus.holds_pairs:
        raise ConfigError(
            f"The corpus {corpus.directory} holds text, but an encoder-decoder learns from pairs of source and target. "
            "Give JSON lines with these two fields, or a corpus built with data.extract.pair=[source,target]."
        )
    if corpus.holds_pairs and not reads_pairs(config):
        raise ConfigError(
            f"The corpus {corpus.directory} holds pairs of source and target, but a decoder learns from text. Set "
            "model.architecture=encoder_decoder, or give text."
        )
