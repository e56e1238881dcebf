"""Log-probabilities of tokens in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sheepop.generate.sampler import Likeliest
from sheepop.tokenizer import StreamDecoder, Tokenizer


@dataclass
class Tokens:
    """Tokens, each with its log-probability and the likeliest ones at its position; None if nothing predicts it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    likeliest: list[Likeliest | None] = field(default_factory=list)

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], likeliest: Sequence[Likeliest | None]
    ) -> None:
        """Appends tokens."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.likeliest += likeliest


class TextLogprobs:
    """The log-probabilities of a text completion, in parts.

    ``text_offset`` counts the characters that are complete before each token, from `offset` on. A token that is no
    text by itself is shown as ``bytes:`` with its bytes. ``top_logprobs`` always has the token itself; another one that
    looks the same is shown as ``token_id:`` with its id.
    """

    def __init__(self, tokenizer: Tokenizer, offset: int, *, continues: bool) -> None:
        self._tokenizer, self._offset = tokenizer, offset
        self._decoder = StreamDecoder(tokenizer, continues=continues)

    def shown(self, tokens: Tokens) -> dict[str, Any]:
        """The object for the next tokens."""
        offsets = []
        for token_id in tokens.token_ids:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push(token_id))
        return {
            "tokens": [_name(token_id, self._tokenizer) for token_id in tokens.token_ids],
            "token_logprobs": tokens.logprobs,
            "top_logprobs": list(map(self._top, tokens.token_ids, tokens.logprobs, tokens.likeliest)),
            "text_offset": offsets,
        }

    def _top(self, token_id: int, logprob: float | None, likeliest: Likeliest | None) -> dict[str, float] | None:
        if logprob is None or likeliest is None:
            return None
        names = {_name(token_id, self._tokenizer): token_id}
        found = {token_id: logprob, **dict(zip(likeliest.token_ids, likeliest.logprobs, strict=True))}
        ordered = sorted(found.items(), key=lambda pair: -pair[1])
        top = {}
        for other, value in ordered:
            name = _name(other, self._tokenizer)
            top[name if names.setdefault(name, other) == other else f"token_id:{other}"] = value
        return top


def chat_logprobs(tokens: Tokens, tokenizer: Tokenizer) -> dict[str, Any]:
    """The log-probabilities of a chat's tokens."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(data)}

    content = []
    for token_id, logprob, likeliest in zip(tokens.token_ids, tokens.logprobs, tokens.likeliest, strict=True):
        pairs = () if likeliest is None else zip(likeliest.token_ids, likeliest.logprobs, strict=True)
        content.append({**entry(token_id, logprob), "top_logprobs": [entry(*pair) for pair in pairs]})
    return {"content": content, "refusal": None}


def _name(token_id: int, tokenizer: Tokenizer) -> str:
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8") or tokenizer.decode([token_id], skip_special=False, continues=True)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
