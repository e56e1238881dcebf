"""Advice from the rows of an analysis: which cause is named, since when, and that healthy rows name none."""

from __future__ import annotations

from typing import Any

import pytest

from sheepop.interpret.control.advice import (
    BATCH,
    HEADS,
    LAYER,
    RATE,
    SCORES,
    UNITS,
    advice_of,
    noise_scale_of,
    power_of_two,
)


def rows(**columns: list[Any]) -> list[dict[str, Any]]:
    """Rows of steps 10, 20, ..., healthy in all columns that are not given."""
    usual = {
        "learning_rate": 0.1,
        "batch_rows": 16,
        "sharpness": 10.0,
        "sharpness_limit": 100.0,
        "sharpness_share": 0.1,
        "sharpest": "blocks.0",
        "sharpest_share": 0.2,
        "gradient_noise": 20.0,
        "gradient_signal": 2.0,
        "attention_logit": 5.0,
        "attention_logit_at": "blocks.0.attention",
        "dead_heads": [],
        "dead_units": 0.01,
        "dead_units_at": "blocks.0.feed_forward",
    }
    count = max(map(len, columns.values()), default=6)
    found = [{"step": 10 * (place + 1), "split": "analysis", **usual} for place in range(count)]
    for name, values in columns.items():
        for row, value in zip(found, values, strict=True):
            row[name] = value
    return found


def causes(**columns: list[Any]) -> list[str]:
    return [advice.cause for advice in advice_of(rows(**columns))]


def test_healthy_rows_and_other_rows_give_no_advice() -> None:
    assert causes() == []
    assert advice_of([]) == []
    assert advice_of([{"step": 1, "split": "train", "sharpness_share": 9.0}]) == []


def test_a_rate_near_its_limit_is_named_with_its_step_and_evidence() -> None:
    (found,) = advice_of(rows(sharpness_share=[0.2, 0.95, 1.3, 1.2], sharpness=[20, 95, 130, 120]))
    assert (found.cause, found.step) == (RATE, 30)
    assert "at 1.20 of its limit since step 30" in found.words
    assert "sharpness is 120, and steps at this rate bear 100: a rate of 0.083 is the limit" in found.words
    assert "divide training.learning_rate by 2.4" in found.words
    assert found.changes == {"training.learning_rate": pytest.approx(1 / 2.4)}


def test_far_beyond_the_limit_the_first_two_measurements_choose_a_quarter_of_what_steps_bear() -> None:
    """At step 10, in the warm-up, a rate of 0.05 is at 3 times its limit, which is 0.05 / 3; a quarter is 0.1 / 24."""
    columns = {"sharpness_share": [3.0, 40.0, 900.0, 0.2, 5000.0], "learning_rate": [0.05, 0.1, 0.1, 0.1, 0.1]}
    (found,) = advice_of(rows(**columns))
    assert found.step == 10 and "at 3.00 of its limit from step 10 to 30" in found.words
    assert "a rate of 0.017 is the limit" in found.words and "divide training.learning_rate by 24.0" in found.words
    assert found.changes == {"training.learning_rate": pytest.approx(1 / 24)}
    (found,) = advice_of(rows(**{**columns, "sharpness_share": [40.0, 3.0, 900.0, 0.2, 5000.0]}))
    assert found.changes == {"training.learning_rate": pytest.approx(1 / 12)}  # 3 times at 0.1 is the milder one
    (found,) = advice_of(rows(**{**columns, "sharpness_share": [500.0, 40.0, 900.0, 0.2, 5000.0]}))
    assert "divide training.learning_rate by 32.0 and measure again" in found.words
    assert found.changes == {"training.learning_rate": 1 / 32}


def test_a_rate_of_muon_is_named_far_beyond_the_limit_only() -> None:
    """Steps lower the loss of their rows, and certain is a share of 100; half of that is borne: 4 x 104 / 50 = 8.32."""
    columns = {"sharpness_certain": [100.0] * 4, "turning_factor": [2.0] * 4}
    assert causes(sharpness_share=[110.0, 56.0, 34.0, 60.0], **columns) == []
    (found,) = advice_of(rows(sharpness_share=[104.0, 842.0, 850.0, 300.0], **columns))
    assert (found.cause, found.step) == (RATE, 10) and "at 104.00 of its limit since step 10" in found.words
    assert "a rate of 0.048 is at 50 times the limit" in found.words  # 0.1 x 50 / 104
    assert found.changes == {"training.learning_rate": pytest.approx(1 / 8.32)}
    (found,) = advice_of(rows(sharpness_share=[20.0, 45.0, 300.0, 90.0], **columns))  # 45 x 300 x 90 > 100^3
    assert found.step == 20


