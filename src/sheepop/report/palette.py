"""Colours that are distinct on light and dark backgrounds, and for people with red-green colour blindness."""

from __future__ import annotations

TRAIN = "#3f83c9"
VALIDATION = "#d9772b"
SCORE = "#c2468f"
REFERENCES = ("#8a8f98", "#a678c4", "#4f9d77")
NEUTRAL = "#848b94"
GRID = "rgba(132, 139, 148, 0.28)"
# Okabe and Ito 2008, without black and yellow, which vanish on dark or light backgrounds.
RUNS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
