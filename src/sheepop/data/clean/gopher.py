"""Gopher's quality and repetition rules (Rae et al. 2021, https://arxiv.org/abs/2112.11446, appendix A.1.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sheepop.core.facts import counted
from sheepop.data.clean.config import GopherConfig, RepetitionConfig
from sheepop.data.clean.repeats import RepeatedRuns, screened
from sheepop.data.clean.stage import Removal, above, below, named
from sheepop.data.clean.words import Tokens

_STOP_WORD = re.compile(r"\b(?:the|be|to|of|and|that|have|with)\b")
_PARAGRAPH_END = re.compile(r"\n{2,}")


def quality(text: str, tokens: Tokens, config: GopherConfig) -> Removal | None:
    """Why the text does not look like written English, or None."""
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
    # Counting is cheap and mostly shows that looking at each line is not needed.
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
    """How much of the text is lines and paragraphs that came before, when it is too much."""
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


def duplicates(parts: Sequence[str]) -> tuple[int, int]:
    """How many of `parts` came before, and the characters in those."""
    distinct = set(parts)
    return len(parts) - len(distinct), sum(map(len, parts)) - sum(map(len, distinct))


def repeated_runs(texts: Sequence[str], tokens: Sequence[Tokens], config: RepetitionConfig) -> list[Removal | None]:
    """For each text how much of it is runs of words that it repeats, when it is too much."""
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
