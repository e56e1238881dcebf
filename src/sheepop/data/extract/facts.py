"""What a file says of itself, such as its title and author, in the form of metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping

_DATE = re.compile(r"\s*(\d{4}(?:-\d\d){0,2})(?!\d)")
_LONGEST_FACT = 1000


def facts_of(stated: Mapping[str, str | None]) -> dict[str, str]:
    """The facts that are stated, each on one line; what is longer than 1000 characters is a text, and no fact."""
    lines = {name: " ".join((value or "").split()) for name, value in stated.items()}
    return {name: line for name, line in lines.items() if 0 < len(line) <= _LONGEST_FACT}


def date_of(text: str | None) -> str:
    """The year, month or day with which a time in ISO 8601 begins, empty where it is none."""
    match = _DATE.match(text or "")
    return match[1] if match else ""
