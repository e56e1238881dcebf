"""Input from a terminal: editable lines, and Ctrl-C that stops an answer but not the program."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from sheepop.cli.options import print_text
from sheepop.core.facts import visible

_ESCAPE = re.compile(r"(\x1b\[[0-9;]*m)")


def at_terminal() -> bool:
    """Whether standard input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def print_styled(text: str, style: str) -> None:
    """Prints `text` on standard output, on a terminal in a Rich style."""
    sys.stdout.write(_styled(text, style) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def for_each_line(do: Callable[[str], bool | None], *, words: Sequence[str] = ()) -> None:
    """Calls `do` with every line that is not empty, until Ctrl-D or until it returns False.

    On a terminal, lines can be edited and recalled, a pasted text is one line, and Tab completes `words` at the start
    of a line. Ctrl-C stops `do` or drops the line, but does not end the program. Elsewhere, lines are read without a
    prompt.
    """
    prompt = _edited(_styled("> ", "bold green"), words) if at_terminal() else ""
    with _interruptible() if prompt else nullcontext():
        while True:
            try:
                line = input(prompt)
                if line.strip() and do(line) is False:
                    return
            except EOFError:
                if prompt:
                    print_text("\n")
                return
            except KeyboardInterrupt:
                if not prompt:
                    raise
                print_text("\n")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Within the block, Ctrl-C raises KeyboardInterrupt instead of ending the program."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _styled(text: str, style: str) -> str:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout)
    with console.capture() as captured:
        console.print(Text(visible(text), style), end="", soft_wrap=True)
    return captured.get()


def _edited(prompt: str, words: Sequence[str]) -> str:
    """Sets up line editing for `input`; returns the prompt in the form that readline needs."""
    try:
        import readline
    except ImportError:  # Python can be built without it
        return prompt
    readline.parse_and_bind("set enable-bracketed-paste on")
    if words:
        readline.set_completer_delims("")
        readline.set_completer(lambda text, state: [word for word in words if text and word.startswith(text)][state])
        readline.parse_and_bind("tab: complete")
    # Readline does not count the text between these marks as width.
    return _ESCAPE.sub("\001\\1\002", prompt)
