"""What in a text might need repair, found in one pass over its characters, so that most texts are left alone at once."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import numpy.typing as npt

# What a text may hold: signs of wrong decoding, characters that do not belong in text, marks without width, and
# no-break spaces.
WRONG, UNWANTED, NO_WIDTH, NO_BREAK = (1 << bit for bit in range(4))
_WRONG_BEFORE_SPACE = 1 << 4

# As classes of a regular expression. Unwanted are controls and line ends but for \t, \n and \f, Latin ligatures,
# surrogates, and formats out of use: all that ftfy changes whatever stands around it.
UNWANTED_IN_ASCII = "\x00-\x08\x0b\x0e-\x1f\x7f\r"
UNWANTED_CHARACTERS = (
    f"{UNWANTED_IN_ASCII}\u2028\u2029\u206a-\u206f\ufeff\ufff9-\ufffc\ud800-\udfff"
    "\u0132\u0133\u0149\u01c4-\u01cc\u01f1-\u01f3\ufb00-\ufb06"
)
# Text that was decoded wrongly shows it by C1 controls, by the ligature oe, by a capital A with tilde or circumflex
# before a space, or by two characters beyond ASCII in a row.
_SIGNS = {
    WRONG: "\x80-\x9f\u0152\u0153",
    _WRONG_BEFORE_SPACE: "\u00c2\u00c3",
    UNWANTED: UNWANTED_CHARACTERS,
    NO_WIDTH: "\u00ad\u200b\u2060\ufeff",
    NO_BREAK: "\xa0",
}
MAY_BE_WRONG = re.compile(f"[{_SIGNS[WRONG]}]|[^\x00-\x7f]{{2}}|[{_SIGNS[_WRONG_BEFORE_SPACE]}] ")
_CONTROLS = re.sub(f"[^{UNWANTED_IN_ASCII}]", "", "".join(map(chr, range(128)))).encode()


def suspects(text: str) -> int:
    """The sum of what the text may hold; what is not in it is not there."""
    if text.isascii():
        data = text.encode("ascii")
        return UNWANTED if len(data.translate(None, _CONTROLS)) < len(data) else 0
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    signs = _table().take(np.minimum(codes, 0xFFFF))
    found = int(np.bitwise_or.reduce(signs))
    beyond = codes > 0x7F
    if found & _WRONG_BEFORE_SPACE or bool((beyond[1:] & beyond[:-1]).any()):
        found |= WRONG
    return found & ~_WRONG_BEFORE_SPACE


@cache
def _table() -> npt.NDArray[np.uint8]:
    table = np.zeros(0x10000, np.uint8)
    for sign, characters in _SIGNS.items():
        for first, last in re.findall(r"(.)(?:-(.))?", characters, re.DOTALL):
            table[ord(first) : ord(last or first) + 1] |= sign
    return table
