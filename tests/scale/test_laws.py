"""Laws with known answers: planted exponents, the published law of Chinchilla, and optima by hand."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from sheepop.core.errors import DataError
from sheepop.scale.allocation import Cost, Use, best_size, curves
from sheepop.scale.family import plan_family
from sheepop.scale.fit import KnownBest, Observation, fit_law, needs_prior
from sheepop.scale.law import REPETITIONS, Law, effective_tokens, known_laws

SMALL = Law(1.2, 80.0, 300.0, 0.34, 0.30)


def observed(law: Law, sizes: Sequence[float], tokens: Sequence[float], noise: float = 0.0, seed: int = 0):
    """Runs of all sizes with all numbers of tokens, with errors of this relative size."""
    draw = np.random.default_rng(seed)
    return [
        Observation(f"{n:g}-{d:g}", n, d, law.loss(n, d) * math.exp(noise * draw.standard_normal()))
        for n in sizes
        for d in tokens
    ]


def test_planted_exponents_lie_in_their_intervals():
    """19 times of 20 for each exponent, over 20 families of 16 runs with errors of half a percent."""
    inside = np.zeros(2)
    for seed in range(20):
        runs = observed(SMALL, np.geomspace(1e5, 1e7, 4), np.geomspace(1e6, 3e8, 4), 0.005, seed)
        found = fit_law(runs, resamples=40, seed=seed)
        assert not found.with_prior
        inside += [low <= own <= high for own, (low, high) in (
            (SMALL.alpha, found.intervals["alpha"]), (SMALL.beta, found.intervals["beta"])
        )]  # fmt: skip
    assert (inside >= 19).all(), inside


def drawn_law(draw: np.random.Generator, parameters: float, tokens: float) -> Law:
    """A law with exponents as the prior has them, whose terms have 0.3 to 1 nat each for this run."""
    prior = known_laws()["besiroglu"].law
    alpha, beta = np.array([prior.alpha, prior.beta]) * np.exp(0.25 * draw.standard_normal(2))
    terms = draw.uniform(0.3, 1.0, 2)
    return Law(draw.uniform(0.8, 2.0), terms[0] * parameters**alpha, terms[1] * tokens**beta, alpha, beta)


# The families that `sheepop scale` plans, for an hour and for a minute: the budget, what the runs cost together, the
# vocabulary, the tokens of a step, and the best size; the last run has the whole budget.
FAMILIES = [(1e14, 2.5e13, 2048, 2048, 2.16e6), (4e11, 1.7e11, 512, 256, 1.4e5)]


def grown(best: float, budget: float, flops: float) -> float:
    """The best size for `flops` operations, if it is `best` for the budget and grows as their square root."""
    return best * math.sqrt(flops / budget)


def test_a_new_run_lies_in_the_interval_of_its_prediction():
    """18 times of 20 at least, although the run has over ten times the operations of the dearest run of its family.

    So does the loss of another run with as many operations and twice as many weights, over that of the first. All runs
    have errors of one percent, the new ones, too.
    """
    inside, ratios_inside = 0, 0
    for seed in range(20):
        budget, spend, vocab_size, step_tokens, best = FAMILIES[seed % 2]
        members = plan_family(spend, vocab_size, partial(grown, best, budget), step_tokens)
        sizes = [(each.shape.parameters(vocab_size), each.steps * step_tokens) for each in members]
        last, draw = (best, budget / 6 / best), np.random.default_rng(seed)
        assert budget > 10 * max(6 * parameters * tokens for parameters, tokens in sizes)
        law = drawn_law(draw, *last)
        losses = [law.loss(*each) * math.exp(0.01 * draw.standard_normal()) for each in (*sizes, last)]
        runs = [Observation("", *size, loss) for size, loss in zip(sizes, losses, strict=False)]
        found = fit_law(runs, resamples=30, seed=seed)
        _, low, high = found.predict(*last)
        inside += low <= losses[-1] <= high
        other = 2 * last[0], last[1] / 2
        _, low, high = found.compare(last, other)
        ratios_inside += low <= law.loss(*other) * math.exp(0.01 * draw.standard_normal()) / losses[-1] <= high
    assert inside >= 18 and ratios_inside >= 18


def test_equal_runs_are_predicted_with_the_noise_that_they_have():
    """By hand: 36 runs whose logarithms are alternately 0.4 percent above and below the law leave that."""
    runs = [
        Observation("", n, d, SMALL.loss(n, d) * math.exp(0.004 * (-1) ** (row + column)))
        for row, n in enumerate(np.geomspace(1e5, 1e8, 6))
        for column, d in enumerate(np.geomspace(1e6, 1e9, 6))
    ]
    found = fit_law(runs, resamples=1)
    assert found.noise == pytest.approx(0.004 * math.sqrt(36 / 31), rel=0.02)
    middle, low, high = found.predict(1e6, 1e8)
    assert math.log(high / middle) >= 1.959 * found.noise and math.log(middle / low) >= 1.959 * found.noise
    # Two runs of one size differ by their noise alone, whose variances add up.
    assert found.compare((1e6, 1e8), (1e6, 1e8)) == pytest.approx(
        [math.exp(side * 1.96 * math.sqrt(2) * found.noise) for side in (0, -1, 1)]
    )


def test_a_law_that_fails_on_the_dearest_runs_drifts():
    """The dearest runs have losses that are 6 percent too high: the law of the cheaper ones misses them by as much."""
    cheap = observed(SMALL, np.geomspace(1e5, 1e7, 4), np.geomspace(1e6, 1e8, 4))
    flops = max(run.flops for run in cheap)
    dear = [Observation("", n, 3 * flops / 6 / n, 1.06 * SMALL.loss(n, 3 * flops / 6 / n)) for n in (3e6, 1e7)]
    missed = math.log(1.06) / math.log(3)
    assert fit_law([*cheap, *dear], prior=False, resamples=1).drift == pytest.approx(missed, rel=0.05)
    held = [Observation("", run.parameters, run.tokens, run.loss / 1.06) for run in dear]
    assert fit_law([*cheap, *held], prior=False, resamples=1).drift == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("name", ["hoffmann", "besiroglu"])
def test_runs_that_follow_a_published_law_give_its_published_numbers(name: str):
    law = known_laws()[name].law
    runs = observed(law, np.geomspace(4.4e7, 1.6e10, 6), np.geomspace(1e9, 3e11, 6))
    found = fit_law(runs, resamples=1).law
    assert found.to_dict() == pytest.approx(law.to_dict(), rel=1e-4)


def test_the_runs_of_chinchilla_give_the_law_that_was_published_for_them():
    """``chinchilla.csv`` has the runs that Besiroglu et al. 2024 read from figure 4 of Hoffmann et al. 2022.

    As there, the five highest losses are left out. Their table 1 has standard errors of A 124.58, B 1293.23, E 0.03,
    alpha 0.02 and beta 0.02.
    """
    with (Path(__file__).parent / "chinchilla.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    assert len(rows) == 245
    runs = [
        Observation("", row["parameters"], row["flops"] / 6 / row["parameters"], row["loss"])
        for row in sorted(rows, key=lambda row: row["loss"])[:-5]
    ]
    found, published = fit_law(runs, resamples=1).law, known_laws()["besiroglu"].law
    errors = {"E": 0.03, "A": 124.58, "B": 1293.23, "alpha": 0.02, "beta": 0.02}
    off = {name: abs(getattr(found, name) - getattr(published, name)) / error for name, error in errors.items()}
    assert all(value < 0.5 for value in off.values()), off


# Hoffmann et al. 2022, table A3, approach 3: weights and operations of the best run, and its tokens.
CHINCHILLA = [(400e6, 2.21e19, 9.2e9), (1e9, 1.62e20, 27.1e9), (10e9, 2.46e22, 410.1e9), (67e9, 1.71e24, 4.1e12)]


@pytest.mark.parametrize(("parameters", "flops", "tokens"), CHINCHILLA)
def test_the_table_of_chinchilla_follows_from_its_law(parameters: float, flops: float, tokens: float):
    """The paper rounded the five numbers, and the table is made with unrounded ones: E 1.6934, A 406.4, B 410.7,
    alpha 0.3392, beta 0.2849."""
    law = Law(1.6934, 406.4, 410.7, 0.3392, 0.2849)
    best, seen = law.optimum(flops)
    assert best == pytest.approx(parameters, rel=0.05)
    assert seen == pytest.approx(tokens, rel=0.05)


def test_the_refit_agrees_with_twenty_tokens_for_each_weight():
    """Besiroglu et al. 2024, section 4: about 20 tokens a weight at Chinchilla's budget, where the first law has 70."""
    found = {name: known_laws()[name].law.optimum(5.76e23) for name in ("hoffmann", "besiroglu")}
    ratios = {name: tokens / parameters for name, (parameters, tokens) in found.items()}
    assert 15 < ratios["besiroglu"] < 25
    assert 50 < ratios["hoffmann"] < 110


