"""A person at a terminal: lines that are typed, with editing, and Ctrl-C that ends an answer and not the program."""

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
    """Whether a person types and reads here."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def print_styled(text: str, style: str) -> None:
    """`text` on standard output, on a terminal in a style of Rich."""
    sys.stdout.write(_styled(text, style) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def for_each_line(do: Callable[[str], bool | None], *, words: Sequence[str] = ()) -> None:
    """Calls `do` with every line that is typed and not empty, until Ctrl-D, or until it returns False.

    On a terminal lines can be edited and called back, a pasted text is one line, and Tab completes `words` at the
    beginning of a line. Ctrl-C ends what `do` does, or drops a line, and not the program. Elsewhere the lines are read
    without a prompt.
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
    """Within the block Ctrl-C raises KeyboardInterrupt, where the program would otherwise end."""
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
    """Prepares `input` for editing; the prompt in the form that it takes."""
    try:
        import readline
    except ImportError:  # Python can be built without it
        return prompt
    readline.parse_and_bind("set enable-bracketed-paste on")
    if words:
        readline.set_completer_delims("")
        readline.set_completer(lambda text, state: [word for word in words if text and word.startswith(text)][state])
        readline.parse_and_bind("tab: complete")
    # What lies between these marks takes no room on the screen.
    return _ESCAPE.sub("\001\\1\002", prompt)
