"""Text that was decoded wrongly, repaired by ftfy where there is something to repair.

ftfy reads 3 MB/s; almost all lines need nothing. `repaired` gives exactly what ftfy gives with `settings`, but hands
it only the lines in which one of its fixes can find what it looks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

# ftfy's sign of wrong decoding is an unlikely sequence of characters. All of these have two neighbours beyond ASCII,
# a C1 control, a ligature oe, or a capital A with tilde or circumflex before white space.
_MAY_BE_WRONG = re.compile("[\x80-\x9f\u0152\u0153]|[^\x00-\x7f]{2}|[\u00c2\u00c3][\\s]")
# What its other fixes change: controls, terminal escapes, line ends, Latin ligatures, surrogates, unused formats.
_TO_REMOVE = "\x00-\x08\x0b\x0e-\x1f\x7f\u206a-\u206f\ufeff\ufff9-\ufffc"
_LIGATURES = "\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\ufb00-\ufb06"
_TO_CHANGE = re.compile(f"[{_TO_REMOVE}{_LIGATURES}\r\u2028\u2029\ud800-\udfff]")
_TO_CHANGE_IN_ASCII = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\r]")
_CONTROLS = bytes(code for code in (*range(9), 11, *range(14, 32), 127))

# Beyond this a line is repaired in pieces, so that no line takes long.
_LONGEST = 100_000


def may_need_repair(text: str) -> bool:
    """Whether ftfy could find anything in the text; quick, and never wrong when it says no."""
    if text.isascii():
        data = text.encode("ascii")
        return len(data.translate(None, _CONTROLS)) < len(data)
    return _MAY_BE_WRONG.search(text) is not None or _TO_CHANGE.search(text) is not None


def repaired(text: str) -> tuple[str, dict[str, int]]:
    """The text with its lines repaired, and the number of lines with wrong decoding, ligatures and controls."""
    counts: dict[str, int] = {}
    if not may_need_repair(text):
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
        return "control characters" if _TO_CHANGE_IN_ASCII.search(line) else ""
    from ftfy.badness import is_bad

    if _MAY_BE_WRONG.search(line + end) and is_bad(line + end):
        return "wrong decoding"
    return "control characters and ligatures" if _TO_CHANGE.search(line) else ""


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
