"""Code with a gap: a document is cut in three and re-ordered, so that what stands in the middle is written last.

Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle", section 3: whole documents, cut
at characters before tokenization.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sheepop.core.errors import TokenizerError
from sheepop.core.random import derive_seed
from sheepop.data.config import FimConfig
from sheepop.tokenizer import Tokenizer

# Exact as a float, and above every seed: a rate of 1 chooses every document, a rate of 0 none.
_SEEDS = 2.0**63


class Special(Enum):
    """The sentinels: special tokens that say which part of the document follows."""

    PREFIX = "<|fim_prefix|>"
    SUFFIX = "<|fim_suffix|>"
    MIDDLE = "<|fim_middle|>"


SENTINELS: tuple[str, ...] = tuple(special.value for special in Special)


@dataclass(frozen=True, slots=True)
class Infilling:
    """Decides for each document, by its id and `seed` alone, whether and how it is re-ordered."""

    config: FimConfig
    seed: int

    def segments(self, document_id: str, text: str) -> list[str | Special]:
        """The document as text and sentinels in the order in which they are encoded; no character is lost.

        Two uniformly drawn places cut the text into prefix p, middle m and suffix s, each possibly empty. PSM is
        ``PREFIX p SUFFIX s MIDDLE m``. SPM is ``PREFIX SUFFIX s MIDDLE p m``: it reads as PSM with an empty prefix
        does, so that a model learns both as one format (section 3.1).
        """
        if not self._is_drawn(document_id, "document", self.config.rate):
            return [text]
        first, second = sorted(self._draw(document_id, cut) % (len(text) + 1) for cut in ("one cut", "other cut"))
        prefix, middle, suffix = text[:first], text[first:second], text[second:]
        if self._is_drawn(document_id, "suffix first", self.config.spm_rate):
            return [Special.PREFIX, Special.SUFFIX, suffix, Special.MIDDLE, prefix, middle]
        return [Special.PREFIX, prefix, Special.SUFFIX, suffix, Special.MIDDLE, middle]

    def _is_drawn(self, document_id: str, purpose: str, rate: float) -> bool:
        return self._draw(document_id, purpose) < rate * _SEEDS

    def _draw(self, document_id: str, purpose: str) -> int:
        return derive_seed(self.seed, "infilling", purpose, document_id)


def sentinel_ids(tokenizer: Tokenizer) -> dict[Special, int]:
    """The ids of the sentinels; raises `TokenizerError` when `tokenizer` lacks one."""
    known = tokenizer.special_tokens
    missing = [name for name in SENTINELS if name not in known]
    if missing:
        raise TokenizerError(
            f"Fill-in-the-middle needs the special tokens {', '.join(SENTINELS)}, and this tokenizer lacks "
            f"{', '.join(missing)}. Leave out tokenizer.path to train one that has them, use the tokenizer of a "
            "corpus that was built with data.infilling, or set data.infilling.rate=0."
        )
    return {special: known[special.value] for special in Special}
