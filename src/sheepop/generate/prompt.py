"""Encodes a prompt, a text or a list of token ids, into the ids that the network reads."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from sheepop.core.errors import UsageError
from sheepop.model import EncoderDecoder, Transformer
from sheepop.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and as token ids.

    The completion follows `token_ids`. For an encoder-decoder the prompt's tokens are `source_ids`, and `token_ids` are
    those that begin every target.
    """

    text: str
    token_ids: list[int]
    source_ids: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt, with its prefix or end token."""
        return len(self.token_ids if self.source_ids is None else self.source_ids)


def read_prompt(
    name: str, prompt: str | Sequence[int], model: Transformer, tokenizer: Tokenizer, on_overflow: str
) -> Prompt:
    """Encodes `prompt` for `model`; messages call it `name`; see `GenerationConfig` for `on_overflow`.

    A text gets the tokenizer's prefix tokens; token ids are used as they are. Raises `UsageError` for a prompt that is
    empty, is not text, has an id outside the vocabulary, or does not fit.
    """
    has_encoder = isinstance(model, EncoderDecoder)
    token_ids = encode_prompt(name, prompt, tokenizer, () if has_encoder else tokenizer.prefix_ids)
    text = prompt if isinstance(prompt, str) else tokenizer.decode(token_ids)
    longest = model.config.max_seq_len
    if has_encoder:
        if on_overflow == "window":
            raise UsageError(
                "on_overflow=window (--window) drops the beginning of a text, but a target needs it. Leave it out."
            )
        if len(token_ids) >= longest:
            raise UsageError(
                f"{name} has {len(token_ids)} tokens, but the encoder's max_seq_len = {longest} has room for "
                f"{longest - 1} and the end token. Shorten it."
            )
        return Prompt(text, [tokenizer.bos_id], [*token_ids, tokenizer.eos_id])
    if on_overflow != "window" and len(token_ids) >= longest:
        raise UsageError(
            f"{name} has {len(token_ids)} tokens, but the model's context of max_seq_len = {longest} has room for "
            f"{longest - 1} and a new one. Shorten it, or set on_overflow=window (--window) to keep "
            "only its last tokens."
        )
    return Prompt(text, token_ids)


def encode_prompt(
    name: str, prompt: str | Sequence[int], tokenizer: Tokenizer, prefix_ids: Sequence[int] = ()
) -> list[int]:
    """Returns `prefix_ids` and the ids of a text, or given token ids unchanged; raises `UsageError` for bad input."""
    if isinstance(prompt, str):
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{name} is not valid Unicode text: character {error.start} is half of a surrogate pair, which "
                "stands for a byte that is not UTF-8. Give it as UTF-8."
            ) from None
        token_ids = [*prefix_ids, *tokenizer.encode(prompt)]
    else:
        try:
            token_ids = [operator.index(value) for value in prompt]
        except TypeError:
            raise UsageError(f"{name} must be text or a list of integer token ids, not {prompt!r}.") from None
    if not token_ids:
        raise UsageError(f"{name} is empty. Give at least one character for the model to continue.")
    for position, token_id in enumerate(token_ids):
        if not 0 <= token_id < tokenizer.vocab_size:
            raise UsageError(
                f"{name}: token id {token_id} at position {position} is not in the vocabulary. "
                f"Ids run from 0 to {tokenizer.vocab_size - 1}."
            )
    return token_ids