def paths(place: float, **columns: list[Any]) -> list[dict[str, Any]]:
    """Two measurements in a warm-up, ten at the rate 0.1, and one behind; the loss along paths is lowest at `place`.

    The loss is that of a parabola, (c - place)^2 at c times the length of a path.
    """
    behind, ahead = ((c - place) ** 2 - (1 - place) ** 2 for c in (0.5, 1.5))
    rates = [0.03, 0.06, *[0.1] * 10, 0.04]
    return rows(**{"learning_rate": rates, "loss_behind": [behind] * 13, "loss_ahead": [ahead] * 13, **columns})


def test_a_rate_is_not_named_where_the_loss_is_lowest_near_the_end_of_paths() -> None:
    for place in (0.3, 0.82, 1.0, 3.1):
        assert advice_of(paths(place)) == []


@pytest.mark.parametrize(("place", "factor"), [(3.2, 3.2), (5.0, 5.0), (9.0, 9.0)])
def test_a_rate_too_low_is_named_where_longer_paths_lower_the_loss(place: float, factor: float) -> None:
    """By half a decade or more, and it is multiplied by as much."""
    (found,) = advice_of(paths(place))
    assert found.cause == RATE and "The learning rate is too low from step 50 to 120" in found.words
    assert f"lowest had the steps of a twentieth of the run been {place:.2f} times as long" in found.words
    assert f"Multiply training.learning_rate by {factor:.2g}; sheepop analyze rate" in found.words
    assert found.changes == {"training.learning_rate": pytest.approx(factor)}


def test_a_rate_far_too_low_is_multiplied_by_32_at_once() -> None:
    (found,) = advice_of(paths(40.0))
    assert "the run been far longer. Multiply" in found.words and found.changes == {"training.learning_rate": 32.0}
    (found,) = advice_of(paths(1.0, loss_behind=[0.3] * 13, loss_ahead=[-0.3] * 13))  # a line
    assert found.changes == {"training.learning_rate": 32.0}


def test_a_rate_beyond_its_limit_is_too_high_whatever_its_paths() -> None:
    shares = [0.3] * 5 + [9.0] * 8
    beyond = {"sharpness_share": shares, "sharpness_certain": [10.0] * 13, "turning_factor": [0.5] * 13}
    for place in (0.3, 0.82, 5.0):
        (found,) = advice_of(paths(place, **beyond))
        assert "at 9.00 of its limit" in found.words and found.changes["training.learning_rate"] < 1
    assert advice_of(paths(0.82, **{**beyond, "turning_factor": [3.0] * 13})) == []  # steps that lower the loss


def test_rows_without_a_rate_give_no_advice_on_it() -> None:
    assert not advice_of([{"split": "analysis", "step": step, "sharpness_share": 0.1} for step in range(1, 20)])


def test_few_paths_and_those_of_a_warm_up_tell_nothing() -> None:
    assert advice_of(paths(2.0)[:9]) == []
    assert advice_of(paths(2.0, learning_rate=[0.01 * place for place in range(1, 14)])) == []
    assert advice_of(paths(2.0, loss_ahead=[None] * 6 + [0.1] * 7)) == []


def test_a_rate_that_stays_near_its_limit_is_named_before_it_passes_it() -> None:
    """Two measurements near the limit may be chance, three are not."""
    assert causes(sharpness_share=[0.2, 0.95, 0.92]) == []
    (found,) = advice_of(rows(sharpness_share=[0.2, 0.95, 0.92, 0.93]))
    assert (found.cause, found.step) == (RATE, 20)
    assert "The learning rate is at 0.92 of its limit since step 20" in found.words
    assert "lengthen the warm-up, or halve training.learning_rate." in found.words
    assert found.changes == {"training.learning_rate": 0.5}


def test_the_edge_of_stability_is_no_alarm_while_steps_lower_the_loss() -> None:
    edge = [0.7, 1.02, 1.03, 1.5, 1.05]
    assert causes(sharpness_share=edge, turning_factor=[9.0, 1.4, 1.1, 0.9, 2.2]) == []
    assert causes(sharpness_share=edge, turning_factor=[9.0, 1.5, 0.9, 0.8, 2.2]) == [RATE]
    assert causes(sharpness_share=[0.7, 1.3, 1.4, 1.5, 1.3], turning_factor=[9.0] * 5) == [RATE]


