"""Which replica gets a request: the one that has probably cached its prefix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

_CHARACTERS, _TOKENS = 256, 64


def beginning(body: bytes, tenant: str) -> str:
    """Returns a hash of a request's prefix, equal for requests that should share a replica; empty without a prefix.

    It covers the tenant, the model, and a conversation up to the user's first message, the first 256 characters of a
    text, or its first 64 tokens.
    """
    try:
        requested = from_json(body)
    except ValueError:
        return ""  # the replica reports the error
    start = _start(requested) if isinstance(requested, dict) else None
    if not start:
        return ""
    return hashlib.blake2b(repr((tenant, requested.get("model"), start)).encode(), digest_size=16).hexdigest()


def _start(requested: dict[str, Any]) -> Any:
    messages, prompt = requested.get("messages"), requested.get("prompt")
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
    """Returns the replica for requests with this key.

    It has the highest hash of its name and the key (rendezvous hashing, Thaler and Ravishankar 1998): every caller
    finds the same one, and when a replica is lost, only its own keys move.
    """
    return max(replicas, key=lambda replica: hashlib.blake2b(f"{replica} {key}".encode()).digest())
