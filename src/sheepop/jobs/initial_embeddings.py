"""A new network's token embeddings begin as the vectors of words that others have learned."""

from __future__ import annotations

from pathlib import Path

import torch

from sheepop.checkpoint.word_vectors import read_word_vectors, vector_dimension
from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.core.facts import counted
from sheepop.jobs.fork import Fork
from sheepop.model import Transformer
from sheepop.tokenizer import Tokenizer
from sheepop.train.config import TrainingConfig


def set_initial_embeddings(model: Transformer, tokenizer: Tokenizer, path: Path, console: Console) -> None:
    """Gives every token that is a whole word of the file at `path` that word's vector; the others stay as they are.

    Raises `ConfigError` when the vectors have another size or no word of the file is a token, and `DataError` when the
    file is damaged.
    """
    weight = model.embedding.weight
    found = read_word_vectors(path, words_of(tokenizer), weight.shape[1])
    if len(found.ids) == 0:
        raise ConfigError(
            f"training.initial_embeddings: {path} has {counted(found.num_words, 'word')}, none of which is a token. "
            "Words must match exactly. Use a tokenizer with whole words, for example a larger one, or leave it out."
        )
    with torch.no_grad():
        weight[torch.from_numpy(found.ids).to(weight.device)] = torch.from_numpy(found.vectors).to(weight)
    if found.num_repeated:
        console.warn(
            f"{path} has {counted(found.num_repeated, 'further vector')} for words it already had; the first vector "
            "of each word is used."
        )
    console.info(
        f"{len(found.ids):,} of {tokenizer.vocab_size:,} tokens start with vectors from {path}, which has "
        f"{counted(found.num_words, 'word')}; the others start at random."
    )


def check_initial_embeddings(path: Path, d_model: int) -> None:
    """Raises `ConfigError` or `DataError` when the beginning of the file shows already that it cannot be used."""
    if (dimension := vector_dimension(path)) != d_model:
        raise ConfigError(
            f"The vectors in training.initial_embeddings = {path} have {dimension} numbers, but the model's have "
            f"{d_model} (model.d_model). Set model.d_model={dimension}, or use vectors of that size."
        )


def refuse_both(training: TrainingConfig, fork: Fork | None) -> None:
    """Raises `ConfigError` when a run would begin with word vectors and with the weights of another model."""
    if training.initial_embeddings is not None and fork is not None:
        raise ConfigError(
            f"training.initial_embeddings = {training.initial_embeddings} is for a new network, but the weights of "
            f"{fork.path} already have embeddings. Leave out one of the two."
        )


def words_of(tokenizer: Tokenizer) -> dict[bytes, list[int]]:
    """The words that are one token, with the ids that they have at the beginning of a text and behind a space."""
    special = set(tokenizer.special_tokens.values())
    texts = {
        text.strip()
        for token_id in range(tokenizer.vocab_size)
        if token_id not in special and (text := _text(tokenizer.token_bytes(token_id)))
    }
    words = sorted(word for word in texts if word)
    found: dict[bytes, list[int]] = {}
    encoded = tokenizer.encode_batch([f"{space}{word}" for word in words for space in ("", " ")])
    for place, word in enumerate(words):
        alone = {ids[0] for ids in encoded[2 * place : 2 * place + 2] if len(ids) == 1} - special
        if alone:
            found[word.encode("utf-8")] = sorted(alone)
    return found


def _text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None
