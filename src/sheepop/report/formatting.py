"""Formats values as text for people, and reads sizes that people write."""

from __future__ import annotations

import math
import re
from typing import Any

from sheepop.core.errors import UsageError

MISSING = "–"
_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
_SIZE = re.compile(r"(?P<number>\d{1,15}(?:\.\d{1,9})?) ?(?P<unit>[A-Za-z]*)", re.ASCII)
_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{rest}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for rest, base in (("", 1000), ("b", 1000), ("ib", 1024))
}


def shown(value: Any) -> str:
    """A value as text for a page: a dash if missing, thousands separators, four significant digits."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**18 else _huge(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value) or MISSING
    return str(value)


def duration(seconds: float | None) -> str:
    """Seconds as ``4.2 s``, ``5 min 03 s``, ``2 h 07 min`` or ``3 d 04 h``."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    larger, unit, smaller, smaller_unit = next(row for row in _UNITS if whole >= row[0])
    return f"{whole // larger:,} {unit} {whole % larger // smaller:02d} {smaller_unit}"


def data_size(num_bytes: float | None) -> str:
    """Bytes as ``812 B``, ``4.2 MB`` and so on, in powers of ten."""
    if num_bytes is None or not math.isfinite(num_bytes) or num_bytes < 0:
        return MISSING
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
    return f"{num_bytes / 1000:,.4g} TB"


def parse_size(text: str) -> int:
    """A size such as ``100MB``, ``1.5 GiB`` or ``4096`` in bytes; raises `UsageError` for anything else."""
    match = _SIZE.fullmatch(text.strip())
    factor = _SIZE_UNITS.get(match["unit"].lower()) if match is not None else None
    if match is None or factor is None:
        raise UsageError(f"{text!r} is not a size. Write it as 100MB, 1.5GB, 64MiB or a number of bytes.")
    return round(float(match["number"]) * factor)


def flops(rate: float | None) -> str:
    """Operations per second as ``93.1 GFLOP/s`` or ``989 TFLOP/s``."""
    if rate is None or not math.isfinite(rate) or rate < 0:
        return MISSING
    size, unit = (1e12, "TFLOP/s") if rate >= 1e12 else (1e9, "GFLOP/s")
    return f"{rate / size:,.3g} {unit}"


def scored(words: str, *, is_sampled: bool) -> str:
    """A score or its name, marked if it was measured on a sample of the held-out text only."""
    return f"{words} (sample)" if is_sampled else words


def _float(value: float) -> str:
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value != 0 and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.3e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _huge(value: int) -> str:
    try:
        return f"{float(value):.3e}"
    except OverflowError:
        return "more than 1e308" if value > 0 else "less than -1e308"