@pytest.mark.parametrize("flops", [1e13, 1e18, 1e24])
def test_the_closed_form_is_the_numeric_minimum(flops: float):
    law = known_laws()["besiroglu"].law
    found = minimize_scalar(lambda x: law.loss(math.exp(x), flops / 6 / math.exp(x)), bounds=(5, 40), method="bounded")
    assert law.optimum(flops)[0] == pytest.approx(math.exp(found.x), rel=1e-3)
    assert best_size(law, flops) == pytest.approx(law.optimum(flops), rel=1e-4)
    parameters, tokens = law.optimum(flops)
    assert 6 * parameters * tokens == pytest.approx(flops)


def test_a_text_is_not_read_more_often_than_allowed():
    flops, unique = 1e18, 1e8
    parameters, tokens = SMALL.optimum(flops)
    often = tokens / unique
    assert often > 4
    # Without a price for repetition, the best size is the smallest one that is allowed.
    never = Use(unique, repetitions=math.inf, most_passes=4.0)
    assert best_size(SMALL, flops, use=never) == pytest.approx((flops / (6 * 4 * unique), 4 * unique), rel=1e-4)
    enough = Use(unique, repetitions=math.inf, most_passes=2 * often)
    assert best_size(SMALL, flops, use=enough) == pytest.approx((parameters, tokens), rel=1e-4)


