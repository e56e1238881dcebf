"""Lets packages re-export names whose modules are loaded only when a name is first used."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` (PEP 562) of a package, from the imports under ``if TYPE_CHECKING``.

    Those imports are the only list of the names that the package exports: type checkers read them directly, and here
    each name is loaded from its module on first use. An ``__init__.py`` that uses it has ::

        if TYPE_CHECKING:
            from sheepop.model.config import ModelConfig
        else:
            __getattr__, __dir__ = lazy_exports(__name__)

        __all__ = ["ModelConfig"]
    """
    module = sys.modules[package]
    blocks = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.If)]
    blocks = [node for node in blocks if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: node.module or "" for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        is_module = home == package
        with without_collections():
            found = importlib.import_module(f"{home}.{name}" if is_module else home)
        value = found if is_module else getattr(found, name)
        setattr(module, name, value)  # next time Python finds it without this function
        return value

    return load, lambda: sorted(vars(module)["__all__"])


@contextmanager
def without_collections() -> Iterator[None]:
    """Stops Python's search for garbage, which many new objects set off over and over: a seventh of torch's import."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
