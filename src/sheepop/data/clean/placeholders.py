"""Typed placeholders that stand in for personal values and secrets, the same in every build and on every worker."""

from __future__ import annotations

import hashlib
import re

from sheepop.core.random import derive_seed

_DIGEST_BYTES = 2
PLACEHOLDER = re.compile(r"<[A-Z]+(?:_[A-Z]+)*_[0-9a-f]{4}>")


class Placeholders:
    """Names values by type and by a short keyed hash, such as ``<EMAIL_3f2a>``.

    The same value gives the same placeholder wherever it stands, so that who wrote to whom can still be followed.
    Four hexadecimal digits are few on purpose: many thousand telephone numbers share each placeholder, and even
    someone who knows the seed cannot read the number off. A secret `salt` also keeps others from testing a guess.
    """

    def __init__(self, seed: int, salt: str = "") -> None:
        self._key = hashlib.blake2b(
            f"{derive_seed(seed, 'placeholders')}\0{salt}".encode("utf-8", "surrogatepass")
        ).digest()

    def of(self, kind: str, value: str) -> str:
        """The placeholder of `value`, which is already in the form that all its spellings share."""
        message = f"{kind}\0{value}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(message, key=self._key, digest_size=_DIGEST_BYTES).hexdigest()
        return f"<{kind.upper()}_{digest}>"
