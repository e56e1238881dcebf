"""The stage that removes documents too bad to learn from, with rules for each kind of document.

The preset ``web`` adds the rules of Gopher (Rae et al. 2021, https://arxiv.org/abs/2112.11446, appendix A.1.1), C4
(Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.2) and FineWeb (Penedo et al. 2024,
https://arxiv.org/abs/2406.17557, section 3.5). C4 keeps lines that end like a sentence and have a few words; it removes
a page if the kept lines have too few sentences, or one of them has a curly bracket or dummy text. FineWeb counts lines
that end in punctuation, short ones and repeated ones.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from sheepop.core.facts import counted
from sheepop.data.clean.config import C4Config, FineWebConfig, GopherConfig, QualityConfig, RepetitionConfig
from sheepop.data.clean.garbage import code_quality, prose_quality, table_quality
from sheepop.data.clean.repeats import RepeatedRuns, duplicates, screened
from sheepop.data.clean.stage import FilterStage, Removal, above, below, named
from sheepop.data.clean.words import ENDS_SENTENCE, Tokens, tokens_of, tokens_of_all
from sheepop.data.documents import Draft

# Tokenizing many short texts at once takes a tenth of the time of one by one.
_READ_AHEAD_DOCUMENTS = 256
_READ_AHEAD_CHARACTERS = 2**18


class QualityFilter(FilterStage):
    """Removes garbage; with the preset ``web`` also applies the rules for web crawls and public code."""

    name = "quality"
    config: QualityConfig

    def run(self, documents: Iterable[Draft]) -> Iterator[Draft]:
        """Yields the documents that stay, in order; reads a few ahead, because judging many at once is faster."""
        for batch in _batches(documents):
            for document, removal in zip(batch, self.removals(batch), strict=True):
                if removal is None:
                    yield document
                else:
                    self.account.removed(self.name, document, removal.reason, removal.detail)

    def removal(self, document: Draft) -> Removal | None:
        """Why the document is removed, or None if it stays."""
        return self.removals([document])[0]

    def removals(self, documents: list[Draft]) -> list[Removal | None]:
        """For each document why it is removed, or None if it stays."""
        found = [self._by_kind(document) for document in documents]
        if self.config.preset == "web":
            self._judge_as_web_pages(documents, found)
        return found

    def _by_kind(self, document: Draft) -> Removal | None:
        if document.kind == "code":
            return code_quality(document.text, document.source, self.config.code)
        if document.kind == "table":
            return table_quality(document.text, self.config.table)
        return prose_quality(document.text, self.config.garbage)

    def _judge_as_web_pages(self, documents: list[Draft], found: list[Removal | None]) -> None:
        """Adds to `found` the prose that the rules of Gopher, C4 and FineWeb remove."""
        left = [n for n, document in enumerate(documents) if found[n] is None and document.kind == "prose"]
        tokens = dict(zip(left, tokens_of_all([documents[n].text for n in left]), strict=True))
        kept: dict[int, KeptLines] = {}
        for n in left:
            lines = self._judge_lines(documents[n].text, tokens[n])
            if isinstance(lines, Removal):
                found[n] = lines
            else:
                kept[n] = lines
        texts = [documents[n].text for n in kept]
        repeated = repeated_runs(texts, [tokens[n] for n in kept], self.config.repetition)
        for n, removal in zip(kept, repeated, strict=True):
            found[n] = removal
            if removal is None and self.config.c4.drop_lines:
                self._drop_lines(documents[n], kept[n])

    def _judge_lines(self, text: str, tokens: Tokens) -> Removal | KeptLines:
        """Why the text is removed, or the lines that C4 keeps; FineWeb's rules judge only these lines."""
        config = self.config
        if found := gopher_quality(text, tokens, config.gopher) or repeated_lines(text, config.repetition):
            return found
        kept = kept_lines(text, config.c4)
        if isinstance(kept, Removal):
            return kept
        return fineweb_quality(kept.text, config.fineweb) or kept

    def _drop_lines(self, document: Draft, kept: KeptLines) -> None:
        before, marks = document.text, document.marks
        document.text = kept.text
        if marks:
            document.marks = kept.moved(before, marks)
        if document.text != before:
            dropped = len(before.splitlines()) - len(kept.lines)
            self.account.changed(self.name, before, document.text, {"lines dropped": dropped})


def _batches(documents: Iterable[Draft]) -> Iterator[list[Draft]]:
    batch: list[Draft] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if len(batch) >= _READ_AHEAD_DOCUMENTS or size >= _READ_AHEAD_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


_STOP_WORD = re.compile(r"\b(?:the|be|to|of|and|that|have|with)\b")
_PARAGRAPH_END = re.compile(r"\n{2,}")


def gopher_quality(text: str, tokens: Tokens, config: GopherConfig) -> Removal | None:
    """Why the text does not look like written English by Gopher's rules, or None."""
    num_words, num_tokens = int(np.count_nonzero(tokens.is_word)), len(tokens)
    if not num_tokens and config.min_words == 0:
        return None
    mean_length = int(tokens.lengths[tokens.is_word].sum()) / max(1, num_words)
    num_ellipses = text.count("...") + text.count("…")
    hashes, ellipses = (count / max(1, num_tokens) for count in (text.count("#"), num_ellipses))
    with_letter = int(np.count_nonzero(tokens.has_letter)) / max(1, num_tokens)
    words, mean = counted(num_words, "word"), "words of {:.2f} letters on average"
    per_word = config.max_symbols_per_word
    return named(
        "gopher",
        below("length", words, num_words, config.min_words, ",", "fewer")
        or above("length", words, num_words, config.max_words, ",")
        or below("word length", mean, mean_length, config.min_mean_word_length, "g", "fewer")
        or above("word length", mean, mean_length, config.max_mean_word_length, "g")
        or above("symbols", "{:.2f} hash signs per word", hashes, per_word, "g")
        or above("symbols", "{:.2f} ellipses per word", ellipses, per_word, "g")
        or below("letters", "{:.1%} of the words have a letter", with_letter, config.min_words_with_letter)
        or _line_shapes(text, num_ellipses, config)
        or _stop_words(text, config),
    )


