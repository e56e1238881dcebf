"""Packages that hand names on without loading the modules that hold them, until a name is asked for."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` (PEP 562) of a package, by the imports under its ``if TYPE_CHECKING``.

    Those imports are the one list of what the package hands on: type checkers read it as it stands, and here each name
    is loaded from its module when it is first asked for. An ``__init__.py`` that uses it reads ::

        if TYPE_CHECKING:
            from sheepop.model.config import ModelConfig
        else:
            __getattr__, __dir__ = lazy_exports(__name__)

        __all__ = ["ModelConfig"]
    """
    module = sys.modules[package]
    homes = _imports_for_type_checkers(inspect.getsource(module))

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        value = importlib.import_module(f"{home}.{name}") if home == package else _taken(home, name)
        setattr(module, name, value)  # the next time Python finds it by itself
        return value

    return load, lambda: sorted(vars(module)["__all__"])


def _taken(home: str, name: str) -> Any:
    return getattr(importlib.import_module(home), name)


def _imports_for_type_checkers(source: str) -> dict[str, str]:
    """Name to module, of the ``from ... import`` lines in the blocks that only type checkers read."""
    blocks = [node.body for node in ast.parse(source).body if isinstance(node, ast.If) and _is_type_checking(node.test)]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
