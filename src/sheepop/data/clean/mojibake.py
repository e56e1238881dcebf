"""Text that was decoded wrongly, repaired by ftfy where there is something to repair.

ftfy reads 3 MB/s; almost all lines need nothing. `repaired` gives exactly what ftfy gives with `settings`, but hands
it only the lines in which one of its fixes can find what it looks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from sheepop.data.clean.suspects import MAY_BE_WRONG, UNWANTED, UNWANTED_CHARACTERS, UNWANTED_IN_ASCII, WRONG, suspects

_UNWANTED = re.compile(f"[{UNWANTED_CHARACTERS}]")
_UNWANTED_IN_ASCII = re.compile(f"[{UNWANTED_IN_ASCII}]")

# Beyond this a line is repaired in pieces, so that no line takes long.
_LONGEST = 100_000


def repaired(text: str) -> tuple[str, dict[str, int]]:
    """The text with its lines repaired, and the number of lines with wrong decoding, ligatures and controls."""
    counts: dict[str, int] = {}
    if not suspects(text) & (WRONG | UNWANTED):
        return text, counts
    lines = text.split("\n")
    for number, line in enumerate(lines):
        # What stands at the end of a line is judged by the line break after it.
        end = "\n" if number + 1 < len(lines) else ""
        reason = _reason(line, end)
        if reason:
            fixed = _ftfy()(line + end).removesuffix(end)
            if fixed != line:
                lines[number] = fixed
                counts[reason] = counts.get(reason, 0) + 1
    return "\n".join(lines), counts


def _reason(line: str, end: str) -> str:
    if line.isascii():
        return "control characters" if _UNWANTED_IN_ASCII.search(line) else ""
    from ftfy.badness import is_bad

    if MAY_BE_WRONG.search(line + end) and is_bad(line + end):
        return "wrong decoding"
    return "control characters and ligatures" if _UNWANTED.search(line) else ""


@cache
def _ftfy() -> Callable[[str], str]:
    from ftfy import TextFixerConfig, fix_text

    settings = TextFixerConfig(
        unescape_html=False,
        fix_character_width=False,
        uncurl_quotes=False,
        normalization=None,
        max_decode_length=_LONGEST,
        explain=False,
    )
    return lambda text: str(fix_text(text, settings))
