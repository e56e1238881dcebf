"""Text that was decoded wrongly, repaired by ftfy where there is something to repair.

ftfy reads 3 MB/s; almost all lines need nothing. `repaired` gives exactly what ftfy gives with `settings`, but hands
it only the lines in which one of its fixes can find what it looks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from sheepop.data.clean.suspects import UNWANTED, UNWANTED_CHARACTERS, WRONG, suspect_lines, suspects

_UNWANTED = re.compile(f"[{UNWANTED_CHARACTERS}]")

# Beyond this a line is repaired in pieces, so that no line takes long.
_LONGEST = 100_000


def repaired(text: str) -> tuple[str, dict[str, int]]:
    """The text with its lines repaired, and the number of lines with wrong decoding, ligatures and controls."""
    counts: dict[str, int] = {}
    if not suspects(text) & (WRONG | UNWANTED):
        return text, counts
    from ftfy.badness import is_bad

    lines = text.split("\n")
    for number in suspect_lines(text):
        # What stands at the end of a line is judged by the line break after it.
        line, end = lines[number], "\n" if number + 1 < len(lines) else ""
        is_unwanted = _UNWANTED.search(line) is not None
        if not is_unwanted and not is_bad(line + end):
            continue
        fixed = _ftfy()(line + end).removesuffix(end)
        if fixed != line:
            lines[number] = fixed
            reason = "unwanted characters" if is_unwanted else "wrong decoding"
            counts[reason] = counts.get(reason, 0) + 1
    return "\n".join(lines), counts


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
