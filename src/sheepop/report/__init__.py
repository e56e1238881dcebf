"""Figures (matplotlib), charts (plotly) and offline HTML pages about runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sheepop.core.lazy import lazy_exports

if TYPE_CHECKING:
    from sheepop.report.charts import (
        bits_per_byte_chart,
        course_chart,
        divergence_chart,
        evaluation_charts,
        expert_load_chart,
        gradient_norm_chart,
        learning_rate_chart,
        length_chart,
        loss_chart,
        order_chart,
        reliability_chart,
        reward_chart,
        speed_chart,
        stability_chart,
        stage_times_chart,
        teacher_chart,
    )
    from sheepop.report.comparison import Curves, comparison_chart, comparison_figure
    from sheepop.report.figures import range_test_figure, save_png, save_svg, training_curves
    from sheepop.report.formatting import MISSING, data_size, duration, flops, scored, shown
    from sheepop.report.page import Drawing, Page
    from sheepop.report.series import number, smooth
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "MISSING",
    "Curves",
    "Drawing",
    "Page",
    "bits_per_byte_chart",
    "comparison_chart",
    "comparison_figure",
    "course_chart",
    "data_size",
    "divergence_chart",
    "duration",
    "evaluation_charts",
    "expert_load_chart",
    "flops",
    "gradient_norm_chart",
    "learning_rate_chart",
    "length_chart",
    "loss_chart",
    "number",
    "order_chart",
    "range_test_figure",
    "reliability_chart",
    "reward_chart",
    "save_png",
    "save_svg",
    "scored",
    "shown",
    "smooth",
    "speed_chart",
    "stability_chart",
    "stage_times_chart",
    "teacher_chart",
    "training_curves",
]
