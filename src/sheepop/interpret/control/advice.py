"""Advice on a run from what its analysis measured: the cause in words, its evidence, and the change to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, groupby, takewhile
from typing import Any

from sheepop.interpret.control.noise import NoiseSample, NoiseScale
from sheepop.report import number

Row = Mapping[str, Any]
RATE, LAYER, BATCH, SCORES, HEADS, UNITS = "learning rate", "layer", "batch size", "scores", "dead heads", "dead units"
"""The causes that advice names."""
NEAR_LIMIT = 0.9
"""From this share of its limit on, a rate is near it. Small batches look sharper, so advice waits for one more."""
_SEVERAL = 2  # measurements in a row must show the same, because one of them may be chance; of a near limit, one more
# Training stays at the edge of stability without harm (Cohen et al. 2021): steps go past the lowest loss, and lower it
# all the same. Unstable steps turn after 1 / share of their length, so they raise it. Rows of older runs lack the share
# from which instability is certain.
_CERTAIN, _HARMLESS_TURN = 1.2, 1.0
# From this share of its limit on, steps throw a network to flatter places, where it seems to bear twice as high a rate
# as the one that is to be trained (Lewkowycz et al. 2020). Its sharpness scatters over decades, so that a rate changes
# by at most a factor of 32 before it is measured again (bench/control_advice.py).
_BROKEN, _MOST_AT_ONCE = 2.0, 32.0
# A rate is named as too low if the loss along paths says that it could be half a decade higher, one step of the search
# for a better one.
_FAR = 10**0.5
_LASTING = 8  # paths since the rate was highest
_ONE_PLACE = 0.8  # of the sharpest direction, which then belongs to one layer
# A batch is named as too small if another one reaches the same loss in four fifths of the time, by the lower end of the
# noise scale's interval: it is then about three times too small.
_SOONER = 1.25
_MOST_ROWS = 4  # times the batch, because the time of far more rows is not known from that of few
_FEWEST_BATCHES = 4  # for an interval of the noise scale
# Times the median of the other blocks. Healthy runs reach 1.9, and 12 with plain descent (bench/control_faults.py).
_TOO_LONG, _TOO_FAR = 2.5, 50.0
_SLOWER = 0.3  # the factor of the rate of a matrix that is unlike the others
# By the cause: what lasts, from which size on, and what is said. Weights of attention are all but 0 and 1 at a score of
# 100 (Moonshot 2025, Kimi K2, clips there).
_LASTING_CAUSES: Mapping[str, tuple[str, float, str, Mapping[str, Any]]] = {
    SCORES: (
        "attention_logit",
        100.0,
        "Scores of {attention_logit_at} reach {attention_logit:,.0f} {when}, so that its attention is all or nothing "
        "and learns no more: set model.qk_norm to head, or lower the rate of this layer by an entry of "
        "training.layers.",
        {"model.qk_norm": "head"},
    ),
    UNITS: (
        "dead_units",
        0.5,
        "{dead_units:.0%} of the units of {dead_units_at} are 0 on all tokens {when}: lower training.learning_rate, or "
        "choose an activation that is not flat below 0, such as gelu or swiglu.",
        {"training.learning_rate": 0.5},
    ),
}


@dataclass(frozen=True)
class Advice:
    """A cause of trouble since `step`: `words` name it with the evidence, and `changes` are settings that may cure it.

    The learning rate among them is a factor of the run's own, and entries of `training.layers` stand before its own.
    """

    cause: str
    step: int
    words: str
    changes: Mapping[str, Any]


def advice_of(rows: Sequence[Row]) -> list[Advice]:
    """What to change about a run with these rows of metrics; empty if nothing is wrong."""
    rows = [row for row in rows if row.get("split") == "analysis"]
    rate, unlike, batch, heads = _fast(rows) or _slow(rows), _unlike(rows), _batch(rows), _heads(rows)
    found = (rate, unlike, batch, _lasting(rows, SCORES), heads, _lasting(rows, UNITS))
    return [advice for advice in found if advice is not None]


def noise_scale_of(rows: Sequence[Row]) -> NoiseScale | None:
    """The noise scale in rows while the rate was high; None if there are too few measurements.

    It grows as the loss falls. A batch serves the whole run, so the beginning counts, with its large signal. The end is
    left out, because a falling rate averages the noise as a larger batch does.
    """
    measured = _having(rows, "learning_rate", "gradient_noise", "gradient_signal")
    high = [row for row in measured if row["learning_rate"] >= _highest(measured) / 2]
    samples = [NoiseSample(row["gradient_noise"], row["gradient_signal"]) for row in high]
    return NoiseScale.of(samples) if len(samples) >= _FEWEST_BATCHES else None


def _having(rows: Sequence[Row], *keys: str) -> list[Row]:
    """The rows that have numbers under all these keys."""
    return [row for row in rows if all(number(row.get(key)) is not None for key in keys)]


def _slow(rows: Sequence[Row]) -> Advice | None:
    """Finds a rate that is too low: far longer steps along a twentieth of the run would have lowered the loss more."""
    paths = _paths(rows)
    if not paths or (lowest := _lowest(paths)) < _FAR:
        return None
    length = f"{lowest:.2f} times as long" if lowest < 10 else "far longer"
    factor = min(_MOST_AT_ONCE, lowest)
    words = (
        f"The learning rate is too low {_when(paths, rows)}: the loss would be lowest had the steps of a twentieth "
        f"of the run been {length}. Multiply training.learning_rate by {factor:.2g}; sheepop analyze rate finds the "
        "best one by trainings."
    )
    return Advice(RATE, paths[0]["step"], words, {"training.learning_rate": factor})


def _paths(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with the loss along a path since the rate was highest, but for their first quarter.

    There are none if they are too few.
    """
    highest = _highest(rows)
    since = list(dropwhile(lambda row: row["learning_rate"] < highest, _having(rows, "learning_rate")))
    measured = _having(since, "loss_behind", "loss_ahead", "sharpness_share")
    steady = [row for row in measured if row["learning_rate"] >= highest / 2]
    return steady[len(steady) // 4 :] if len(steady) >= _LASTING else []


def _lowest(paths: Sequence[Row]) -> float:
    """Where the mean loss along paths is lowest: the vertex of the parabola through it at 1/2, 1 and 3/2 of a path."""
    behind, ahead = (sum(row[key] for row in paths) for key in ("loss_behind", "loss_ahead"))
    if behind + ahead <= 0:
        return math.inf if behind > ahead else 0.0
    return max(0.0, 1 + (behind - ahead) / (4 * (behind + ahead)))


def _fast(rows: Sequence[Row]) -> Advice | None:
    """A rate at its limit or beyond; the advised one is half of what steps bear, or a quarter far beyond the limit.

    The first two measurements count, because the network is the least broken then.
    """
    key = "sharpness_share"
    near = _streak(rows, key, 1.0, holds=_is_harmful) or _streak(rows, key, NEAR_LIMIT, _SEVERAL + 1, _is_harmful)
    streak = near or _swinging(rows)
    if not streak:
        return None
    # The milder one of the first two, because single batches may be far sharper.
    first, mild = streak[0], max(streak[:_SEVERAL], key=_limit)
    share, borne, layer = mild["sharpness_share"], _borne(mild), str(mild["sharpest"])
    limit = "the limit" if borne == 1 else f"at {borne:g} times the limit, as much as runs with this optimizer bear"
    evidence = (
        f"at {share:.2f} of its limit {_when(streak, rows)} (the preconditioned sharpness is {mild['sharpness']:.3g}, "
        f"and steps at this rate bear {mild['sharpness_limit']:.3g}: a rate of {_limit(mild):.2g} is {limit})"
    )
    wanted = max(2.0, (4.0 if share >= _BROKEN * borne else 2.0) * _highest(rows) / _limit(mild))
    factor = min(wanted, _MOST_AT_ONCE)
    slower = "halve training.learning_rate" if factor == 2.0 else f"divide training.learning_rate by {factor:.1f}"
    if factor < wanted:
        slower += " and measure again, because a network so far beyond its limit does not tell how far to go"
    found = (
        f"The learning rate is {evidence}, and {mild['sharpest_share']:.0%} of the sharpest direction lie in "
        f"{_in_words(layer)}{_matrix(mild)}"
    )
    changes = {"training.learning_rate": 1 / factor}
    if all(row["sharpest"] == layer and row["sharpest_share"] >= _ONE_PLACE for row in streak):
        entry = f"training.layers=[{{pattern: {layer}.*, learning_rate: {1 / factor:.2g}}}]"
        return Advice(LAYER, first["step"], f"{found}: lower its rate by {entry}, or {slower}.", changes)
    return Advice(RATE, first["step"], f"{found}: lengthen the warm-up, or {slower}.", changes)


def _limit(row: Row) -> float:
    """The rate at which a step like that of this row would be at the share of its limit that a run bears."""
    return float(row["learning_rate"] * _borne(row) / row["sharpness_share"])


def _highest(rows: Sequence[Row]) -> float:
    return max((row["learning_rate"] for row in _having(rows, "learning_rate")), default=0.0)


def _certain(row: Row) -> float:
    """The share from which instability is certain, infinite if from none."""
    certain = number(row.get("sharpness_certain", _CERTAIN))
    return math.inf if certain is None else certain


def _borne(row: Row) -> float:
    """The share of the limit that a run bears: half of that from which instability is certain, but at least 1."""
    certain = _certain(row)
    return max(1.0, certain / _BROKEN) if certain < math.inf else 1.0


def _is_harmful(row: Row) -> bool:
    """Whether a rate near its limit, or beyond it, is too high: its step raises the loss, or instability is certain."""
    turn = number(row.get("turning_factor"))
    return turn is None or turn < _HARMLESS_TURN or row["sharpness_share"] >= _certain(row)


def _swinging(rows: Sequence[Row]) -> list[Row]:
    """The first three measurements whose geometric mean is certain instability; empty if there are none.

    Steps that swing across a valley are on its steep side and on its flat side in turn, so that few shares in a row are
    high.
    """
    measured = _having(rows, "sharpness_share")
    for three in zip(measured, measured[1:], measured[2:], strict=False):
        shares = [row["sharpness_share"] for row in three]
        if min(shares) > 0 and math.prod(shares) >= _certain(three[0]) ** 3:
            return list(three)
    return []


def _unlike(rows: Sequence[Row]) -> Advice | None:
    """A matrix that is longer, or moves farther, than the same matrix of the other blocks.

    Lengths are no estimates, so one measurement of them is enough. Updates vary, and the same must stand out twice.
    """
    for key, least, count, found in (
        ("size_beside_others", _TOO_LONG, 1, "{name} is {times:.1f} times as long as"),
        ("update_beside_others", _TOO_FAR, _SEVERAL, "A step moves {name} {times:.1f} times as far as"),
    ):
        for name, same in groupby(rows, lambda row, place=f"{key}_at": row.get(place)):  # type: ignore[misc]
            if streak := _streak(list(same), key, least, count):
                words = (
                    f"{found.format(name=name, times=streak[0][key])} the same matrix of the other blocks "
                    f"{_when(streak, rows)}, so that its block is unlike the others: its initial scale, or its own "
                    "rate in training.layers, is too high. Lower that, or slow the matrix by "
                    f"training.layers=[{{pattern: {name}, learning_rate: {_SLOWER}}}]."
                )
                entry = {"pattern": str(name), "learning_rate": _SLOWER}
                return Advice(LAYER, streak[0]["step"], words, {"training.layers": [entry]})
    return None


def _batch(rows: Sequence[Row]) -> Advice | None:
    """A batch with which a loss takes longer than with a larger one.

    Steps of b rows must be ``1 + n / b`` times as many as without noise, at the noise scale n, and take as long as
    ``b + f`` rows, of which f rows are the time that every step takes. The product of both is least at ``sqrt(n f)``
    rows. A batch below n alone is no fault: each of its rows teaches as much as in a larger one, which needs fewer
    steps but more rows for the same loss (McCandlish et al. 2018).
    """
    scale, step = noise_scale_of(rows), seconds_of_step(rows)
    if scale is None or step is None:
        return None
    (fixed, of_row), size = step, rows[-1]["batch_rows"]
    soonest = math.sqrt(scale.low * fixed / of_row) if of_row else math.inf
    best = power_of_two(min(scale.low, soonest, _MOST_ROWS * size))

    def seconds(rows: int) -> float:
        return (1 + scale.low / rows) * (fixed + of_row * rows)

    if best <= size or seconds(size) < _SOONER * seconds(best):
        return None
    longer = (fixed + of_row * best) / (fixed + of_row * size)
    words = (
        f"Steps of {size:,} rows are too small for this machine: {best:,} rows take {longer:.1f} times as long, and "
        f"the gradient's noise scale is {scale.words}. With training.global_batch_size={best} the same loss comes in "
        f"{seconds(best) / seconds(size):.0%} of the time or less, with fewer steps and perhaps a higher rate."
    )
    return Advice(BATCH, rows[0]["step"], words, {"training.global_batch_size": best})


def seconds_of_step(rows: Sequence[Row]) -> tuple[float, float] | None:
    """The seconds that a step takes however few rows it has, and those of each row; None if steps were not timed.

    The least of several times is the one that other programs disturbed least.
    """
    timed = [row for row in rows if "timed_rows" in row]
    if not timed:
        return None
    few, many = (min(row[key] for row in timed) for key in ("seconds_of_rows", "seconds_of_four_times"))
    count = timed[0]["timed_rows"]
    of_row = max(0.0, many - few) / (3 * count)
    return max(0.0, few - count * of_row), of_row


def _lasting(rows: Sequence[Row], cause: str) -> Advice | None:
    """Advice with the step and the numbers of a stretch with a cause of `_LASTING_CAUSES`; None if there is none."""
    key, least, words, changes = _LASTING_CAUSES[cause]
    streak = _streak(rows, key, least)
    if not streak:
        return None
    return Advice(cause, streak[0]["step"], words.format(**streak[-1], when=_when(streak, rows)), changes)


def _heads(rows: Sequence[Row]) -> Advice | None:
    looked = [row for row in rows if "dead_heads" in row]
    latest = [set(row["dead_heads"]) for row in looked[-_SEVERAL:]]
    dead = set.intersection(*latest) if len(latest) == _SEVERAL else set()
    if not dead:
        return None
    words = (
        f"These heads add nothing to the output of their layers: {', '.join(sorted(dead))}. Fewer heads would do the "
        "same; if they died during training, the rate was too high."
    )
    since = list(takewhile(lambda row: dead <= set(row["dead_heads"]), reversed(looked)))
    return Advice(HEADS, since[-1]["step"], words, {})


def _in_words(layer: str) -> str:
    """A block, or a module outside the blocks, as `layer_of` names it, in words."""
    _, _, number = layer.rpartition("blocks.")
    return f"block {number}" if number.isdecimal() else layer


def _matrix(row: Row) -> str:
    """The parameter along which the sharpest direction lies most, of any layer, if the row has it."""
    place, share = row.get("sharpest_at"), row.get("sharpest_at_share")
    return "" if place is None or share is None else f", and {share:.0%} in {place} alone"


def _streak(
    rows: Sequence[Row], key: str, least: float, count: int = _SEVERAL, holds: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Returns the first `count` or more rows in a row that hold and have a `key` of at least `least`, or none."""
    grouped = groupby(_having(rows, key), lambda row: row[key] >= least and holds(row))
    stretches = (list(found) for is_high, found in grouped if is_high)
    return next((found for found in stretches if len(found) >= count), [])


def _when(streak: Sequence[Row], rows: Sequence[Row]) -> str:
    first, last = streak[0]["step"], streak[-1]["step"]
    if first == last:
        return f"at step {first:,}"
    return f"since step {first:,}" if streak[-1] is rows[-1] else f"from step {first:,} to {last:,}"


def power_of_two(rows: float) -> int:
    """The power of two nearest to a number of rows."""
    return int(2 ** (1 + math.floor(math.log2(max(1.0, rows) / 1.5))))
