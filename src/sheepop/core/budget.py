"""Budgets of a run as people write them: ``24h``, ``1e18flops``, ``50usd``."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from typing import Literal

from sheepop.core.errors import UsageError

_AMOUNT = re.compile(r"(?P<number>\d{1,30}(?:\.\d{1,30})?(?:e[+-]?\d{1,3})?) ?(?P<unit>[a-z]*)", re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_UNITS = (*_SECONDS, "flops", "usd")


@dataclass(frozen=True)
class Budget:
    """How much a run may take: `amount` seconds, floating-point operations or US dollars, and the `words` for it."""

    kind: Literal["seconds", "flops", "usd"]
    amount: float
    words: str

    @classmethod
    def of(cls, text: str, option: str = "--budget") -> Budget:
        """Reads a number with one of the units s, m, min, h, d, flops and usd; raises `UsageError` for anything else.

        Its message names the `option`.
        """
        match = _AMOUNT.fullmatch(text.strip().lower())
        unit = "" if match is None else match["unit"]
        if match is None or unit not in _UNITS:
            near = difflib.get_close_matches(unit or re.sub(r"[^a-z]", "", text.lower()), _UNITS, n=1)
            guess = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(
                f"{option} {text!r} is not a budget.{guess} Write a number with a unit: 24h, 90min, 1e18flops or 50usd."
            )
        amount = float(match["number"]) * _SECONDS.get(unit, 1.0)
        if amount <= 0 or not math.isfinite(amount):
            raise UsageError(f"{option} {text!r} must be above 0 and finite. For example: 24h, 1e18flops or 50usd.")
        return cls("seconds" if unit in _SECONDS else "flops" if unit == "flops" else "usd", amount, text.strip())
