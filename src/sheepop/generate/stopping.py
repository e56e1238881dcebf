"""Finds stop strings in text that arrives in pieces, and holds back what may turn out to be part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Hands text on until a stop string is complete; the text of that stop string is never handed on.

    The stop string that is complete first counts, and of several complete at the same character the longest. So
    the result does not depend on how the text is cut into pieces. Each stop string is followed by its automaton
    (Knuth, Morris and Pratt 1977), which makes the work per character constant.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._automata = [_Automaton(pattern) for pattern in stop]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now known to lie before any stop string; nothing once one was `matched`."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        for position, character in enumerate(text):
            # All automata must see the character, so this is a list and not a generator.
            complete = [automaton.pattern for automaton in self._automata if automaton.advance(character)]
            if complete:
                self.matched = max(complete, key=len)
                shown = (self._held + text[: position + 1])[: -len(self.matched)]
                self._held = ""
                return shown
        pending = self._held + text
        boundary = len(pending) - max(automaton.state for automaton in self._automata)
        self._held = pending[boundary:]
        return pending[:boundary]

    def finish(self) -> str:
        """What was held back: no more text will complete it."""
        rest, self._held = self._held, ""
        return rest


class _Automaton:
    """`state` is the length of the longest suffix of the text that begins `pattern`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        # borders[n] is the longest proper prefix of the first n characters that is also their suffix.
        self._borders = [0] * (len(pattern) + 1)
        for length in range(2, len(pattern) + 1):
            self._borders[length] = self._next(self._borders[length - 1], pattern[length - 1])

    def advance(self, character: str) -> bool:
        """Reads one character; whether the pattern ends here."""
        self.state = self._next(self.state, character)
        return self.state == len(self.pattern)

    def _next(self, state: int, character: str) -> int:
        while state and (state == len(self.pattern) or self.pattern[state] != character):
            state = self._borders[state]
        return state + 1 if self.pattern[state] == character else 0
