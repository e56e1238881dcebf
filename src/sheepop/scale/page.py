"""What a family says: numbers, a picture, and a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import sheepop
from sheepop.report import Page, save_png, shown
from sheepop.report.figures import blank_figure, finish_axes, label_few_powers
from sheepop.report.palette import NEUTRAL, RUNS, SCORE
from sheepop.scale.allocation import best_size, curves
from sheepop.scale.family import Family
from sheepop.scale.fit import PRIOR, Fit, Observation
from sheepop.scale.law import known_laws
from sheepop.scale.shapes import Shape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LAW, RUN, PICTURE, PAGE = "law.json", "run.yaml", "law.png", "report.html"
_POINTS = 60


@dataclass(frozen=True)
class Recommended:
    """The best run for the budget: `parameters` that multiply a token, `tokens`, `rows` of a step.

    `between` is the interval of the best number of parameters, `loss` the predicted loss with its interval, in nats per
    token. `bits` are the bits per byte of a nat per token on the held-out text. `is_far` if the budget is far beyond
    the largest run. The law gives the loss `recipe_loss` for the `recipe`'s own choice at the same budget, which is
    `recipe_ratio` times that of the recommended run, with an interval for two runs.
    """

    shape: Shape
    parameters: float
    between: tuple[float, float]
    tokens: float
    flops: float
    rows: int
    learning_rate: float
    loss: tuple[float, float, float]
    bits: float
    is_far: bool
    recipe: Shape
    recipe_loss: float
    recipe_ratio: tuple[float, float, float]

    @property
    def is_like_recipe(self) -> bool:
        """Whether the interval of the ratio of both losses, the recipe's and the recommended run's, contains 1."""
        _, low, high = self.recipe_ratio
        return low <= 1 <= high

    def to_dict(self) -> dict[str, Any]:
        """The run as plain data."""
        return {
            "d_model": self.shape.d_model,
            "num_layers": self.shape.num_layers,
            "parameters": self.parameters,
            "parameters_between": list(self.between),
            "tokens": self.tokens,
            "flops": self.flops,
            "batch_rows": self.rows,
            "learning_rate": self.learning_rate,
            "loss": self.loss[0],
            "loss_between": list(self.loss[1:]),
            "bits_per_byte": self.loss[0] * self.bits,
            "bits_per_byte_between": [each * self.bits for each in self.loss[1:]],
            "is_far": self.is_far,
            "recipe": {
                "d_model": self.recipe.d_model,
                "num_layers": self.recipe.num_layers,
                "loss": self.recipe_loss if math.isfinite(self.recipe_loss) else None,
                "ratio_between": list(self.recipe_ratio[1:]) if math.isfinite(self.recipe_loss) else None,
                "is_equal": self.is_like_recipe,
            },
        }


@dataclass(frozen=True)
class Scaled:
    """A fitted family: the runs, those left out with the reason, the law, and the run that it recommends."""

    family: Family
    runs: tuple[Observation, ...]
    left_out: Mapping[str, str]
    fit: Fit
    recommended: Recommended

    @property
    def notes(self) -> list[str]:
        """What to know of the law, in sentences."""
        found, family = self.recommended, self.family
        more, least, most = (ratio - 1 for ratio in found.recipe_ratio)
        told = "they are equal as far as these runs can tell" if found.is_like_recipe else "they are not equal"
        notes = [
            f"By the law the recipe's own choice for this budget, {found.recipe}, has a loss of "
            f"{found.recipe_loss:.4f} ({more:+.1%}; two such runs differ by {least:+.1%} to {most:+.1%}): {told}."
        ]
        if self.fit.with_prior:
            prior, in_time = known_laws()[PRIOR], family.budget.kind == "seconds"
            size = f" Its best size is drawn towards the recipe's, {found.recipe}." if in_time else ""
            notes.append(
                "The runs are too few or too alike for the law, so its exponents are drawn towards "
                f"{prior.law.alpha:.3g} and {prior.law.beta:.3g} ({prior.origin}).{size}"
            )
        if found.is_far:
            notes.append(
                "The budget is more than 100 times that of the largest run, so the loss is far from what was seen."
            )
        passes = found.tokens / family.unique
        if passes > 1:
            worth = family.use.worth(found.tokens)
            notes.append(
                f"The text is read {passes:.1f} times, which is worth {worth:,.3g} new tokens (Muennighoff 2023)."
            )
        if family.use.most_passes is not None:
            notes.append(
                f"No size is considered for which the budget reads the text more than {family.use.most_passes:g} "
                "times, because n-gram embeddings would memorise it."
            )
        if family.use.inference:
            notes.append(f"The budget also pays for reading or writing {family.use.inference:,.3g} tokens later.")
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data, as ``law.json`` stores it."""
        return {
            "law": self.fit.to_dict(),
            "recommended": self.recommended.to_dict(),
            "notes": self.notes,
            "runs": [asdict(run) for run in self.runs],
            "left_out": dict(self.left_out),
            "beside": [vars(each) | {"is_inside": each.is_inside} for each in self.family.beside],
        }


