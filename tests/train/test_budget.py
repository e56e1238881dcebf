"""What is derived before a run, from numbers that are easy to check by hand."""

from typing import Any

import pytest

from sheepop.core.console import Console
from sheepop.core.errors import ConfigError
from sheepop.train import TrainingConfig
from sheepop.train.budget import StepTime, measure_step, measuring_seconds, resolve_compile, resolve_training
from sheepop.train.objective import NextToken


def resolve(timing: StepTime | None = None, **settings: object) -> TrainingConfig:
    config = TrainingConfig(precision="fp32", **settings)  # type: ignore[arg-type]
    return resolve_training(config, timing, device="cpu", num_samples=1000, seq_len=100, validation_tokens=5000)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_steps": 70}, 70),
        ({"max_epochs": 2.0, "global_batch_size": 10}, 200),
        ({"max_epochs": 0.5, "global_batch_size": 30}, 17),
        ({"max_tokens": 10_000, "global_batch_size": 10}, 10),
        ({"global_batch_size": 10}, 100),
        ({"max_steps": 70, "max_epochs": 1.0, "max_tokens": 20_000, "global_batch_size": 10}, 20),
    ],
)
def test_the_budget_that_is_reached_first_counts(settings: dict[str, object], steps: int) -> None:
    assert resolve(**settings).max_steps == steps


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        # 5 steps of 2 rows and 5 of 4 are 30 rows of the 1000; 97 steps of 10 are the others.
        ({}, 107),
        ({"max_epochs": 2.0}, 207),
        ({"max_tokens": 3_001}, 11),
        ({"max_tokens": 900}, 5),
    ],
)
def test_budgets_count_smaller_batches_as_what_they_are(settings: dict[str, object], steps: int) -> None:
    sizes = ((5, 2), (10, 4))
    assert resolve(global_batch_size=10, batch_size_warmup=sizes, **settings).max_steps == steps


def test_minutes_count_a_smaller_batch_as_its_share_of_a_step() -> None:
    # 60 seconds leave 54, and ten validations of a second take 10 of them.
    timing, sizes = StepTime("fp32", 0.6, measured_in=3.0), ((40, 5),)
    whole = resolve(timing, max_minutes=1.0, global_batch_size=10).max_steps
    assert whole == int((54 - 10) / 0.6)
    # The first 40 steps take half as long, which makes room for 20 more.
    assert resolve(timing, max_minutes=1.0, global_batch_size=10, batch_size_warmup=sizes).max_steps == whole + 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size_warmup": ((5, 4), (5, 8))}, "steps and sizes must increase"),
        ({"batch_size_warmup": ((5, 8), (9, 4))}, "steps and sizes must increase"),
        ({"batch_size_warmup": ((5, 64),)}, "exceeds global_batch_size = 32"),
        ({"sequence_length_warmup": ((5, 8), (4, 16))}, "steps and sizes must increase"),
        ({"difficulty": "length"}, "difficulty has no effect without curriculum = easy_to_hard"),
        ({"curriculum_epochs": 2}, "curriculum_epochs has no effect"),
        ({"curriculum_jitter": 0.5}, "curriculum_jitter has no effect"),
        ({"mixture": [{"pattern": "*", "weights": [[0, 1], [9, 0]]}]}, "all weights are 0 at step 9"),
        ({"mixture": [{"pattern": "*", "weights": [[9, 1], [9, 2]]}]}, "steps of weights must increase"),
        ({"mixture": [{"pattern": "*", "weights": []}]}, "at least 1 item"),
        ({"mixture": [{"pattern": "*", "weights": [[0, -1]]}]}, "greater than or equal to 0"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**settings)  # type: ignore[arg-type]


def test_a_length_that_does_not_divide_the_rows_is_refused() -> None:
    config = TrainingConfig(sequence_length_warmup=((5, 24),))
    with pytest.raises(ConfigError, match=r"has the length 24, which does not divide the rows of 64 tokens"):
        config.row_lengths(64)
    assert config.row_lengths(48).at(4) == 24


def test_minutes_become_steps_that_fit_with_their_validations() -> None:
    timing = StepTime("fp32", 0.1, measured_in=24.0)
    resolved = resolve(timing, max_minutes=10.0, global_batch_size=10, eval_interval=100)
    steps = resolved.max_steps
    assert steps is not None
    per_validation = 5000 / 1000 * 0.1 / 3
    used = steps * 0.1 + steps / 100 * per_validation
    assert 0.93 * 600 < used < 0.98 * 600


@pytest.mark.parametrize(
    ("device", "triton", "asked", "expected"),
    [
        ("cuda", True, None, "auto"),
        ("cuda", False, None, False),
        ("cpu", True, None, False),
        ("mps", True, None, False),
        ("cuda", True, False, False),
        ("cpu", False, "auto", "auto"),
    ],
)
def test_compiling_is_measured_where_triton_serves_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, triton: bool, asked: Any, expected: Any
) -> None:
    monkeypatch.setattr("sheepop.model.fused.has_triton", lambda: triton)
    assert resolve_compile(TrainingConfig(compile=asked), device).compile == expected


