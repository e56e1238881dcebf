"""Text that was decoded wrongly, repaired by ftfy where there is something to repair.

ftfy reads 3 MB/s; almost all lines need nothing. `repaired` gives exactly what ftfy gives with `settings`, but hands
it only the lines in which one of its fixes can find what it looks for, found in one pass over the characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

# What a text may hold: signs of wrong decoding, characters that do not belong in text, marks without width, and
# no-break spaces.
WRONG, UNWANTED, NO_WIDTH, NO_BREAK = (1 << bit for bit in range(4))
_WRONG_BEFORE_SPACE, _ODD = 1 << 4, 1 << 5

# As classes of a regular expression. Unwanted are controls and line ends but for \t, \n and \f, Latin ligatures,
# surrogates, and formats out of use: all that ftfy changes whatever stands around it.
UNWANTED_IN_ASCII = "\x00-\x08\x0b\x0e-\x1f\x7f\r"
UNWANTED_CHARACTERS = (
    f"{UNWANTED_IN_ASCII}\u2028\u2029\u206a-\u206f\ufeff\ufff9-\ufffc\ud800-\udfff"
    "\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\ufb00-\ufb06"
)
# Text that was decoded wrongly shows it by C1 controls, by the ligature oe, by a capital A with tilde or circumflex
# before a space, or by two characters beyond ASCII in a row of which one is odd.
_SIGNS = {
    WRONG: "\x80-\x9f\u0152\u0153",
    _WRONG_BEFORE_SPACE: "\u00c2\u00c3",
    UNWANTED: UNWANTED_CHARACTERS,
    NO_WIDTH: "\u00ad\u200b\u2060\ufeff",
    NO_BREAK: "\xa0",
}
# Of ftfy's characters of wrong decoding these are ordinary letters, of Greek and Cyrillic but for one.
_ORDINARY = ("lower_common", "upper_common")
_ODD_LETTER = "\u0402"
_UNWANTED = re.compile(f"[{UNWANTED_CHARACTERS}]")
# Beyond this a line is repaired in pieces, so that no line takes long.
_LONGEST = 100_000
_CONTROLS = re.sub(f"[^{UNWANTED_IN_ASCII}]", "", "".join(map(chr, range(128)))).encode()


def suspects(text: str) -> int:
    """The sum of what the text may hold; what is not in it is not there."""
    if text.isascii():
        data = text.encode("ascii")
        return UNWANTED if len(data.translate(None, _CONTROLS)) < len(data) else 0
    codes, signs = _signs(text)
    found = int(np.bitwise_or.reduce(signs))
    if found & (_ODD | _WRONG_BEFORE_SPACE) and not found & WRONG and _may_be_wrong(codes, signs).any():
        found |= WRONG
    return found & (WRONG | UNWANTED | NO_WIDTH | NO_BREAK)


def suspect_lines(text: str) -> list[int]:
    """The numbers of the lines, from 0, with signs of wrong decoding or unwanted characters."""
    codes, signs = _signs(text)
    marked = np.flatnonzero(_may_be_wrong(codes, signs) | ((signs & UNWANTED) != 0))
    return np.unique(np.searchsorted(np.flatnonzero(codes == ord("\n")), marked)).tolist()


def _signs(text: str) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    return codes, _table().take(np.minimum(codes, 0xFFFF))


def _may_be_wrong(codes: npt.NDArray[np.uint32], signs: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """At which characters, or pairs that begin with them, there are signs of wrong decoding."""
    wrong = (signs & WRONG) != 0
    beyond, odd = codes > 0x7F, (signs & _ODD) != 0
    wrong[:-1] |= (beyond[1:] & odd[:-1]) | (odd[1:] & beyond[:-1])
    wrong[:-1] |= ((signs[:-1] & _WRONG_BEFORE_SPACE) != 0) & (codes[1:] == ord(" "))
    return wrong


@cache
def _table() -> npt.NDArray[np.uint8]:
    from ftfy.badness import MOJIBAKE_CATEGORIES

    odd = "".join(characters for name, characters in MOJIBAKE_CATEGORIES.items() if name not in _ORDINARY)
    table = np.zeros(0x10000, np.uint8)
    for sign, characters in {**_SIGNS, _ODD: odd + _ODD_LETTER}.items():
        for first, last in re.findall(r"(.)(?:-(.))?", characters, re.DOTALL):
            table[ord(first) : ord(last or first) + 1] |= sign
    return table


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