def _line_shapes(text: str, num_ellipses: int, config: GopherConfig) -> Removal | None:
    lines = text.splitlines()
    # Cheap counts usually show that the lines need not be examined.
    found = None
    if text.count("-") + text.count("•") > config.max_bullet_lines * len(lines):
        share = sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines)
        found = above("bullets", "{:.0%} of the lines begin with a bullet", share, config.max_bullet_lines)
    if not found and num_ellipses > config.max_ellipsis_lines * len(lines):
        share = sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)
        found = above("ellipses", "{:.0%} of the lines end in an ellipsis", share, config.max_ellipsis_lines)
    return found


def _stop_words(text: str, config: GopherConfig) -> Removal | None:
    found: set[str] = set()
    for match in _STOP_WORD.finditer(text):
        if len(found) >= config.min_stop_words:
            break
        found.add(match.group())
    what = f"{len(found)} of the most frequent English words"
    return below("stop words", what, len(found), config.min_stop_words, "", "fewer")


def repeated_lines(text: str, config: RepetitionConfig) -> Removal | None:
    """A removal if too much of the text is repeated lines or paragraphs, or None."""
    if not text:
        return Removal("gopher repetition", "gopher: no text")
    stripped = text.strip()
    paragraphs = _PARAGRAPH_END.split(stripped) if "\n\n\n" in stripped else stripped.split("\n\n")
    lines = [line for line in text.split("\n") if line]
    lines += [""] * (text.startswith("\n") + text.endswith("\n"))
    for parts, name, most, most_characters in (
        (paragraphs, "paragraphs", config.max_duplicate_paragraphs, config.max_duplicate_paragraph_characters),
        (lines, "lines", config.max_duplicate_lines, config.max_duplicate_line_characters),
    ):
        count, characters = duplicates(parts)
        found = above("repetition", f"{{:.1%}} of the {name} are repeated", count / len(parts), most) or above(
            "repetition", f"repeated {name} make up {{:.1%}} of the text", characters / len(text), most_characters
        )
        if found:
            return named("gopher", found)
    return None


def repeated_runs(texts: Sequence[str], tokens: Sequence[Tokens], config: RepetitionConfig) -> list[Removal | None]:
    """For each text a removal if too much of it is repeated runs of words, or None."""
    suspects = screened(tokens, [len(text) for text in texts], config)
    return [
        _repeated_runs(len(text), RepeatedRuns(its), config) if suspect else None
        for text, its, suspect in zip(texts, tokens, suspects, strict=True)
    ]


def _repeated_runs(size: int, runs: RepeatedRuns, config: RepetitionConfig) -> Removal | None:
    for n, most in sorted(config.top_ngrams):
        what = f"one run of {n} words makes up {{:.1%}} of the text"
        if found := above("repetition", what, runs.most_frequent(n, most * size) / size, most):
            return named("gopher", found)
    for n, most in sorted(config.duplicate_ngrams):
        what = f"repeated runs of {n} words make up {{:.1%}} of the text"
        if found := above("repetition", what, runs.repeated(n) / size, most):
            return named("gopher", found)
    return None


_LINE_ENDS = frozenset(".?!\"'")
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
_JAVASCRIPT = "javascript"
_DUMMY_TEXT = "lorem ipsum"
_UNWANTED = (_DUMMY_TEXT, _JAVASCRIPT, *_POLICY)
# The end of a sentence that is followed by another. A dot after a single letter belongs to an abbreviation.
_SENTENCE_END = re.compile(r"""(?:(?<!\b[^\W\d_])(?<!\.)\.|[!?。！？｡؟۔।॥])["'”’)\]»]*+\s+(?=\S)""")


@dataclass(frozen=True, slots=True)
class KeptLines:
    """The lines of a text that C4 keeps, without citation marks, and their numbers among all lines."""

    lines: list[str]
    numbers: list[int]

    @property
    def text(self) -> str:
        """The lines joined into a text, as in C4."""
        return "\n".join(self.lines)

    def moved(self, text: str, marks: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
        """Moves the marks of the whole `text` to the kept lines: each to the first line that ends after the mark."""
        ends = list(accumulate(map(len, text.splitlines(keepends=True))))
        kept_ends = [ends[number] for number in self.numbers]
        begins = [0, *accumulate(len(line) + 1 for line in self.lines)]
        begins[-1] = max(0, begins[-1] - 1)
        return [(begins[bisect_right(kept_ends, offset)], name) for offset, name in marks]


def kept_lines(text: str, config: C4Config) -> KeptLines | Removal:
    """The lines of the text that C4 keeps, or why the whole text is removed."""
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
    """The number of sentences in the lines; once it reaches `enough`, possibly an underestimate of at least that."""
    if len(lines) >= enough:
        return len(lines)
    return sum(1 + len(_SENTENCE_END.findall(line)) for line in lines)


def fineweb_quality(text: str, config: FineWebConfig) -> Removal | None:
    """Why the text is not worth keeping by FineWeb's rules, or None."""
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
    # The text has at least as many tokens as pieces between white space, and tokenizing is the slow part.
    if not found and num_breaks > per_word * len(text.split()):
        found = above("line breaks", "{:.2f} line breaks per word", num_breaks / len(tokens_of(text)), per_word, "g")
    return named("fineweb", found)
