"""Names that a package hands on are loaded when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

PACKAGE = """
from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from flock.heavy import Sheep, \\
        wool
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = ["Sheep", "wool"]
"""


def test_a_name_loads_its_module_once_and_when_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "flock"
    folder.mkdir()
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "heavy.py").write_text("class Sheep: ...\nwool = []\n")
    (folder / "light.py").write_text("grass = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        flock = importlib.import_module("flock")
        assert importlib.import_module("flock.light").grass == 1
        assert dir(flock) == ["Sheep", "wool"]
        assert "flock.heavy" not in sys.modules
        with pytest.raises(AttributeError, match="module 'flock' has no attribute 'goat'"):
            _ = flock.goat
        assert "flock.heavy" not in sys.modules
        assert flock.wool is sys.modules["flock.heavy"].wool
        assert "Sheep" not in vars(flock) and "wool" in vars(flock)
        assert flock.Sheep is sys.modules["flock.heavy"].Sheep
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "flock"]:
            del sys.modules[name]
