"""Runs Python files of the user before a command; they can add names that settings accept."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sheepop.core.errors import SheepOpError, UsageError


@dataclass(frozen=True)
class Plugin:
    """A plugin file that was run: its path, and the SHA-256 of its bytes."""

    path: str
    sha256: str


_loaded: list[Plugin] = []
commands: dict[str, Callable[..., None]] = {}
"""Commands that plugins have registered, by name."""


def load_plugins(paths: Sequence[str | Path]) -> None:
    """Runs each file once; raises `UsageError` with its path if one is missing or fails."""
    for path in map(Path, paths):
        try:
            plugin = Plugin(str(path), hashlib.sha256(path.read_bytes()).hexdigest())
        except OSError as error:
            raise UsageError(f"The plugin {path} cannot be read: {error.strerror}.") from None
        if plugin.sha256 in (other.sha256 for other in _loaded):
            continue
        spec = importlib.util.spec_from_file_location(f"sheepop_plugin_{plugin.sha256[:16]}", path)
        if spec is None or spec.loader is None:
            raise UsageError(f"The plugin {path} is not a Python file; its name must end in .py.")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except SheepOpError as error:
            raise UsageError(f"The plugin {path} was refused: {error}") from None
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = "" if trace is None else f", line {trace.tb_lineno}"
            raise UsageError(f"The plugin {path}{where} failed: {type(error).__name__}: {error}") from error
        _loaded.append(plugin)


def loaded_plugins() -> list[Plugin]:
    """Returns the plugins that were run in this process, in order."""
    return list(_loaded)


def require_plugins(wanted: Sequence[Plugin]) -> None:
    """Raises `UsageError` unless all of these plugins were run, with the same bytes."""
    for plugin in wanted:
        if plugin.sha256 not in (other.sha256 for other in _loaded):
            raise UsageError(
                f"This run was started with the plugin {plugin.path} (SHA-256 {plugin.sha256[:12]}), which was not "
                f"loaded or has changed since. Give the same file with --plugin {plugin.path}."
            )
