"""Watches a run while it trains: sharpness, noise and the health of layers, every so many steps.

It works on the float32 weights outside the step, with its own random numbers, so a watched run has the same weights as
one that is not watched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sheepop.core.random import torch_generator
from sheepop.core.speed import synchronize
from sheepop.interpret.config import AnalysisConfig
from sheepop.interpret.control.advice import advice_of
from sheepop.interpret.control.curvature import num_labels, rows_of, summed_loss
from sheepop.interpret.control.layers import beside_others, layer_health, update_ratios
from sheepop.interpret.control.noise import NoiseSample
from sheepop.interpret.control.stability import loss_along, measure_sharpness, turning_factor
from sheepop.model import Transformer
from sheepop.model.initialization import parameter_role
from sheepop.train.placement import Placement
from sheepop.train.source import PreparedStep
from sheepop.train.tensor_batch import TensorBatch

ITERATIONS = 8
"""Products with the Hessian in one measurement of a run; the residual says how exact the sharpness is."""
PIECES = 8
"""Pieces of a batch whose gradients are compared."""
_LARGEST_SHARE = 0.03  # of a run that an analysis may cost, unless its interval is given
# The response of the loss to the rate is that along the steps of a twentieth of the run. The rows of a measurement are
# those of one of these steps, which must be few beside the others.
_PATHS, _FEWEST_STEPS = 20, 10
# Passes through the network for one row: forward 1, backward 2; a second derivative goes back through both.
_STEP, _PRODUCT, _TURN = 3, 6, 15
_FEW = 8  # the part of a step's rows whose time is compared with that of four times as many
# Passes in separate operations take longer than those of a step.
_EAGER = 1.5


def rows_measured(config: AnalysisConfig, batch_rows: int, micro_rows: int) -> int:
    """The rows on which sharpness and layers are measured."""
    return min(micro_rows, config.rows or max(8, batch_rows // 4))


def cost_in_steps(config: AnalysisConfig, batch_rows: int, micro_rows: int) -> float:
    """Returns the cost of one measurement in training steps, from the number of passes that it takes."""
    rows = rows_measured(config, batch_rows, micro_rows)
    passes = {
        "sharpness": _EAGER * rows * (_STEP + _PRODUCT * ITERATIONS) + rows * _TURN,
        "noise": (1 + 5 / _FEW) * batch_rows * _STEP,
        "layers": _EAGER * rows,
    }
    return sum(passes[name] for name in config.quantities) / (batch_rows * _STEP)


def measuring_interval(config: AnalysisConfig, batch_rows: int, micro_rows: int) -> int:
    """The steps between two measurements: those given, or as many as keep the cost below 3 percent."""
    return config.interval or math.ceil(cost_in_steps(config, batch_rows, micro_rows) / _LARGEST_SHARE)


@dataclass
class TrainingAnalysis:
    """A callback of the loop; see `sheepop.train.loop.Observe`. `batch_rows` are those of a whole step.

    New advice is given to `warn` once. `steps` are those of the run, and `seed` is its seed.
    """

    placement: Placement
    optimizers: Sequence[torch.optim.Optimizer]
    config: AnalysisConfig
    interval: int
    batch_rows: int
    steps: int
    seed: int
    warn: Callable[[str], None]
    _rows: list[Mapping[str, Any]] = field(default_factory=list, init=False)
    _said: set[str] = field(default_factory=set, init=False)
    # The step at which a path ends, and the weights at its beginning.
    _path: tuple[int, Mapping[str, Tensor]] | None = field(default=None, init=False)

    def __call__(self, step: int, prepared: PreparedStep) -> Callable[[], Mapping[str, Any]] | None:
        """Keeps the weights before a step that is to be measured, and those at the beginning of a path."""
        length = self.steps // _PATHS
        between = self.interval * math.ceil(max(1, length) / self.interval)
        if "sharpness" in self.config.quantities and length >= _FEWEST_STEPS and (step + length) % between == 0:
            self._path = step + length, trained_weights(self.placement.model)
        if (step + 1) % self.interval:
            return None
        before = trained_weights(self.placement.model)
        return lambda: self._measured(step + 1, prepared, before)

    def _measured(self, step: int, prepared: PreparedStep, before: Mapping[str, Tensor]) -> dict[str, Any]:
        model, device = self.placement.model, self.placement.device
        batches = [batch.to(device) for batch in prepared.micro_batches]
        rows = rows_measured(self.config, self.batch_rows, len(batches[0].labels))
        batch = rows_of(batches[0], slice(0, rows))
        update = way_from(before, model)
        rate = max(_rates(self.optimizers))
        row: dict[str, Any] = {"learning_rate": rate, "batch_rows": sum(len(each.labels) for each in batches)}
        with self.placement.evaluating():
            if "sharpness" in self.config.quantities and rate > 0:
                generator = torch_generator(self.seed, "sharpness", step)
                row |= self._sharpness(model, batch, generator)
                row["turning_factor"] = turning_factor(loss_along(model, before, update, batch))
                if self._path is not None and self._path[0] == step:
                    loss_at = loss_along(model, self._path[1], way_from(self._path[1], model), batch)
                    self._path = None
                    row["loss_behind"], row["loss_ahead"] = (loss_at(place) - loss_at(1.0) for place in (0.5, 1.5))
            if "noise" in self.config.quantities:
                row |= noise_row(model, batches, device)
            if "layers" in self.config.quantities:
                row |= layers_row(model, batch, before, update)
        self._advise({"step": step, "split": "analysis", **row})
        return row

    def _sharpness(self, model: Transformer, batch: TensorBatch, generator: torch.Generator) -> dict[str, Any]:
        found = measure_sharpness(model, self.optimizers, batch, generator, iterations=ITERATIONS)
        (layer, share), (matrix, of_matrix) = (next(iter(each.items())) for each in (found.layers, found.places))
        return {
            "sharpness": found.value,
            "sharpness_limit": found.limit,
            "sharpness_residual": found.residual,
            "sharpness_share": found.share,
            "sharpness_certain": found.certain if found.certain < math.inf else None,
            "sharpest": layer,
            "sharpest_share": share,
            "sharpest_at": matrix,
            "sharpest_at_share": of_matrix,
        }

    def _advise(self, row: Mapping[str, Any]) -> None:
        self._rows.append(row)
        for advice in advice_of(self._rows):
            if advice.cause not in self._said:
                self._said.add(advice.cause)
                self.warn(f"Step {row['step']:,}: {advice.words}")


def trained_weights(model: Transformer) -> dict[str, Tensor]:
    """A copy of the weights that are trained, by name."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad}


