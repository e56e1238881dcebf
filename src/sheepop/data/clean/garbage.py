"""Rules that find garbage in each kind of document.

Prose and chat: unprintable, endlessly repeated or encoded text, and pages that say only that they are empty. Source
code: generated files, minified files, and data in the form of code; the bounds of the preset ``web`` follow The Stack
(Kocetkov et al. 2022, https://arxiv.org/abs/2211.15533, section 3). Tables: few rules, because numbers and repetition
are normal in them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sheepop.data.clean.config import CodeConfig, GarbageConfig, TableConfig
from sheepop.data.clean.repeats import RepeatedRuns, duplicates
from sheepop.data.clean.stage import Removal, above, below
from sheepop.data.clean.words import DIGIT, LETTER, PADDING, SPACE, codes_and_kinds, tokens_of
from sheepop.data.extract.languages import is_generated_name, is_generated_text

_RUN = 10
_FEWEST_REPETITIONS = 1000
# Repetition is measured only if one of two samples of this many characters has few different words or characters.
_SAMPLE = 500
_FEW_WORDS = 0.35
# Endless repetition shows in every part of a text, and parts of this size take little memory.
_PART = 2**19
_FEW_CHARACTERS = 12
_FEWEST_ROWS = 20
_LONGEST_PLACEHOLDER = 300
_PLACEHOLDER = re.compile(
    r"\W*(?:(?:http )?(?:error )?(?:40[0134]|500|502|503)\W+)?(?:"
    r"(?:page|file|document|object) not found|not found|forbidden|access denied|bad gateway|internal server error"
    r"|service (?:temporarily )?unavailable|this page (?:is |was |has been )?(?:intentionally )?(?:left )?blank"
    r"|under construction|coming soon|lorem ipsum.{0,250}|(?:please )?enable javascript.{0,100}"
    r"|(?:you need to|please) (?:enable|turn on) (?:javascript|cookies).{0,100}|no content|to be written|tbd"
    r")\W*",
    re.IGNORECASE | re.DOTALL,
)


def prose_quality(text: str, config: GarbageConfig) -> Removal | None:
    """Why the prose is garbage, or None."""
    found = CharacterCounts.of(text)
    if not found.visible:
        return Removal("no letters", "it contains only white space")
    if removal := _unprintable(found, config.max_unprintable):
        return removal
    if not found.letters and not found.digits:
        return Removal("no letters", f"there is no letter or digit in its {found.visible:,} characters")
    letters = found.letters / found.visible
    if found.visible >= config.min_judged and letters < config.min_letters:
        return below("no letters", "{:.1%} of the characters are letters", letters, config.min_letters)
    if config.placeholders and len(text) <= _LONGEST_PLACEHOLDER and _PLACEHOLDER.fullmatch(text):
        return Removal("placeholder", "it says only that there is nothing here")
    if found.visible < config.min_judged:
        return None
    return _encoded(text, found, config) or _endless(text, found, config)


def _encoded(text: str, found: CharacterCounts, config: GarbageConfig) -> Removal | None:
    # Ordinary text has white space every few characters; encoded data only between lines.
    if found.characters - found.visible > found.characters / 20:
        return None
    share = encoded_characters(text) / found.visible
    return above("encoded data", "{:.1%} of the text is base64 or hexadecimal data", share, config.max_encoded)


def _endless(text: str, found: CharacterCounts, config: GarbageConfig) -> Removal | None:
    if len(text) < _FEWEST_REPETITIONS:
        return None
    lines = duplicates(text.split("\n"))[1] / (len(text) - text.count("\n"))
    if lines > config.max_repeated_lines:
        return above("repetition", "{:.1%} of the text is repeated lines", lines, config.max_repeated_lines)
    if not _looks_repetitive(text):
        return None
    character, count = Counter("".join(text.split())).most_common(1)[0]
    if count / found.visible > config.max_one_character:
        what = f"{count / found.visible:.1%} of the text is the character {character!r}"
        return Removal("repetition", f"{what}, more than {config.max_one_character:.0%}")
    parts = (text[begin : begin + _PART] for begin in range(0, len(text), _PART))
    runs = sum(RepeatedRuns(tokens_of(part)).repeated(_RUN) for part in parts) / found.visible
    return above("repetition", f"{{:.1%}} of the text is repeated runs of {_RUN} words", runs, config.max_repeated_runs)


def _looks_repetitive(text: str) -> bool:
    for begin in (len(text) // 3, 2 * len(text) // 3):
        sample = text[begin : begin + _SAMPLE]
        words = sample.split()
        few_words = len(words) >= _FEW_CHARACTERS and len(set(words)) <= _FEW_WORDS * len(words)
        if few_words or (len(words) < _FEW_CHARACTERS and len(set(sample)) <= _FEW_CHARACTERS):
            return True
    return False


def code_quality(text: str, name: str, config: CodeConfig) -> Removal | None:
    """Why the source code in the file `name` is garbage, or None."""
    if config.generated:
        if is_generated_name(name.rpartition("/")[2]):
            return Removal("generated", f"its name says that a program wrote it: {name.rpartition('/')[2]}")
        if is_generated_text(text):
            return Removal("generated", "its first lines say that a program wrote it")
    found = CharacterCounts.of(text)
    if not found.visible:
        return Removal("no letters", "it contains only white space")
    lines = text.removesuffix("\n").split("\n")
    mean, longest = found.characters / len(lines), max(map(len, lines))
    in_long_lines = characters_in_long_lines(lines) / found.characters if longest > LONG_LINE else 0.0
    long_lines = f"{{:.1%}} of the file is in lines of more than {LONG_LINE:,} characters"
    alphanumeric, digits = (found.letters + found.digits) / found.characters, found.digits / found.visible
    removal = (
        above("long lines", "lines of {:,.0f} characters on average", mean, config.max_mean_line_length, ",.0f")
        or above("long lines", "a line of {:,} characters", longest, config.max_line_length, ",")
        or above("long lines", long_lines, in_long_lines, config.max_in_long_lines)
        or below("few letters", "{:.1%} letters and digits", alphanumeric, config.min_alphanumeric)
        or above("data", "{:.1%} of the characters are digits", digits, config.max_digits)
    )
    if removal:
        return removal
    encoded = encoded_characters(text) / found.visible
    return above("data", "{:.1%} is base64 or hexadecimal data", encoded, config.max_encoded)


def table_quality(text: str, config: TableConfig) -> Removal | None:
    """Why the table is garbage, or None."""
    found = CharacterCounts.of(text)
    if not found.letters and not found.digits:
        return Removal("no letters", "there is no letter or digit in it")
    if removal := _unprintable(found, config.max_unprintable):
        return removal
    rows = text.split("\n")
    repeated = duplicates(rows)[1] / (len(text) - text.count("\n"))
    if len(rows) < _FEWEST_ROWS:
        return None
    return above("repetition", "{:.1%} of the table is repeated rows", repeated, config.max_repeated_rows)


def _unprintable(found: CharacterCounts, most: float) -> Removal | None:
    return above("unprintable", "{:.1%} of the characters cannot be printed", found.unprintable / found.visible, most)


LONG_LINE = 1000
# For shorter texts, deleting characters is faster than working on arrays.
_SHORT = 4096
_SPACES = bytes(code for code in range(128) if chr(code).isspace())
_LETTERS, _DIGITS = string.ascii_letters.encode(), string.digits.encode()
_CONTROLS = bytes(code for code in range(128) if not chr(code).isprintable() and not chr(code).isspace())
_SHORTEST_ENCODED = 60
_FEWEST_SIGNS = 12
_ENCODED = re.compile(rb"(?=[A-Za-z+/]*[0-9])[A-Za-z0-9+/]+={0,2}")
_EDGES = b"'\"`,;:()[]{}\\<>"


@dataclass(frozen=True, slots=True)
class CharacterCounts:
    """Counts of characters: all, not white space, letters, ASCII digits, and unprintable ones."""

    characters: int
    visible: int
    letters: int
    digits: int
    unprintable: int

    @classmethod
    def of(cls, text: str) -> CharacterCounts:
        """Counts the characters of `text`."""
        if text.isascii() and len(text) < _SHORT:
            return _of_short(text.encode("ascii"))
        codes, kinds = codes_and_kinds(text)
        spaces = int(np.count_nonzero(kinds & SPACE)) - 2 * PADDING
        unprintable = ((codes < 0x20) & ((kinds & SPACE) == 0)) | (codes == 0x7F)
        # The codes of ASCII text are bytes, which cannot be compared with larger numbers.
        if not text.isascii():
            unprintable |= (codes >= 0x80) & (codes < 0xA0) & (codes != 0x85)
            # The replacement character, the private use area, and noncharacters.
            unprintable |= (codes == 0xFFFD) | ((codes >= 0xE000) & (codes < 0xF900)) | ((codes & 0xFFFE) == 0xFFFE)
        letters, digits = int(np.count_nonzero(kinds & LETTER)), int(np.count_nonzero(kinds & DIGIT))
        return cls(len(text), len(text) - spaces, letters, digits, int(np.count_nonzero(unprintable)))


def _of_short(data: bytes) -> CharacterCounts:
    """Counts by deleting one group of bytes after the other, the most frequent first."""
    sizes, rest = [len(data)], data
    for group in (_LETTERS, _SPACES, _DIGITS, _CONTROLS):
        rest = rest.translate(None, group)
        sizes.append(len(rest))
    letters, spaces, digits, unprintable = (before - after for before, after in pairwise(sizes))
    return CharacterCounts(len(data), len(data) - spaces, letters, digits, unprintable)


def encoded_characters(text: str) -> int:
    """The number of characters in words of `_SHORTEST_ENCODED` or more that are base64 or hexadecimal data."""
    data = text.encode("utf-8", "surrogatepass")
    blanks = np.flatnonzero(np.frombuffer(b" " + data + b" ", np.uint8) <= ord(" "))
    lengths = np.diff(blanks) - 1
    total = 0
    for place in np.flatnonzero(lengths >= _SHORTEST_ENCODED).tolist():
        begin = int(blanks[place])
        word = data[begin : begin + int(lengths[place])].strip(_EDGES)
        if len(word) >= _SHORTEST_ENCODED and _ENCODED.fullmatch(word) and len(set(word)) >= _FEWEST_SIGNS:
            total += len(word)
    return total


def characters_in_long_lines(lines: Sequence[str]) -> int:
    """The number of characters in lines of more than `LONG_LINE`."""
    return sum(len(line) for line in lines if len(line) > LONG_LINE)
