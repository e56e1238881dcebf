"""The stage that detects the language of prose and chat, and may keep only some languages."""

from __future__ import annotations

import string

from sheepop.data.charsets import detected_language
from sheepop.data.clean.config import UNDETERMINED, LanguageConfig
from sheepop.data.clean.stage import FilterStage, Removal
from sheepop.data.documents import Draft

_JUDGED = frozenset({"prose", "chat"})
_PLACES = 3
_UPPER, _LOWER = string.ascii_uppercase.encode(), string.ascii_lowercase.encode()
_MOST_UPPER = 0.8
# The model reads 3 MB/s, and a part of the sample is usually enough.
_FIRST_LOOK = 0.4
_SURE = 0.6


class LanguageFilter(FilterStage):
    """Sets ``language`` and ``language_score`` of prose and chat; removes documents in other languages than configured.

    The language is an ISO 639 code of fastText's model lid.176, or ``und`` if it cannot be determined. Code keeps its
    programming language.
    """

    name = "language"
    config: LanguageConfig

    def removal(self, document: Draft) -> Removal | None:
        """Why the document is removed, or None if it stays."""
        if document.kind not in _JUDGED:
            return None
        language, score = self.detected(document.text)
        document.language, document.language_score = language, score
        if self.config.keep and language not in self.config.keep:
            return Removal("language", f"{language} ({score:.2f}), not one of {', '.join(self.config.keep)}")
        return None

    def detected(self, text: str) -> tuple[str, float]:
        """The language of the text and the confidence, from 0 to 1; ``und`` if the text is short or the score low."""
        size = self.config.sample_characters
        language, score = self._look_at(text, int(size * _FIRST_LOOK))
        if score < _SURE and len(text) > size * _FIRST_LOOK:
            language, score = self._look_at(text, size)
        return (language, score) if score >= self.config.min_score else (UNDETERMINED, score)

    def _look_at(self, text: str, size: int) -> tuple[str, float]:
        """Judges `size` characters, taken from the beginning, middle and end of a longer text, as a single line."""
        sample = text.strip()
        if len(sample) > size:
            width, rest = size // _PLACES, len(sample) - size // _PLACES
            sample = " ".join(sample[begin : begin + width] for begin in (0, rest // 2, rest))
        sample = " ".join(sample.split())
        letters, upper = _letters(sample)
        if letters < self.config.min_letters:
            return UNDETERMINED, 0.0
        # The model knows words in lower case and mistakes capitals for other languages.
        language, score = detected_language(sample.lower() if upper > _MOST_UPPER * letters else sample)
        return language, round(score, 4)


def _letters(sample: str) -> tuple[int, int]:
    """The number of letters, and of capital letters if all characters are ASCII (else 0)."""
    if not sample.isascii():
        return sum(map(str.isalpha, sample)), 0
    data = sample.encode("ascii")
    upper = len(data) - len(data.translate(None, _UPPER))
    return upper + len(data) - len(data.translate(None, _LOWER)), upper
