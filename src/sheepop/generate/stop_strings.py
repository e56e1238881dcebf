"""Stop strings: where a text ends, found while it grows."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until a stop string is complete; withholds text that may become part of one.

    The stop string that is complete first ends the text; if several end at the same character, the longest. So the
    result does not depend on how the text is split into pieces. Each stop string has an automaton (Knuth, Morris and
    Pratt 1977), which makes the work per character constant.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._automata = [_Automaton(pattern) for pattern in stop]
        self._withheld = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that is now known to precede any stop string; nothing after one has `matched`."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        for position, character in enumerate(text):
            # All automata must see the character, so this is a list and not a generator.
            complete = [automaton.pattern for automaton in self._automata if automaton.advance(character)]
            if complete:
                self.matched = max(complete, key=len)
                shown = (self._withheld + text[: position + 1])[: -len(self.matched)]
                self._withheld = ""
                return shown
        pending = self._withheld + text
        boundary = len(pending) - max(automaton.state for automaton in self._automata)
        self._withheld = pending[boundary:]
        return pending[:boundary]

    def finish(self) -> str:
        """Returns the withheld text, since no more text follows."""
        rest, self._withheld = self._withheld, ""
        return rest


class _Automaton:
    """Matches one pattern; `state` is the length of the longest suffix of the text that is a prefix of `pattern`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        # borders[n] is the longest proper prefix of the first n characters that is also their suffix.
        self._borders = [0] * (len(pattern) + 1)
        for length in range(2, len(pattern) + 1):
            self._borders[length] = self._next(self._borders[length - 1], pattern[length - 1])

    def advance(self, character: str) -> bool:
        """Reads one character; returns whether the pattern ends with it."""
        self.state = self._next(self.state, character)
        return self.state == len(self.pattern)

    def _next(self, state: int, character: str) -> int:
        while state and (state == len(self.pattern) or self.pattern[state] != character):
            state = self._borders[state]
        return state + 1 if self.pattern[state] == character else 0
