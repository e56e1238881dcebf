"""The published and imported models in the cache: list, fetch and remove them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sheepop.checkpoint.model_cache import CachedModel, cached_models
from sheepop.checkpoint.model_kind import PublishedName
from sheepop.core.console import Console
from sheepop.core.errors import UsageError


def list_models() -> list[dict[str, Any]]:
    """The models in the cache, the last used first.

    Each has a name, revision, bytes, the formats of its tensors, or `tokenizer` (`stored`), last use (ISO 8601, UTC)
    and directory.
    """
    return [_described(entry) for entry in sorted(cached_models(), key=lambda entry: -(entry.last_used or 0))]


def pull_model(name: str, console: Console | None = None) -> dict[str, Any]:
    """Fetches the newest commit of a published model into the cache; returns its entry of `list_models`."""
    found = PublishedName.parse(name)
    if found is None:
        raise UsageError(
            f"{name} is not the name of a published model. Write OWNER/NAME, OWNER/NAME@REVISION, or "
            "OWNER/NAME/FILE.gguf for one GGUF file."
        )
    from sheepop.checkpoint.published_model import pull  # loads the hub's library

    return _described(pull(found, console or Console.silent()))


def remove_models(names: Sequence[str], may_remove: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Removes models from the cache after `may_remove` has agreed to the list; returns what was removed.

    A name is that of `list_models`, a path that was imported, or either with ``@`` and the beginning of the revision.
    Raises `UsageError` for a name that is not in the cache; then nothing is removed.
    """
    entries = cached_models()
    chosen: dict[Path, CachedModel] = {}
    for name in names:
        found = [entry for entry in entries if _is_named(entry, name)]
        if not found:
            known = ", ".join(sorted({entry.name for entry in entries})) or "nothing"
            raise UsageError(f"{name} is not in the cache, which holds {known}.")
        chosen |= {entry.path: entry for entry in found}
    described = [_described(entry) for entry in chosen.values()]
    if not may_remove(described):
        return []
    for entry in chosen.values():
        entry.remove()
    return described


def _is_named(entry: CachedModel, name: str) -> bool:
    plain, _, revision = name.removeprefix("hf:").partition("@")
    if entry.revision is None:
        return name == entry.name or str(Path(name).resolve()) == entry.name
    return plain.lower() == entry.name.lower() and entry.revision.startswith(revision)


def _described(entry: CachedModel) -> dict[str, Any]:
    used = entry.last_used
    return {
        "name": entry.name,
        "revision": entry.revision,
        "finished": entry.is_finished,
        "bytes": entry.num_bytes,
        "stored": entry.record.get("stored", []) if entry.has_weights else ["tokenizer"],
        "last_used": None if used is None else datetime.fromtimestamp(used, UTC).isoformat(timespec="seconds"),
        "path": str(entry.directory if entry.is_finished else entry.path),
    }
