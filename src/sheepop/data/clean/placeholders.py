"""Typed placeholders that stand in for personal values and secrets, the same in every build and on every worker."""

from __future__ import annotations

import hashlib
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from sheepop.core.random import derive_seed
from sheepop.data.clean.config import PlaceholderConfig
from sheepop.data.clean.stage import ChangeStage
from sheepop.data.documents import Draft

_DIGEST_BYTES = 2
PLACEHOLDER = re.compile(r"<[A-Z]+(?:_[A-Z]+)*_[0-9a-f]{4}>")


class Finding(NamedTuple):
    """A value to replace: where it stands, its kind, a more exact name, and the form that all spellings share."""

    start: int
    end: int
    kind: str
    name: str
    value: str


class Replacement(ChangeStage):
    """Puts a placeholder with type and short keyed hash, such as ``<EMAIL_3f2a>``, in place of every finding.

    The same value gives the same placeholder wherever it stands, so that who wrote to whom can still be followed.
    Four hexadecimal digits are few on purpose: many thousand telephone numbers share each placeholder, and even
    someone who knows the seed cannot read the number off. A secret salt also keeps others from testing a guess.
    """

    config: PlaceholderConfig

    @abstractmethod
    def findings(self, text: str, document: Draft) -> list[Finding]:
        """What to replace in a segment of the document, in the order in which it stands; without overlaps."""

    def changed(self, text: str, document: Draft) -> tuple[str, Mapping[str, int]]:
        """The text with placeholders, and how many of each name."""
        findings = self.findings(text, document)
        pieces: list[str] = []
        position = 0
        for start, end, kind, _, value in findings:
            pieces += (text[position:start], self._placeholder(kind, value))
            position = end
        return "".join((*pieces, text[position:])), Counter(finding.name for finding in findings)

    def _placeholder(self, kind: str, value: str) -> str:
        message = f"{kind}\0{value}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(message, key=self._key, digest_size=_DIGEST_BYTES).hexdigest()
        return f"<{kind.upper()}_{digest}>"

    @cached_property
    def _key(self) -> bytes:
        seed = derive_seed(self.seed, "placeholders")
        return hashlib.blake2b(f"{seed}\0{self.config.salt}".encode("utf-8", "surrogatepass")).digest()