def test_time_that_grows_like_operations_gives_the_same_size_and_a_fixed_part_a_larger_one():
    seconds = best_size(SMALL, 100.0, Cost(each=6 / 1e12))
    assert seconds == pytest.approx(SMALL.optimum(1e14), rel=1e-4)
    assert best_size(SMALL, 100.0, Cost(each=6 / 1e12, fixed=1e-6))[0] > seconds[0]


def test_the_cost_of_a_token_is_read_from_measured_sizes():
    sizes = [1e5, 4e5, 2e6]
    found = Cost.measured(sizes, [2e-6 + 3e-12 * size for size in sizes])
    assert (found.each, found.fixed) == pytest.approx((3e-12, 2e-6), rel=1e-6)


def test_use_after_training_makes_the_best_model_smaller():
    """By hand: the budget pays 6 N D + 2 N D', so D = C / (6 N) - D' / 3."""
    plain, used = best_size(SMALL, 1e15), best_size(SMALL, 1e15, use=Use(inference=1e9))
    assert used[0] < plain[0]
    assert 6 * used[0] * used[1] + 2 * used[0] * 1e9 == pytest.approx(1e15)


def test_repeated_tokens_are_worth_what_muennighoff_says():
    assert effective_tokens(50.0, 100.0) == 50.0
    assert effective_tokens(400.0, None) == 400.0
    # R = 3 repetitions beside the first pass: 100 + 100 * 15.387756 * (1 - exp(-3 / 15.387756))
    assert effective_tokens(400.0, 100.0) == pytest.approx(100 + 1538.7756 * (1 - math.exp(-0.194960)), rel=1e-5)
    assert effective_tokens(400.0, 100.0, repetitions=0.0) == 100.0
    assert effective_tokens(400.0, 100.0, repetitions=1e-9) == pytest.approx(100.0, rel=1e-6)
    assert effective_tokens(400.0, 100.0, repetitions=math.inf) == 400.0
    assert effective_tokens(400.0, 100.0, repetitions=1e9) == pytest.approx(400.0, rel=1e-6)
    assert effective_tokens(1e12, 100.0) == pytest.approx(100 * (1 + REPETITIONS))