def way_from(begin: Mapping[str, Tensor], model: Transformer) -> dict[str, Tensor]:
    """How far the weights of a model have moved from earlier ones."""
    return {name: model.get_parameter(name).detach() - weight for name, weight in begin.items()}


def tables_of(model: Transformer) -> list[str]:
    """The names of the tables of n-grams, which are kept fixed when curvature and noise are measured."""
    return [name for name, each in model.named_parameters() if parameter_role(name, each.shape) == "table"]


def noise_sample(model: Transformer, batches: Sequence[TensorBatch]) -> NoiseSample | None:
    """The noise and the signal of the gradient over the micro-batches of a step; None if that has a single row."""
    sizes = [len(batch.labels) for batch in batches]
    total, common = sum(sizes), math.gcd(*sizes)
    if total < 2:
        return None
    pieces = min(PIECES, total)
    rows = next(size for size in range(common, 0, -1) if common % size == 0 and total // size >= pieces)
    return NoiseSample.of(_gradients(model, batches, rows), rows)


def noise_row(model: Transformer, batches: Sequence[TensorBatch], device: str) -> dict[str, float]:
    """The noise and the signal of the gradient, and the seconds that one takes of a few rows and of four times as many.

    A step of several micro-batches is not timed: more rows come in further ones, so that its time is in proportion.
    """
    sample = noise_sample(model, batches)
    if sample is None:
        return {}
    found: dict[str, float] = {"gradient_noise": sample.noise, "gradient_signal": sample.signal}
    if len(batches) > 1:
        return found
    count = len(batches[0].labels)
    found["timed_rows"] = few = max(1, count // _FEW)
    for key, rows in (("seconds_of_rows", few), ("seconds_of_four_times", 4 * few)):
        batch = rows_of(batches[0], [row % count for row in range(rows)])
        synchronize(device)
        started = time.perf_counter()
        next(_gradients(model, [batch], rows))
        synchronize(device)
        found[key] = time.perf_counter() - started
    return found


def _gradients(model: Transformer, batches: Sequence[TensorBatch], rows: int) -> Iterator[Sequence[Tensor]]:
    """The mean gradients of pieces of `rows` rows; a token has the same weight in all of them.

    Those of tables, of which a row of text reads few rows, are left out.
    """
    left_out = set(tables_of(model))
    weights = [each for name, each in model.named_parameters() if each.requires_grad and name not in left_out]
    labels, total = sum(map(num_labels, batches)), sum(len(batch.labels) for batch in batches)
    of_piece = labels * rows / total
    for batch in batches:
        for start in range(0, len(batch.labels), rows):
            with torch.enable_grad():
                loss = summed_loss(model, rows_of(batch, slice(start, start + rows))) / of_piece
            yield torch.autograd.grad(loss, weights, materialize_grads=True)


def layers_row(
    model: Transformer, batch: TensorBatch, before: Mapping[str, Tensor], update: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The fastest matrix, the largest score of attention, what is dead, and what is unlike the same in other blocks."""
    ratios, health = update_ratios(before, update), layer_health(model, batch)
    matrices = [name for name, weight in before.items() if parameter_role(name, weight.shape) != "vector"]
    size, move = (beside_others({name: float(of[name].norm()) for name in matrices}) for of in (before, update))
    row: dict[str, Any] = {"dead_heads": list(health.dead_heads)}
    for key, values in (
        ("update_ratio", ratios),
        ("attention_logit", health.attention_logits),
        ("dead_units", health.dead_units),
        ("size_beside_others", size),
        ("update_beside_others", move),
    ):
        if values:
            place = max(values, key=values.__getitem__)
            row |= {key: values[place], f"{key}_at": place}
    if ratios:
        row["update_ratio_median"] = sorted(ratios.values())[len(ratios) // 2]
    return row


def _rates(optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    """The rates of all groups, in units of the run's rate."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [group["lr"] / (group.get("learning_rate_factor", 1.0) or 1.0) for group in groups]
