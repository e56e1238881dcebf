"""The rules of C4 and FineWeb, which judge a page by its lines.

C4 (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.2) keeps a line that ends like a sentence and has a
few words; a page goes when the lines that are kept have too few sentences, or one of them a curly bracket or dummy
text. FineWeb (Penedo et al. 2024, https://arxiv.org/abs/2406.17557, section 3.5) counts lines that end in punctuation,
short ones and repeated ones.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sheepop.core.facts import counted
from sheepop.data.clean.characters import ENDS_SENTENCE
from sheepop.data.clean.config import C4Config, FineWebConfig
from sheepop.data.clean.gopher import duplicates
from sheepop.data.clean.stage import Removal, above, below, named
from sheepop.data.clean.words import tokens_of

_LINE_ENDS = frozenset(".?!\"'")
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_JAVASCRIPT = "javascript"
_DUMMY_TEXT = "lorem ipsum"
_UNWANTED = (_DUMMY_TEXT, _JAVASCRIPT, *_POLICY)
# The end of a sentence with another after it. A dot after a single letter is an abbreviation's.
_SENTENCE_END = re.compile(r"""(?:(?<!\b[^\W\d_])(?<!\.)\.|[!?。！？｡؟۔।॥])["'”’)\]»]*+\s+(?=\S)""")


@dataclass(frozen=True, slots=True)
class KeptLines:
    """The lines of a text that C4 keeps, each with its place among all lines and without citation marks."""

    lines: list[str]
    numbers: list[int]

    @property
    def text(self) -> str:
        """The lines as a text, as C4 has it."""
        return "\n".join(self.lines)

    def moved(self, text: str, marks: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
        """Where marks of the whole `text` stand in the kept lines: at the first line that ends after the mark."""
        ends = list(accumulate(map(len, text.splitlines(keepends=True))))
        kept_ends = [ends[number] for number in self.numbers]
        begins = [0, *accumulate(len(line) + 1 for line in self.lines)]
        begins[-1] = max(0, begins[-1] - 1)
        return [(begins[bisect_right(kept_ends, offset)], name) for offset, name in marks]


def kept_lines(text: str, config: C4Config) -> KeptLines | Removal:
    """The lines of the text that C4 keeps, or why the whole text goes."""
    lines = list(map(str.strip, text.splitlines()))
    bare = [_CITATION.sub("", line) if "[" in line else line for line in lines] if "[" in text else lines
    least = config.min_words_per_line
    numbers = [
        number
        for number, line in enumerate(bare)
        if line[-1:] in _LINE_ENDS and line[-3:] != "..." and len(lines[number].split(None, least)) >= least
    ]
    if len(text) > config.max_word_length:
        longest = config.max_word_length
        numbers = [n for n in numbers if len(lines[n]) <= longest or max(map(len, lines[n].split())) <= longest]
    lowered = text.lower()
    if "{" in text or any(phrase in lowered for phrase in _UNWANTED):
        chosen = _wanted(numbers, bare)
        if isinstance(chosen, Removal):
            return chosen
        numbers = chosen
    kept = [bare[number] for number in numbers]
    count = num_sentences(kept, config.min_sentences)
    if count < config.min_sentences:
        what = f"{counted(count, 'sentence')} in lines that end like one"
        return Removal("c4 sentences", f"c4: {what}, fewer than {config.min_sentences}")
    return KeptLines(kept, numbers)


def _wanted(numbers: list[int], lines: list[str]) -> list[int] | Removal:
    wanted = []
    for number in numbers:
        lowered = lines[number].lower()
        if _DUMMY_TEXT in lowered:
            return Removal("c4 dummy text", "c4: dummy text, lorem ipsum")
        if _JAVASCRIPT in lowered:
            continue
        if "{" in lowered:
            return Removal("c4 bracket", "c4: a curly bracket in a sentence")
        if not any(phrase in lowered for phrase in _POLICY):
            wanted.append(number)
    return wanted


def num_sentences(lines: list[str], enough: int) -> int:
    """The number of sentences in the lines, or some number from `enough` on."""
    if len(lines) >= enough:
        return len(lines)
    return sum(1 + len(_SENTENCE_END.findall(line)) for line in lines)


def fineweb_quality(text: str, config: FineWebConfig) -> Removal | None:
    """Why the lines of the text do not read like a page worth keeping, or None."""
    lines = [line for line in text.split("\n") if line and not line.isspace()]
    if not lines:
        return Removal("fineweb length", "fineweb: no text")
    ended = sum(ENDS_SENTENCE.match(line[-1]) is not None for line in lines) / len(lines)
    short = sum(len(line) <= config.short_line for line in lines) / len(lines)
    num_breaks = text.count("\n")
    repeated = duplicates(lines)[1] / (len(text) - num_breaks)
    shorter = f"{{:.1%}} of the lines have {config.short_line} characters or fewer"
    most_repeated, per_word = config.max_duplicate_line_characters, config.max_lines_per_word
    found = (
        below("punctuation", "{:.1%} of the lines end in a punctuation mark", ended, config.min_lines_with_punctuation)
        or above("short lines", shorter, short, config.max_short_lines)
        or above("repetition", "repeated lines make up {:.1%} of the text", repeated, most_repeated)
    )
    # There are at least as many words as pieces between white space, and cutting those is the slow part.
    if not found and num_breaks > per_word * len(text.split()):
        found = above("line breaks", "{:.2f} line breaks per word", num_breaks / len(tokens_of(text)), per_word, "g")
    return named("fineweb", found)