def test_little_text_makes_the_best_model_larger_and_its_passes_fewer():
    plain, repeated = best_size(SMALL, 1e16), best_size(SMALL, 1e16, use=Use(unique=1e7))
    assert repeated[0] > plain[0]
    assert repeated[1] < plain[1]


def test_curves_of_equal_operations_have_the_optimum_of_their_law():
    law, runs = known_laws()["besiroglu"].law, []
    for flops in (1e18, 1e20):
        best = law.optimum(flops)[0]
        runs += [Observation("", n, flops / 6 / n, law.loss(n, flops / 6 / n)) for n in (best / 1.5, best, best * 1.5)]
    found = curves(runs)
    assert [curve.flops for curve in found] == pytest.approx([1e18, 1e20])
    assert [curve.best for curve in found] == pytest.approx([law.optimum(flops)[0] for flops in (1e18, 1e20)], rel=0.02)
    one_sided = [Observation("", n, 1e18 / 6 / n, law.loss(n, 1e18 / 6 / n)) for n in (1e6, 2e6, 4e6)]
    assert curves(one_sided)[0].best is None
    assert curves(runs[:2]) == []


def test_a_small_family_is_drawn_to_the_prior_and_says_so():
    prior = known_laws()["besiroglu"].law
    runs = observed(SMALL, [1e5, 2e5, 3e5], [1e6, 2e6], 0.01)
    assert needs_prior(runs)
    alone, drawn = (fit_law(runs, prior=each, resamples=1).law for each in (False, True))
    away = [abs(math.log(law.alpha / prior.alpha)) + abs(math.log(law.beta / prior.beta)) for law in (alone, drawn)]
    assert away[1] < away[0]
    assert fit_law(runs, resamples=1).to_dict()["prior"] == "besiroglu"


def test_a_small_family_is_drawn_to_the_best_size_that_is_known():
    runs = observed(SMALL, [1e5, 2e5, 3e5], [1e6, 2e6], 0.01)
    for known in (KnownBest(1e14, 1e6), KnownBest(1e14, 1e7)):
        sizes = [fit_law(runs, known=best, resamples=1).law.optimum(1e14)[0] for best in (None, known)]
        away = [abs(math.log(size / known.parameters)) for size in sizes]
        assert away[1] < away[0]
    many = observed(SMALL, np.geomspace(1e5, 1e7, 4), np.geomspace(1e6, 3e8, 4))
    assert fit_law(many, known=known, resamples=1).law == fit_law(many, resamples=1).law


def test_too_few_runs_are_refused():
    with pytest.raises(DataError, match="needs 6 different runs; 6 were given"):
        fit_law(observed(SMALL, [1e5, 2e5], [1e6, 3e6]) + observed(SMALL, [1e5], [1e6, 3e6]))


def test_a_damaged_law_is_refused():
    with pytest.raises(DataError, match=r"laws.json, x: beta = None of a law must be a number above 0"):
        Law.of({"E": 1, "A": 1, "B": 1, "alpha": 0.3}, "laws.json, x")
