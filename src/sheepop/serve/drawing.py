"""The page's drawing of a network as a script and a style sheet, for pages that load nothing."""

from __future__ import annotations

import re
from importlib.resources import files

_MODULES = ("draw.js", "journey.js")
_IMPORT, _EXPORT = re.compile(r"^import .*;\n", re.MULTILINE), re.compile(r"^export ", re.MULTILINE)


def drawing_script() -> str:
    """A module script that defines the function ``journey`` of ``page/journey.js``."""
    return "".join(_EXPORT.sub("", _IMPORT.sub("", _file(name))) for name in _MODULES)


def drawing_style() -> str:
    """The colours and the rules of the picture."""
    return _file("journey.css")


def _file(name: str) -> str:
    return files("sheepop.serve").joinpath("page", name).read_text(encoding="utf-8")