def write_page(directory: Path, scaled: Scaled) -> None:
    """Writes the picture and the page into the directory of the family."""
    picture = directory / PICTURE
    save_png(law_figure(scaled), picture)
    found, law = scaled.recommended, scaled.fit.law
    page = Page("Scaling law", footer=f"SheepOp {sheepop.__version__}.")
    page.add_section("Recommended run")
    loss, low, high = found.loss
    page.add_facts(
        {
            "Budget": scaled.family.budget.words,
            "Width x layers": str(found.shape),
            "Parameters that multiply a token": round(found.parameters),
            "Best number, 95 percent interval": f"{found.between[0]:,.0f} to {found.between[1]:,.0f}",
            "Training tokens": round(found.tokens),
            "Rows of a step": found.rows,
            "Learning rate": found.learning_rate,
            "Predicted loss, nats per token": f"{loss:.4f} ({low:.4f} to {high:.4f})",
            "Predicted bits per byte": f"{loss * found.bits:.4f} ({low * found.bits:.4f} to {high * found.bits:.4f})",
        }
    )
    for note in scaled.notes:
        page.add_text(note)
    page.add_text(f"Start it with: sheepop train --config {RUN}")
    page.add_section("Law")
    page.add_text("L(N, D) = E + A / N^alpha + B / D^beta, in nats per token")
    rows = [[name, value, *scaled.fit.intervals[name]] for name, value in law.to_dict().items()]
    page.add_table(
        ["Number", "Value", "Low", "High"], rows, caption="95 percent intervals, by a bootstrap over the runs"
    )
    page.add_picture(picture.read_bytes(), "The runs of the family, their law, and the recommended run")
    page.add_section("Runs")
    cells = [
        [run.name, round(run.parameters), round(run.tokens), f"{run.flops:.3g}", f"{run.loss:.4f}",
         f"{law.loss(run.parameters, scaled.family.use.worth(run.tokens)):.4f}"]
        for run in scaled.runs
    ]  # fmt: skip
    page.add_table(["Run", "Parameters", "Tokens", "Operations", "Loss", "By the law"], cells)
    if scaled.left_out:
        page.add_table(["Left out", "Reason"], list(scaled.left_out.items()))
    if scaled.family.beside:
        page.add_section("Later runs beside their predictions")
        beside = [
            [each.name, f"{each.loss:.4f}", f"{each.predicted:.4f}", f"{each.low:.4f} to {each.high:.4f}",
             shown(each.is_inside)]
            for each in scaled.family.beside
        ]  # fmt: skip
        page.add_table(["Run", "Loss", "Predicted", "95 percent interval", "Inside"], beside)
    page.write(directory / PAGE)


def law_figure(scaled: Scaled) -> Figure:
    """Two panels: curves of equal operations by size, and the lowest loss by operations up to the budget."""
    figure = blank_figure(11, 4.6, 1, 2, has_y_labels=True)
    left, right = figure.subplots(1, 2)
    _draw_curves(left, scaled)
    _draw_frontier(right, scaled)
    return figure


def _draw_curves(axes: Axes, scaled: Scaled) -> None:
    for place, curve in enumerate(curves(scaled.runs)):
        color, sizes = RUNS[place % len(RUNS)], [run.parameters for run in curve.runs]
        axes.plot(sizes, [run.loss for run in curve.runs], "o", color=color, markersize=5)
        grid = np.geomspace(min(sizes), max(sizes), _POINTS)
        label = f"{curve.flops:.2g} operations"
        axes.plot(grid, np.polyval(curve.coefficients, np.log(grid)), color=color, linewidth=1.5, label=label)
        by_law = [scaled.fit.law.loss(n, scaled.family.use.worth(curve.flops / 6 / n)) for n in grid]
        axes.plot(grid, by_law, color=color, linewidth=1.1, linestyle=":")
        if curve.best is not None and curve.loss is not None:
            axes.plot([curve.best], [curve.loss], "v", color=color, markersize=8)
    label_few_powers(axes)
    finish_axes(axes, "Equal operations (dotted: the law; triangles: lowest)", "Parameters that multiply a token")
    axes.set_ylabel("Held-out loss (nats per token)", fontsize=9)


def _draw_frontier(axes: Axes, scaled: Scaled) -> None:
    found, family = scaled.recommended, scaled.family
    grid = np.geomspace(min(run.flops for run in scaled.runs), max(1.5 * found.flops, 2.0), _POINTS // 3)
    rows = []
    for flops in grid:
        parameters, tokens = best_size(scaled.fit.law, float(flops), use=family.use)
        rows.append(scaled.fit.predict(parameters, family.use.worth(tokens)))
    middle, low, high = zip(*rows, strict=True)
    axes.fill_between(grid, low, high, color=NEUTRAL, alpha=0.25, linewidth=0)
    axes.plot(grid, middle, color=NEUTRAL, linewidth=1.6, label="Lowest loss by the law, 95 percent interval")
    own = [run for run in scaled.runs if run not in family.added]
    axes.plot([run.flops for run in own], [run.loss for run in own], "o", color=RUNS[0], markersize=4, label="Family")
    loss, least, most = found.loss
    axes.errorbar(
        [found.flops], [loss], yerr=[[loss - least], [most - loss]], fmt="s", color=SCORE, capsize=4, markersize=6
    )
    axes.plot([found.flops], [loss], "s", color=SCORE, markersize=6, label=f"Recommended: {found.shape}")
    if family.added:
        added = family.added
        axes.plot(
            [r.flops for r in added], [r.loss for r in added], "D", color=RUNS[5], markersize=7, label="Later runs"
        )
    axes.set_xscale("log")
    finish_axes(axes, "Lowest loss for a budget", "Operations of training")
