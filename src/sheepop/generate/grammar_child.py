"""The child process that compiles grammars within limits of time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher

from sheepop.core.bounded_child import Alive, serve


def compile_grammar(request: Any, _: Alive) -> Iterator[Any]:
    """Yields the error of a grammar in llguidance's syntax, or an empty string if it compiles."""
    yield LLMatcher.validate_grammar(request)


if __name__ == "__main__":
    serve(compile_grammar)
