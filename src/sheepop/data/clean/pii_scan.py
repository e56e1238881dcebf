"""Where in a text numbers that may be personal can stand at all.

Nearly all text has few digits, so that the patterns that follow look at little of it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Between the digits of one number; whatever is not ASCII may be such a sign, as the narrow space of French typography.
_JOINT = r"[ .\-/()?\u0080-\U0010ffff]"
_RUN = re.compile(
    r"[0-9](?<![0-9].)(?<![0-9]\..)(?:"
    # Six digits or more that are no decimal fraction.
    rf"(?![0-9]*\.[0-9]++(?!{_JOINT}{{1,3}}[0-9]))(?:{_JOINT}{{0,3}}[0-9]){{5,}}+|"
    # Fewer are part of an address, or follow two capital letters.
    r"[0-9]?(?:\.[0-9]{1,2}){3}|(?<=[A-Z]{2}[0-9])[0-9]|(?<=[23])[0-9A-Fa-f]{3}:)"
)
_DOT = re.compile(r"[0-9]\.(?=[0-9])")
_LETTERED = re.compile(r"[A-Z]{2}[0-9]{2}")
_GOES_ON = re.compile(r" ?[A-Z]|[a-f]{0,3}:")
_NOT_DIGITS = bytes(code for code in range(256) if not 48 <= code <= 57)


class Run(NamedTuple):
    """Digits that may belong to one number: from the first to past the last, how many, and how many dots between.

    After two capital letters, as tax codes and account numbers begin, two digits do.
    """

    start: int
    end: int
    digits: int
    dots: int
    is_lettered: bool


def find_runs(text: str) -> list[Run]:
    """The places in `text` that the patterns for numbers must look at."""
    runs = []
    for match in _RUN.finditer(text):
        start, end = match.span()
        literal = match.group()
        digits = len(literal.encode("ascii", "replace").translate(None, _NOT_DIGITS))
        dots = len(_DOT.findall(literal)) if "." in literal else 0
        is_lettered = start >= 2 and _LETTERED.match(text, start - 2) is not None
        goes_on = digits == 6 and _GOES_ON.match(text, end)
        if digits >= 7 or dots >= 3 or is_lettered or goes_on or literal.endswith(":"):
            runs.append(Run(start, end, digits, dots, is_lettered))
    return runs
