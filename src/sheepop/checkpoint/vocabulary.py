"""Whether a tokenizer belongs to a model: the network needs a row of its embedding for every token."""

from __future__ import annotations

from sheepop.core.errors import CheckpointError
from sheepop.model import ModelConfig
from sheepop.tokenizer import Tokenizer


def require_fit(tokenizer: Tokenizer, config: ModelConfig, where: object) -> None:
    """Raises `CheckpointError` when the tokenizer can give an id that the model has no row for."""
    if tokenizer.vocab_size > config.vocabulary:
        raise CheckpointError(
            f"{where}: the tokenizer has {tokenizer.vocab_size} tokens but the model only {config.vocabulary} "
            "embedding rows (vocab_size). They do not belong together; use the tokenizer of this model."
        )
