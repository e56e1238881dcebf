"""The picture of a learning-rate range test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sheepop.report.figures import blank_figure
from sheepop.report.palette import TRAIN, VALIDATION

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def range_test_figure(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], suggestion: float, lowest: float
) -> Figure:
    """Loss against the logarithm of the rate, raw and smoothed, with the suggested rate and that of the lowest loss."""
    figure = blank_figure(8, 4.5, has_y_labels=True)
    axes = figure.subplots()
    axes.plot(rates, losses, color=TRAIN, alpha=0.35, linewidth=1.4, label="Loss")
    axes.plot(rates, smoothed, color=TRAIN, linewidth=1.8, label="Smoothed")
    axes.axvline(suggestion, color=VALIDATION, linewidth=1.4, label=f"Suggested: {suggestion:.2e}")
    axes.axvline(lowest, color="#777777", linestyle="--", linewidth=1.2, label=f"Lowest loss: {lowest:.2e}")
    axes.set_xscale("log")
    # The rise at the end goes as high as it will; what matters is the fall before it.
    low, high = min(smoothed), max(smoothed[: smoothed.index(min(smoothed)) + 1])
    margin = 0.15 * (high - low)
    axes.set_ylim(low - margin, high + 2 * margin)
    axes.set_title("Learning-rate range test", loc="left", fontsize=11)
    axes.set_xlabel("Learning rate", fontsize=9)
    axes.set_ylabel("Loss (nats per token)", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure
