"""The command lines that this program prints, in a form that works in the shell it was started from."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "sheepop"


def typed(*words: str | Path) -> str:
    """Returns the command line of ``sheepop`` with these words, quoted for the shell."""
    return " ".join([_called(), *(shlex.quote(str(word)) for word in words)])


def typed_beside(program: str, *words: str | Path) -> str:
    """Returns the command line of another program, preferably of the one installed next to this Python."""
    beside = Path(sys.executable).parent / program
    name = _shortest(beside, program) if beside.is_file() else program
    return " ".join([name, *(shlex.quote(str(word)) for word in words)])


def _called() -> str:
    """Returns how to call this program: by name if the shell finds it, by path, or as a module of its Python."""
    started = Path(sys.argv[0])
    if started.name == "__main__.py" and started.parent.name == NAME:
        return f"{_shortest(Path(sys.executable), 'python')} -m {NAME}"
    if started.name != NAME or started.parent == Path():
        return NAME  # another program has imported the package, but the printed commands are for a shell
    return _shortest(started, NAME)


def _shortest(program: Path, name: str) -> str:
    """Returns `name` if the shell finds `program` by it, else its path, relative if it is in this directory."""
    found = shutil.which(name)
    if found is not None and Path(found).absolute() == program.absolute():
        return name
    path = program.absolute()
    below = os.path.relpath(path)
    return shlex.quote(str(path) if below.startswith(os.pardir) else below)
