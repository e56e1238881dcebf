"""Which replica a request belongs to: the one that has read its beginning before."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

_CHARACTERS, _TOKENS = 256, 64


def beginning(body: bytes, tenant: str) -> str:
    """A name for how a request begins, equal for those that should share a replica; empty where it does not matter.

    That is, of one tenant and one model: a conversation up to the user's first message, the first 256 characters of a
    text, or the first 64 of its tokens.
    """
    try:
        asked = from_json(body)
    except ValueError:
        return ""  # the replica says what is wrong with it
    start = _start(asked) if isinstance(asked, dict) else None
    if not start:
        return ""
    return hashlib.blake2b(repr((tenant, asked.get("model"), start)).encode(), digest_size=16).hexdigest()


def _start(asked: dict[str, Any]) -> Any:
    messages, prompt = asked.get("messages"), asked.get("prompt")
    if isinstance(messages, list):
        of_user = (
            n for n, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user"
        )
        return messages[: next(of_user, 0) + 1]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt[:_CHARACTERS]
    return prompt[:_TOKENS] if isinstance(prompt, list) else None


def home_of(key: str, replicas: Sequence[str]) -> str:
    """The replica that requests with this key go to.

    Each replica draws a number for the key from a hash, and the highest wins (rendezvous hashing, Thaler and
    Ravishankar 1998): whoever asks finds the same one, and when a replica is lost, only its own keys move.
    """
    return max(replicas, key=lambda replica: hashlib.blake2b(f"{replica} {key}".encode()).digest())
