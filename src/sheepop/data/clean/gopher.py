"""Gopher's quality and repetition rules (Rae et al. 2021, https://arxiv.org/abs/2112.11446, appendix A.1.1)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sheepop.core.facts import counted
from sheepop.data.clean.config import GopherConfig, RepetitionConfig
from sheepop.data.clean.repeats import RepeatedRuns, screened
from sheepop.data.clean.stage import Removal
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
    least_length, most_length = config.min_mean_word_length, config.max_mean_word_length
    most_symbols, least_letters = config.max_symbols_per_word, config.min_words_with_letter
    words, mean = counted(num_words, "word"), f"words of {mean_length:.2f} letters on average"
    for rule, is_broken, detail in (
        ("length", num_words < config.min_words, f"{words}, fewer than {config.min_words:,}"),
        ("length", num_words > config.max_words, f"{words}, more than {config.max_words:,}"),
        ("word length", mean_length < least_length, f"{mean}, fewer than {least_length:g}"),
        ("word length", mean_length > most_length, f"{mean}, more than {most_length:g}"),
        ("symbols", hashes > most_symbols, f"{hashes:.2f} hash signs per word, more than {most_symbols:g}"),
        ("symbols", ellipses > most_symbols, f"{ellipses:.2f} ellipses per word, more than {most_symbols:g}"),
        (
            "letters",
            with_letter < least_letters,
            f"{with_letter:.1%} of the words have a letter, less than {least_letters:.0%}",
        ),
    ):
        if is_broken:
            return _removal(rule, detail)
    return _line_shapes(text, num_ellipses, config) or _stop_words(text, config)


def _line_shapes(text: str, num_ellipses: int, config: GopherConfig) -> Removal | None:
    lines = text.splitlines()
    # Counting is cheap and mostly shows that looking at each line is not needed.
    if text.count("-") + text.count("•") > config.max_bullet_lines * len(lines):
        share = sum(line.lstrip().startswith(("•", "-")) for line in lines) / len(lines)
        if share > config.max_bullet_lines:
            most = f"{config.max_bullet_lines:.0%}"
            return _removal("bullets", f"{share:.0%} of the lines begin with a bullet, more than {most}")
    if num_ellipses > config.max_ellipsis_lines * len(lines):
        share = sum(line.rstrip().endswith(("...", "…")) for line in lines) / len(lines)
        if share > config.max_ellipsis_lines:
            most = f"{config.max_ellipsis_lines:.0%}"
            return _removal("ellipses", f"{share:.0%} of the lines end in an ellipsis, more than {most}")
    return None


def _stop_words(text: str, config: GopherConfig) -> Removal | None:
    found: set[str] = set()
    for match in _STOP_WORD.finditer(text):
        if len(found) >= config.min_stop_words:
            break
        found.add(match.group())
    if len(found) >= config.min_stop_words:
        return None
    detail = f"{len(found)} of the most frequent English words, fewer than {config.min_stop_words}"
    return _removal("stop words", detail)


def repeated_lines(text: str, config: RepetitionConfig) -> Removal | None:
    """How much of the text is lines and paragraphs that came before, when it is too much."""
    if not text:
        return _removal("repetition", "no text")
    stripped = text.strip()
    paragraphs = _PARAGRAPH_END.split(stripped) if "\n\n\n" in stripped else stripped.split("\n\n")
    lines = [line for line in text.split("\n") if line]
    lines += [""] * (text.startswith("\n") + text.endswith("\n"))
    for parts, name, most, most_characters in (
        (paragraphs, "paragraphs", config.max_duplicate_paragraphs, config.max_duplicate_paragraph_characters),
        (lines, "lines", config.max_duplicate_lines, config.max_duplicate_line_characters),
    ):
        count, characters = duplicates(parts)
        if count / len(parts) > most:
            return _removal("repetition", f"{count / len(parts):.1%} of the {name} are repeated, more than {most:.0%}")
        if characters / len(text) > most_characters:
            share = characters / len(text)
            return _removal(
                "repetition", f"repeated {name} make up {share:.1%} of the text, more than {most_characters:.0%}"
            )
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
        share = runs.most_frequent(n, most * size) / size
        if share > most:
            what = f"one run of {n} words makes up {share:.1%} of the text"
            return _removal("repetition", f"{what}, more than {most:.0%}")
    for n, most in sorted(config.duplicate_ngrams):
        share = runs.repeated(n) / size
        if share > most:
            what = f"repeated runs of {n} words make up {share:.1%} of the text"
            return _removal("repetition", f"{what}, more than {most:.0%}")
    return None


def _removal(rule: str, detail: str) -> Removal:
    return Removal(f"gopher {rule}", f"gopher: {detail}")
