"""Pictures and offline pages about runs: figures (matplotlib), charts (plotly), pages (HTML)."""

from sheepop.report.charts import (
    bits_per_byte_chart,
    gradient_norm_chart,
    learning_rate_chart,
    loss_chart,
    speed_chart,
    stage_times_chart,
)
from sheepop.report.figures import save_png, training_curves
from sheepop.report.formatting import MISSING, data_size, duration, shown
from sheepop.report.page import Page
from sheepop.report.range_test import range_test_figure
from sheepop.report.series import Series, number, series, smooth

__all__ = [
    "MISSING",
    "Page",
    "Series",
    "bits_per_byte_chart",
    "data_size",
    "duration",
    "gradient_norm_chart",
    "learning_rate_chart",
    "loss_chart",
    "number",
    "range_test_figure",
    "save_png",
    "series",
    "shown",
    "smooth",
    "speed_chart",
    "stage_times_chart",
    "training_curves",
]
