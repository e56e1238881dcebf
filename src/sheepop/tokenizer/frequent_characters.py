"""Which characters a vocabulary of characters begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# The share of a text that its frequent characters make up, as is usual with SentencePiece.
_COVERAGE = 0.9995

PRINTABLE_ASCII = tuple(map(chr, range(0x21, 0x7F)))


def frequent_characters(texts: Iterable[str]) -> list[str]:
    """The most frequent characters that make up 99.95 percent of `texts`, in the order of their code points."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    needed = _COVERAGE * counts.total()
    chosen, covered = [], 0
    for character in sorted(counts, key=lambda character: (-counts[character], character)):
        if covered >= needed:
            break
        chosen.append(character)
        covered += counts[character]
    return sorted(chosen)
