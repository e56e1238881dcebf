"""Colours that are told apart on light and on dark paper, and by people who do not see red or green."""

from __future__ import annotations

TRAIN = "#3f83c9"
VALIDATION = "#d9772b"
REFERENCES = ("#8a8f98", "#a678c4", "#4f9d77")
NEUTRAL = "#848b94"
GRID = "rgba(132, 139, 148, 0.28)"
