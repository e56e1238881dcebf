"""The template that makes a text of a record: words, and names of fields in braces."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|([{}])|([^{}]+)")
# A command line and plain YAML hand a backslash and the letter after it on as they are.
_ESCAPE = re.compile(r"\\([nt\\])")
_ESCAPED = {"n": "\n", "t": "\t", "\\": "\\"}
# In a format string of Python these reach into objects or change how a value is written; here they mean nothing.
_REFUSED = re.compile(r"[:!\[\]]")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A place in a template for the value called `name`; dots lead into nested records."""

    name: str


def parse_template(template: str) -> tuple[str | Placeholder, ...]:
    """The words and placeholders of a template such as ``{title}\\n{body}``, in order.

    ``{a.b}`` is the field `b` of the record in the field `a`; ``{{`` and ``}}`` stand for the braces themselves, and
    a backslash before ``n``, ``t`` or another backslash for a line end, a tab and the backslash.
    Raises ValueError when a brace has no partner, a name is empty or asks for more than a name, or no field is named.
    """
    pieces: list[str | Placeholder] = []
    for match in _PIECE.finditer(template):
        name, stray, words = match.groups()
        if stray:
            raise ValueError(f"an unmatched {stray!r}; write {stray * 2} for the brace itself")
        if name is not None:
            pieces.append(Placeholder(_checked(name)))
        else:
            pieces.append(_ESCAPE.sub(lambda escape: _ESCAPED[escape[1]], words) if words else match[0][0])
    if not any(isinstance(piece, Placeholder) for piece in pieces):
        raise ValueError("it names no field; write names in braces, such as {title}")
    return tuple(pieces)


def _checked(name: str) -> str:
    if not name or any(not part for part in name.split(".")):
        raise ValueError(f"{{{name}}} does not name a field; write {{name}}, or {{a.b}} for a field inside a field")
    if _REFUSED.search(name):
        raise ValueError(f"{{{name}}} asks for more than a field; write only {{name}} or {{a.b}}")
    return name
