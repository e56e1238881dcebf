"""How this program is called in the shell that it was started from, for the commands that it prints."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "sheepop"


def typed(*words: str | Path) -> str:
    """The command line of ``sheepop`` with these words, quoted so that it works as it is printed."""
    return " ".join([_called(), *(shlex.quote(str(word)) for word in words)])


def typed_beside(program: str, *words: str | Path) -> str:
    """The command line of another program, one that is installed beside this Python if it is there at all."""
    beside = Path(sys.executable).parent / program
    name = _shortest(beside, program) if beside.is_file() else program
    return " ".join([name, *(shlex.quote(str(word)) for word in words)])


def _called() -> str:
    """The name alone where the shell finds this program by it, else the path to it, else the module of its Python."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == NAME:
        return f"{_shortest(Path(sys.executable), 'python')} -m {NAME}"
    if started.name != NAME or started.parent == Path():
        return NAME  # another program has imported it, and what it prints is for a shell
    return _shortest(started, NAME)


def _shortest(program: Path, name: str) -> str:
    """`name` where the search path leads to `program` by it; else its path, from here when it lies below."""
    found = shutil.which(name)
    if found is not None and Path(found).absolute() == program.absolute():
        return name
    path = program.absolute()
    below = os.path.relpath(path)
    return shlex.quote(str(path) if below.startswith(os.pardir) else below)
