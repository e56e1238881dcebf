"""Measurements of this machine, in a file in the user's cache directory, so that the next start need not repeat them.

``SHEEPOP_MEASUREMENTS`` names another file. Deleting the file makes the next start measure again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from sheepop.core.errors import SheepOpError
from sheepop.core.files import cache_directory, make_directory, read_json, write_json
from sheepop.core.machine import installed_versions, processor_name

T = TypeVar("T")
_MOST_ENTRIES = 1000


def measurement_key(name: str, device: str, details: str) -> str:
    """The key of a measurement: its name, a hash of `details`, and the hardware, threads and versions it depends on."""
    import torch

    hardware = torch.cuda.get_device_name() if device == "cuda" else processor_name()
    versions = installed_versions(("torch", "sheepop"))
    digest = hashlib.sha256(details.encode()).hexdigest()[:24]
    arithmetic = torch.get_float32_matmul_precision()
    return json.dumps([name, device, hardware, torch.get_num_threads(), arithmetic, versions, digest])


def recall(key: str, kind: type[T]) -> T | None:
    """The remembered value, or None if there is none of this type; a file that cannot be read remembers nothing."""
    try:
        return TypeAdapter(kind).validate_python(_entries().get(key))
    except ValidationError:
        return None


def remember(key: str, value: Any) -> None:
    """Writes the value; does nothing where the file cannot be written. The oldest of many entries are dropped."""
    entries = _entries()
    entries.pop(key, None)
    entries[key] = TypeAdapter(type(value)).dump_python(value, mode="json")
    try:
        make_directory(_file().parent)
        write_json(_file(), dict(list(entries.items())[-_MOST_ENTRIES:]))
    except (SheepOpError, OSError, RuntimeError):
        return


def best_known(key: str, found: float) -> float:
    """The highest value that was ever `found` for `key`, which is remembered."""
    best = max(found, recall(key, float) or 0.0)
    remember(key, best)
    return best


def _entries() -> dict[str, Any]:
    try:
        entries = read_json(_file())
    except (SheepOpError, RuntimeError):  # a process without a home directory gives a RuntimeError
        return {}
    return entries if isinstance(entries, dict) else {}


def _file() -> Path:
    named = os.environ.get("SHEEPOP_MEASUREMENTS")
    return Path(named) if named else cache_directory() / "measurements.json"
