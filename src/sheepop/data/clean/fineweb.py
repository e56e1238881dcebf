"""FineWeb's own rules for web pages (Penedo et al. 2024, https://arxiv.org/abs/2406.17557, section 3.5)."""

from __future__ import annotations

from datatrove.utils.text import TERMINAL_PUNCTUATION

from sheepop.data.clean.gopher import duplicates
from sheepop.data.clean.quality_config import FineWebConfig
from sheepop.data.clean.stage import Removal
from sheepop.data.clean.words import tokens_of


def quality(text: str, config: FineWebConfig) -> Removal | None:
    """Why the lines of the text do not read like a page worth keeping, or None."""
    lines = [line for line in text.split("\n") if line and not line.isspace()]
    if not lines:
        return _removal("length", "no text")
    ended = sum(line[-1] in TERMINAL_PUNCTUATION for line in lines) / len(lines)
    if ended < config.min_lines_with_punctuation:
        least = f"{config.min_lines_with_punctuation:.0%}"
        return _removal("punctuation", f"{ended:.1%} of the lines end in a punctuation mark, less than {least}")
    short = sum(len(line) <= config.short_line for line in lines) / len(lines)
    if short > config.max_short_lines:
        most = f"{config.max_short_lines:.0%}"
        return _removal(
            "short lines", f"{short:.1%} of the lines have {config.short_line} characters or fewer, more than {most}"
        )
    num_breaks = text.count("\n")
    repeated = duplicates(lines)[1] / (len(text) - num_breaks)
    if repeated > config.max_duplicate_line_characters:
        most = f"{config.max_duplicate_line_characters:.0%}"
        return _removal("repetition", f"repeated lines make up {repeated:.1%} of the text, more than {most}")
    # There are at least as many words as pieces between white space, and cutting those is the slow part.
    if num_breaks > config.max_lines_per_word * len(text.split()):
        per_word = num_breaks / len(tokens_of(text))
        if per_word > config.max_lines_per_word:
            return _removal(
                "line breaks", f"{per_word:.2f} line breaks per word, more than {config.max_lines_per_word:g}"
            )
    return None


def _removal(rule: str, detail: str) -> Removal:
    return Removal(f"fineweb {rule}", f"fineweb: {detail}")
