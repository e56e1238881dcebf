"""The words and phrases of the lexical toxicity signal, and how many of them a text holds."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

_FILE = Path(__file__).with_name("toxic_words.txt")
_KEPT = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789")
# The first bytes of punctuation in UTF-8: the signs of Latin-1, general punctuation, that of East Asia.
_BEFORE_SIGNS = frozenset(b"\xc2\xe2\xe3")
# Lower case; what is not a letter or digit becomes a space; the bytes of other alphabets stay.
_FOLD = bytes(
    code + 32
    if 65 <= code <= 90
    else code
    if code in _KEPT or (code >= 128 and code not in _BEFORE_SIGNS)
    else ord(" ")
    for code in range(256)
)
_SIGNS = re.compile(r"[\u0080-\u00bf\u2000-\u3030]")
# What remains, before a word, of signs that touch it.
_REMAINS = ("", *(sign.encode()[1:].decode("latin-1") for sign in "\u00a0¡¿«»‘’‚“”„–—…\u202f"))


# A phrase is looked for by its longest word that is not one of these, which stand in most texts.
_COMMON = (
    "a at get go going hope i in inside me my of on should shoot that the they to want will you your yourself cut "
    "hang die big free girls hard head huge naked pipe sale sales teen white wet xxx das dich ich in raus um va te ta "
    "ma sa la le de ga je ik in te ci do na video videos"
)


class ToxicHits(NamedTuple):
    """What of the lexicon a text holds: entries by number, the sum of their weights, and the words of the text."""

    entries: Counter[str]
    weight: float
    words: int

    @property
    def score(self) -> float:
        """The sum of the weights for every 1,000 words."""
        return 1000 * self.weight / max(self.words, 1)


class ToxicLexicon:
    """Weighted words and phrases. A text is asked with one look at each of its words."""

    def __init__(self, weights: dict[str, float]) -> None:
        self._weights = weights
        common = _COMMON.split()
        self._entries: dict[bytes, list[tuple[bytes, str]]] = {}
        for entry in weights:
            words = folded(entry).split()
            # The longest word is the rarest as a rule.
            key = max(words, key=lambda word: (word.decode() not in common, len(word)))
            self._entries.setdefault(key, []).append((b" ".join(words), entry))
        self._keys = frozenset(self._entries)
        keys = [key.decode() for key in self._keys]
        forms = [_fold(form) for key in keys for form in (key, key.capitalize(), key.upper())]
        self._spelled = frozenset(before.encode("latin-1") + form for form in forms for before in _REMAINS)

    def hits(self, text: str, fewest: int = 1) -> ToxicHits:
        """The entries in `text`; of words that stand in several entries at one place, each counts.

        None are looked for when a quick look, which knows no words in mixed case with letters beyond ASCII, finds
        fewer than `fewest`.
        """
        entries: Counter[str] = Counter()
        quick = _fold(text)
        words = quick.split()
        seen = self._spelled.intersection(words)
        if not seen or sum(map(quick.count, seen)) < fewest:
            return ToxicHits(entries, 0.0, len(words))
        words = folded(text).split()
        found = self._keys.intersection(words)
        if found:
            joined = b"".join((b" ", b"  ".join(words), b" "))
            numbers = Counter(word for word in words if word in found)
            for key in sorted(found):
                for phrase, entry in self._entries[key]:
                    spaced = b" " + phrase.replace(b" ", b"  ") + b" "
                    count = numbers[key] if phrase == key else joined.count(spaced)
                    if count:
                        entries[entry] = count
        return ToxicHits(entries, sum(self._weights[entry] * count for entry, count in entries.items()), len(words))


def folded(text: str) -> bytes:
    """UTF-8 in lower case with a space for every sign that is no letter."""
    return _fold(text) if text.isascii() else _fold(_SIGNS.sub(" ", text.lower()))


def _fold(text: str) -> bytes:
    """Does to ASCII what `folded` does to all characters, and is far quicker on text that has others."""
    return text.encode("utf-8", "surrogatepass").translate(_FOLD)


@cache
def toxic_lexicon() -> ToxicLexicon:
    """The bundled lexicon; an entry that several languages share has its greatest weight."""
    weights: dict[str, float] = {}
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            _, _, weight, *entries = line.split("|")
            for entry in entries:
                weights[entry] = max(weights.get(entry, 0.0), float(weight))
    return ToxicLexicon(weights)
