"""The tokens of a traced text: their ids, their readable form, and their position in the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sheepop.core.errors import UsageError
from sheepop.core.facts import visible
from sheepop.generate.request import Prompt, encode_prompt, read_prompt
from sheepop.model import EncoderDecoder, Transformer
from sheepop.tokenizer import Tokenizer


@dataclass(frozen=True)
class Token:
    """A token of a prompt. ``begin:end`` is its span in the prompt's UTF-8 bytes, None if it has no bytes there."""

    position: int
    id: int
    text: str
    bytes: str
    begin: int | None
    end: int | None

    def to_dict(self) -> dict[str, Any]:
        """The token as plain data; bytes are hexadecimal."""
        return asdict(self)


class TokenReader:
    """Turns token ids into readable text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._specials = {token_id: name for name, token_id in tokenizer.special_tokens.items()}

    def tokens(self, token_ids: Sequence[int], text: str) -> list[Token]:
        """The tokens with these ids, which encode `text`, with their spans in it."""
        parts = [b"" if self._name_of(token_id) else self._tokenizer.token_bytes(token_id) for token_id in token_ids]
        given, joined = text.encode(), b"".join(parts)
        shift = len(joined) - len(given)
        is_exact = shift >= 0 and joined[shift:] == given and not joined[:shift].strip()
        found, end = [], -shift
        for position, (token_id, part) in enumerate(zip(token_ids, parts, strict=True)):
            begin, end = end, end + len(part)
            span = (max(0, begin), max(0, end)) if is_exact and part else (None, None)
            found.append(Token(position, token_id, self.text_of(token_id), part.hex(), *span))
        return found

    def text_of(self, token_id: int) -> str:
        """The readable form of a token: its text, its name, or its bytes if they are no valid UTF-8."""
        if name := self._name_of(token_id):
            return name
        part = self._tokenizer.token_bytes(token_id)
        try:
            return visible(part.decode("utf-8"))
        except UnicodeDecodeError:
            return "".join(f"<{byte:02X}>" for byte in part)

    def _name_of(self, token_id: int) -> str:
        """The name of a special token, or of an id without a token, which many models have; else an empty text."""
        if token_id >= self._tokenizer.vocab_size and token_id not in self._specials:
            return f"<{token_id}>"
        return self._specials.get(token_id, "")


def read_traced(
    model: Transformer, tokenizer: Tokenizer, prompt: str | Sequence[int], target: str | Sequence[int] | None = None
) -> Prompt:
    """Encodes a prompt for a trace; raises `UsageError` if it is empty or too long.

    Only an encoder-decoder has a `target`, whose tokens follow the token that begins every target.
    """
    has_encoder = isinstance(model, EncoderDecoder)
    read = read_prompt("The prompt", prompt, model, tokenizer, "refuse" if has_encoder else "window")
    if target is not None and len(target):
        if not has_encoder:
            raise UsageError("This model reads one text. Leave the target out; it is for an encoder-decoder.")
        read = replace(read, token_ids=[*read.token_ids, *encode_prompt("The target", target, tokenizer)])
    if len(read.token_ids) > model.config.max_seq_len:
        name = "target" if has_encoder else "prompt"
        raise UsageError(
            f"The {name} has {len(read.token_ids):,} tokens, but the model reads {model.config.max_seq_len:,}. "
            "Shorten it."
        )
    return read
