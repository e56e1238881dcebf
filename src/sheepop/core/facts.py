"""The labels and values shown with a progress bar, and text that is safe for a terminal."""

from __future__ import annotations

from dataclasses import dataclass

# File names and samples may contain escape sequences that would move a terminal's cursor or change its title.
_VISIBLE_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

# The first units of a task include its start, and may be unlike the rest.
_TELLING_SHARE, _TELLING_SECONDS = 0.05, 60.0


@dataclass(frozen=True)
class Fact:
    """A label and a value of a panel; a `wide` one has a line to itself, or several where it is longer."""

    label: str
    value: str
    wide: bool = False


@dataclass(frozen=True)
class Text:
    """A text of several lines under a label; the texts of a panel are side by side below its facts."""

    label: str
    value: str


def shows_time_left(finished: float, total: float, seconds: float) -> bool:
    """Returns whether `finished` of `total` units, done in `seconds`, are enough to tell how long the rest takes."""
    return finished > 0 and (finished >= _TELLING_SHARE * total or seconds >= _TELLING_SECONDS)


def plural(count: float, noun: str) -> str:
    """Returns ``file`` for one and ``files`` for any other number, for a noun whose plural ends in s."""
    return noun if count == 1 else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Returns ``1 file`` or ``1,024 files``; see `plural`."""
    return f"{count:,} {plural(count, noun)}"


def visible(text: str) -> str:
    """Replaces control characters by their codes, so that none reaches a terminal."""
    return text.translate(_VISIBLE_CONTROLS)


def visible_line(text: str) -> str:
    """Does the same as `visible`, and replaces line ends too."""
    return visible(text.replace("\n", "⏎"))
