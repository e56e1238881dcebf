"""Removes documents with many slurs, sexually explicit words and threats, by a list of words."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sheepop.data.clean.config import ToxicityConfig
from sheepop.data.clean.stage import FilterStage, Removal
from sheepop.data.documents import Draft

_FILE = Path(__file__).with_name("toxic_words.txt")
_JUDGED = frozenset(("prose", "chat"))
_SHOWN = 3
# Maps ASCII letters to lower case and other ASCII but digits to a space; keeps the bytes of other alphabets.
_SPACED = bytes(code if code >= 128 else ord(chr(code).lower() if chr(code).isalnum() else " ") for code in range(256))
# U+0080 to U+00BF and U+2000 to U+3030. A fixed first byte is much faster to find than a character class.
_SIGNS = [re.compile(sign, re.DOTALL) for sign in (rb"\xc2.", rb"\xe2..", rb"\xe3\x80[\x80-\xb0]")]
# The search for a phrase starts from its longest word that is not one of these common ones.
_COMMON = (
    "a at get go going hope i in inside me my of on should shoot that the they to want will you your yourself cut "
    "hang die big free girls hard head huge naked pipe sale sales teen white wet xxx das dich ich in raus um va te ta "
    "ma sa la le de ga je ik in te ci do na video videos"
)


class ToxicityFilter(FilterStage):
    """Removes toxic prose and chats.

    The list is a weak signal: it counts words regardless of meaning. A page that quotes slurs to explain them may be
    removed, and cruelty in plain words stays.
    """

    name = "toxicity"
    config: ToxicityConfig

    def removal(self, document: Draft) -> Removal | None:
        """Why the document is removed, with its score, or None if it stays."""
        if document.kind not in _JUDGED:
            return None
        found = toxic_lexicon().hits(document.text)
        hits, score = found.entries.total(), 1000 * found.weight / max(found.words, 1)
        if hits < self.config.min_hits or score <= self.config.threshold:
            return None
        shown = ", ".join(sorted(found.entries, key=lambda entry: (-found.entries[entry], entry))[:_SHOWN])
        return Removal("words", f"weight {score:.1f} for every 1,000 words, {hits} hits, most often {shown}")


class ToxicHits(NamedTuple):
    """The lexicon entries in a text with their counts, the sum of their weights, and the words in the text."""

    entries: Counter[str]
    weight: float
    words: int


class ToxicLexicon:
    """The bundled words and phrases, each with its greatest weight in any language; a search sees each word once."""

    def __init__(self) -> None:
        weights: dict[str, float] = {}
        for line in _FILE.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                _, _, weight, *entries = line.split("|")
                for entry in entries:
                    weights[entry] = max(weights.get(entry, 0.0), float(weight))
        self._weights = weights
        self._entries: dict[bytes, list[tuple[bytes, str]]] = {}
        common = _COMMON.split()
        for entry in weights:
            words = _words(entry)
            # The longest word is usually the rarest.
            key = max(words, key=lambda word: (word.decode() not in common, len(word)))
            self._entries.setdefault(key, []).append((b" ".join(words), entry))
        self._keys = frozenset(self._entries)

    def hits(self, text: str) -> ToxicHits:
        """Finds the entries in `text`; overlapping entries all count."""
        words, joined = _words(text), b""
        entries: Counter[str] = Counter()
        for key in sorted(self._keys.intersection(words)):
            for phrase, entry in self._entries[key]:
                if phrase == key:
                    count = words.count(key)
                else:
                    joined = joined or b"".join((b" ", b"  ".join(words), b" "))
                    count = joined.count(b" " + phrase.replace(b" ", b"  ") + b" ")
                if count:
                    entries[entry] = count
        return ToxicHits(entries, sum(self._weights[entry] * count for entry, count in entries.items()), len(words))


def _words(text: str) -> list[bytes]:
    """The runs of letters and digits in lower case, as UTF-8."""
    small = text if text.isascii() else text.lower()
    folded = small.encode("utf-8", "surrogatepass").translate(_SPACED)
    for sign in _SIGNS:
        folded = sign.sub(b" ", folded)
    return folded.split()


toxic_lexicon = cache(ToxicLexicon)
