"""Values out of records that may be damaged or of another version: what is not there is empty, never a fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sheepop.report import number, shown


def entry(tree: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The mapping at `path`, empty when it is not there."""
    node: Any = tree
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {}


def text(value: Any) -> str:
    """Text as it is, also when it is empty; anything else as the page shows it."""
    return value if isinstance(value, str) else shown(value)


def whole(value: Any) -> int | None:
    """A number without its fraction, or None."""
    found = number(value)
    return None if found is None else int(found)
