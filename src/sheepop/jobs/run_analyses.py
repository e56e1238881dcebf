"""The analyses of a training run, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sheepop.core.console import Console
from sheepop.interpret.control.coordinates import Coordinates
from sheepop.interpret.control.stability import NoiseFinding, SharpnessFinding
from sheepop.jobs.advice import AdviceFinding, advise
from sheepop.jobs.analyze_run import MOST_PRODUCTS, RunAnalysisRequest, analyze_run, noise_of, sharpness_of
from sheepop.jobs.coordinates import CoordinatesRequest, check_coordinates
from sheepop.jobs.rates import RateFinding, find_best_rate


class RunAnalyses:
    """A training run as a control system: ``sheepop.analyze("runs/quickstart").sharpness()``.

    `step` is that of a checkpoint, by default of the newest. Nothing in the run changes, but a trial of advice is a run
    of its own beside it. A path without a run, or a run on which something cannot be measured, raises `UsageError`.
    """

    def __init__(self, run: str | Path, device: str = "auto") -> None:
        self.run, self.device = Path(run), device

    def sharpness(
        self,
        *,
        step: int | None = None,
        learning_rate: float | None = None,
        rows: int | None = None,
        products: int = MOST_PRODUCTS,
    ) -> SharpnessFinding:
        """Measures how near the learning rate is to the limit of the optimizer, like ``sheepop analyze sharpness``.

        It is measured on `rows` rows of the batch, by default half of it, with at most `products` products with the
        Hessian.
        """
        request = RunAnalysisRequest(self.run, None, step, learning_rate, self.device)
        return analyze_run(request, SharpnessFinding.verb, lambda run: sharpness_of(run, rows=rows, products=products))

    def noise(self, *, step: int | None = None, batches: int = 8) -> NoiseFinding:
        """Measures the noise scale of the gradient over `batches` batches, like ``sheepop analyze noise``."""
        request = RunAnalysisRequest(self.run, None, step, None, self.device)
        return analyze_run(request, NoiseFinding.verb, lambda run: noise_of(run, batches=batches))

    def coordinates(
        self, *, widths: Sequence[int] = (), steps: int = 5, learning_rate: float | None = None
    ) -> Coordinates:
        """Measures how activations grow with the width of the network, like ``sheepop analyze coordinates``."""
        options = {"device": self.device}
        return check_coordinates(CoordinatesRequest(self.run, widths, steps, learning_rate, options=options))

    def rate(self, *, share: float = 1.0, quiet: bool = False) -> RateFinding:
        """Finds the learning rate by trainings for a `share` of the run's steps, like ``sheepop analyze rate``."""
        return find_best_rate(self.run, share=share, device=self.device, console=Console(quiet=quiet))

    def advice(self, *, tries: bool = False, quiet: bool = False) -> AdviceFinding:
        """Returns what the measurements of the run advise, like ``sheepop analyze advice``; `tries` tries it."""
        return advise(self.run, tries=tries, console=Console(quiet=quiet))
