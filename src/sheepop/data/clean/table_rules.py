"""The few rules for tables, in which numbers and repetition are no sign of garbage."""

from __future__ import annotations

from sheepop.data.clean.composition import Composition
from sheepop.data.clean.gopher import duplicates
from sheepop.data.clean.quality_config import TableConfig
from sheepop.data.clean.stage import Removal

_FEWEST_ROWS = 20


def table_quality(text: str, config: TableConfig) -> Removal | None:
    """Why the table is not worth keeping, or None."""
    found = Composition.of(text)
    if not found.letters and not found.digits:
        return Removal("no letters", "there is no letter or digit in it")
    unprintable = found.unprintable / found.visible
    if unprintable > config.max_unprintable:
        detail = f"{unprintable:.1%} of the characters cannot be printed, more than {config.max_unprintable:.0%}"
        return Removal("unprintable", detail)
    rows = text.split("\n")
    repeated = duplicates(rows)[1] / (len(text) - text.count("\n"))
    if len(rows) >= _FEWEST_ROWS and repeated > config.max_repeated_rows:
        detail = f"{repeated:.1%} of the table is repeated rows, more than {config.max_repeated_rows:.0%}"
        return Removal("repetition", detail)
    return None