@pytest.mark.parametrize(
    ("certain", "share", "turn", "expected"),
    [(2.0, 1.4, 3.0, []), (2.0, 2.1, 3.0, [RATE]), (None, 4.4, 3.0, []), (None, 4.4, 0.9, [RATE])],
)
def test_how_far_beyond_the_limit_is_certain_depends_on_the_optimizer(
    certain: float | None, share: float, turn: float, expected: list[str]
) -> None:
    """Adam's scaling follows its gradients, and that of Muon follows at once, so that no share alone is certain."""
    columns = {"sharpness_share": [share] * 4, "turning_factor": [turn] * 4, "sharpness_certain": [certain] * 4}
    assert causes(**columns) == expected


def test_a_run_that_swings_across_a_valley_is_unstable_by_its_mean() -> None:
    """Plain descent at 1.3 times its limit: 1.4 x 1.05 x 1.68 is 2.47, above 1.2 cubed, which is 1.73."""
    turns = [2.33, 1.38, 0.9, 0.9]
    (found,) = advice_of(rows(sharpness_share=[1.4, 1.05, 1.68, 0.78], turning_factor=turns))
    assert (found.cause, found.step) == (RATE, 10) and "divide training.learning_rate by 2.1" in found.words
    assert causes(sharpness_share=[1.06, 0.89, 1.13, 0.86], turning_factor=turns) == []  # at its limit
    for certain in (2.0, None):
        shares, columns = [1.4, 1.05, 1.68, 0.78], {"turning_factor": turns, "sharpness_certain": [certain] * 4}
        assert causes(sharpness_share=shares, **columns) == []


def test_a_harmful_stretch_is_found_behind_a_harmless_one() -> None:
    columns = {"sharpness_share": [1.1] * 5, "turning_factor": [9.0, 9.0, 9.0, 0.9, 0.8]}
    (found,) = advice_of(rows(**columns))
    assert (found.cause, found.step) == (RATE, 40)


def test_a_passed_stretch_is_named_with_its_end() -> None:
    (found,) = advice_of(rows(sharpness_share=[1.1, 1.0, 0.3, 0.2]))
    assert "from step 10 to 20" in found.words


@pytest.mark.parametrize("shares", [[0.2, 1.4, 0.2, 1.4], [0.89] * 4, [None, float("nan"), 1.4, None]])
def test_single_peaks_and_gaps_are_no_stretch(shares: list[Any]) -> None:
    assert causes(sharpness_share=shares) == []


def test_one_sharp_layer_is_named_with_its_matrix_and_an_entry_that_slows_it() -> None:
    columns = {"sharpness_share": [1.1, 1.2], "sharpest": ["blocks.1"] * 2, "sharpest_share": [0.9, 0.8]}
    (found,) = advice_of(rows(**columns))
    assert found.cause == LAYER and "90% of the sharpest direction lie in block 1: lower its rate by" in found.words
    matrix = {"sharpest_at": ["blocks.1.feed_forward.up_proj.weight"] * 2, "sharpest_at_share": [0.7, 0.6]}
    (found,) = advice_of(rows(**columns, **matrix))
    assert "lie in block 1, and 70% in blocks.1.feed_forward.up_proj.weight alone" in found.words
    assert "training.layers=[{pattern: blocks.1.*, learning_rate: 0.45}]" in found.words
    (outside,) = advice_of(rows(**{**columns, "sharpest": ["embedding"] * 2}))
    assert "lie in embedding: lower its rate" in outside.words