def test_the_time_of_compiling_is_known_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step of 21 seconds, 20 of them for compiling, and then steps of one second, half of the eager ones."""
    monkeypatch.setattr(
        "sheepop.train.budget._time_steps", lambda *rest: [[21.0, 9.0, 1.0] if rest[-2] else [2.5, 9.0, 2.0]]
    )
    monkeypatch.setattr("sheepop.train.budget.time.monotonic", iter([100.0, 103.0]).__next__)
    timing = measure_step(
        lambda: None,  # type: ignore[arg-type, return-value]
        None,  # type: ignore[arg-type]
        NextToken(),
        TrainingConfig(precision="fp32", compile="auto"),
        "cpu",
        seconds=4.0,
        console=Console.silent(),
    )
    assert (timing.seconds, timing.compiled, timing.compiled_in, timing.measured_in) == (1.0, True, 20.0, 3.0)
    # Of 120 seconds three were measured, twenty will be compiled, three are for the rest, and some for a validation.
    resolved = resolve(timing, max_minutes=2.0, global_batch_size=10, eval_interval=10**6)
    assert resolved.max_steps == 93
    assert resolved.compile is True


def test_validations_take_at_most_a_fifth_of_a_short_budget() -> None:
    # 12 seconds leave 12 - 0.5 - 3 = 8.5; a validation of 5 batches takes 5 * 0.6 / 3 = 1 second, so one is afforded.
    resolved = resolve(StepTime("fp32", 0.6, measured_in=0.5), max_minutes=0.2, global_batch_size=10)
    assert resolved.max_steps == int((8.5 - 1) / 0.6) == 12
    assert resolved.eval_interval == 12
    # 60 seconds leave 54, a fifth of which holds ten.
    resolved = resolve(StepTime("fp32", 0.6, measured_in=3.0), max_minutes=1.0, global_batch_size=10)
    assert resolved.max_steps == int((54 - 10) / 0.6) == 73
    assert resolved.eval_interval == 7


def test_a_long_budget_is_not_spent_on_measuring() -> None:
    config = TrainingConfig(max_minutes=600.0, eval_interval=10**9, global_batch_size=10)
    assert measuring_seconds(config) == 30.0
    assert measuring_seconds(TrainingConfig(max_minutes=5.0)) == 3.0
    assert measuring_seconds(TrainingConfig(max_minutes=0.2)) == measuring_seconds(TrainingConfig()) == 2.0
    timing = StepTime("fp32", 1.0, measured_in=40.0)
    resolved = resolve(timing, max_minutes=600.0, global_batch_size=10, eval_interval=10**9)
    assert resolved.max_steps == 36_000 - 40 - 3 - 1  # a 10^9th of a validation is no whole step, but takes its time


def test_measuring_takes_at_most_half_of_a_short_budget_from_the_steps() -> None:
    timing = StepTime("fp32", 0.01, measured_in=50.0)
    resolved = resolve(timing, max_minutes=1.0, global_batch_size=10, eval_interval=10**9)
    assert resolved.max_steps == 3_000 - 1


def test_minutes_need_a_measurement() -> None:
    with pytest.raises(ValueError, match="measured step time"):
        resolve(max_minutes=1.0)


def test_a_budget_too_small_for_a_step_still_takes_one() -> None:
    assert resolve(StepTime("fp32", 500.0), max_minutes=0.1).max_steps == 1


def test_intervals_and_warm_up_are_derived_and_explicit_ones_kept() -> None:
    resolved = resolve(max_steps=200, eval_interval=7)
    assert (resolved.warmup_steps, resolved.eval_interval) == (10, 7)
    assert (resolved.sample_interval, resolved.checkpoint_interval, resolved.micro_batch_size) == (40, 20, 32)
    assert resolve(max_steps=200, warmup_steps=0).warmup_steps == 0


def test_only_steps_are_left_as_the_budget_so_that_the_run_repeats_anywhere() -> None:
    resolved = resolve(StepTime("fp32", 0.1), max_minutes=1.0, max_epochs=3.0, max_tokens=10**9)
    assert (resolved.max_minutes, resolved.max_epochs, resolved.max_tokens) == (None, None, None)
    assert resolve_training(resolved, None, device="cpu", num_samples=5, seq_len=1, validation_tokens=1) == resolved


def test_customary_settings_are_written_down() -> None:
    settings = resolve(max_steps=10)
    assert (settings.betas, settings.eps, settings.momentum) == ((0.9, 0.95), 1e-8, None)
    settings = resolve(max_steps=10, optimizer="sgd")
    assert (settings.betas, settings.eps, settings.momentum) == (None, None, 0.9)
    assert resolve(max_steps=10, optimizer="sgd", momentum=0.0).momentum == 0.0


@pytest.mark.parametrize(("steps", "decay"), [(1, 1), (2, 1), (10, 2), (12, 3), (1000, 200)])
def test_a_decay_at_the_end_takes_a_fifth_of_the_steps(steps: int, decay: int) -> None:
    resolved = resolve(max_steps=steps, schedule="wsd", warmup_steps=0)
    assert resolved.decay_steps == resolved.resolved().decay_steps == decay


def test_decay_and_warm_up_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_steps = 60 and decay_steps = 50 do not fit into 100 steps"):
        resolve(max_epochs=1, global_batch_size=10, schedule="wsd", warmup_steps=60, decay_steps=50)


def test_a_warm_up_is_derived_as_the_schedule_needs_it() -> None:
    assert resolve(max_steps=3, schedule="inverse_sqrt").warmup_steps == 1
    assert resolve(max_steps=100, schedule="piecewise", schedule_points=[[0, 1.0]]).warmup_steps == 0
    assert resolve(max_steps=100).resolved().decay_steps == 0


@pytest.mark.parametrize(("steps", "given", "warmup", "decay"), [(1, None, 0, 1), (2, None, 1, 1), (100, 97, 3, 97)])
def test_a_derived_warm_up_leaves_room_for_the_decay(steps: int, given: int | None, warmup: int, decay: int) -> None:
    resolved = resolve(max_steps=steps, schedule="wsd", decay_steps=given)
    assert (resolved.warmup_steps, resolved.decay_steps) == (warmup, decay)