def test_a_matrix_unlike_those_of_the_other_blocks_is_named() -> None:
    place = {"size_beside_others_at": ["blocks.1.up.weight"] * 3, "update_beside_others_at": ["blocks.0.up.weight"] * 3}
    assert causes(**place, size_beside_others=[2.4] * 3, update_beside_others=[40.0] * 3) == []
    (found,) = advice_of(rows(**place, size_beside_others=[4.0, 2.0, 1.5], update_beside_others=[1.0] * 3))
    assert (found.cause, found.step) == (LAYER, 10)
    assert "blocks.1.up.weight is 4.0 times as long as the same matrix of the other blocks at step 10" in found.words
    (found,) = advice_of(rows(**place, size_beside_others=[1.0] * 3, update_beside_others=[2.0, 80.0, 60.0]))
    assert found.step == 20 and "A step moves blocks.0.up.weight 80.0 times as far as" in found.words
    assert causes(**place, update_beside_others=[2.0, 80.0, 2.0]) == []
    other = {**place, "update_beside_others_at": ["blocks.0.up.weight", "blocks.1.up.weight", "blocks.0.up.weight"]}
    assert causes(**other, update_beside_others=[80.0] * 3) == []


NOISE = [640.0, 650.0, 630.0, 640.0, 645.0, 635.0, 640.0, 640.0]


def timed(fixed: float, of_row: float, **columns: list[Any]) -> list[dict[str, Any]]:
    """Eight measurements of 16 rows at a noise scale of 64, surely 63.7; a step takes `fixed` + `of_row` x its rows."""
    few, many = [fixed + 2 * of_row] * 8, [fixed + 8 * of_row] * 8
    times = {"timed_rows": [2] * 8, "seconds_of_rows": few, "seconds_of_four_times": many}
    return rows(**{"gradient_noise": NOISE, "gradient_signal": [10.0] * 8, **times, **columns})


def test_a_batch_below_its_noise_scale_is_no_fault_where_a_step_takes_as_long_as_it_has_rows() -> None:
    """As long as 4 rows beside its own: sqrt(64 x 4) = 16 rows are best, and 16 are those of the run."""
    assert advice_of(timed(0.004, 0.001)) == []
    assert advice_of(timed(0.0, 0.001)) == []
    assert causes(gradient_noise=NOISE, gradient_signal=[10.0] * 8) == []  # several micro-batches are not timed


def test_a_batch_is_too_small_where_every_step_takes_as_long_as_many_rows() -> None:
    """As long as 64: sqrt(64 x 64) = 64 are best. 16 take (1 + 4)(64 + 16) = 400, 64 take (1 + 1)(64 + 64) = 256."""
    (found,) = advice_of(timed(0.064, 0.001))
    assert found.cause == BATCH and found.changes == {"training.global_batch_size": 64}
    assert "64 rows take 1.6 times as long, and the gradient's noise scale is 64 rows (" in found.words
    assert "the same loss comes in 64% of the time or less" in found.words
    # As long as 16 rows: 32 are best, which take (1 + 2)(16 + 32) = 144 instead of (1 + 4)(16 + 16) = 160.
    assert advice_of(timed(0.016, 0.001)) == []
    # No row takes time: half as many steps are half of the time, and no more than four times the rows are advised.
    assert advice_of(timed(0.064, 0.0))[0].changes == {"training.global_batch_size": 64}
    slow = [0.9, 0.066, *[0.9] * 6]  # other programs have kept the machine busy
    assert advice_of(timed(0.064, 0.001, seconds_of_rows=slow))[0].words == found.words


def test_an_uncertain_noise_scale_gives_no_advice_on_the_batch() -> None:
    assert advice_of(timed(0.064, 0.001, learning_rate=[0.1] * 3 + [0.04] * 5)) == []  # too few measurements are left
    assert advice_of(timed(0.064, 0.001, gradient_noise=[value / 4 for value in NOISE])) == []  # 16 rows
    scattered = [0.0, 0.0, 60.0, -25.0, 70.0, -35.0, 0.0, -10.0]  # the mean is 10 again, but may be far larger
    assert advice_of(timed(0.064, 0.001, gradient_signal=scattered)) == []
    assert noise_scale_of(rows(gradient_noise=NOISE[:3], gradient_signal=[10.0] * 3)) is None


def test_large_scores_dead_heads_and_dead_units_are_named() -> None:
    assert causes(attention_logit=[50.0, 120.0, 130.0]) == [SCORES]
    assert causes(dead_heads=[[], ["blocks.0.attention head 1"], ["blocks.0.attention head 1"]]) == [HEADS]
    assert causes(dead_heads=[["a"], ["b"], []]) == []
    assert causes(dead_units=[0.6, 0.7]) == [UNITS]


def test_the_nearest_power_of_two() -> None:
    assert [power_of_two(rows) for rows in (0.4, 1, 3, 5.9, 6.1, 1000)] == [1, 1, 4, 4, 8, 1024]
