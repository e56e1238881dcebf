"""What is derived before a run, from numbers that are easy to check by hand."""

import pytest

from sheepop.core.errors import ConfigError
from sheepop.train import TrainingConfig
from sheepop.train.plan import StepTime, resolve_training


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


def test_minutes_become_steps_that_fit_with_their_validations() -> None:
    timing = StepTime("fp32", 0.1)
    resolved = resolve(timing, max_minutes=10.0, global_batch_size=10, eval_interval=100)
    steps = resolved.max_steps
    assert steps is not None
    per_validation = 5000 / 1000 * 0.1 / 3
    used = steps * 0.1 + steps / 100 * per_validation
    assert 0.93 * 600 < used < 0.98 * 600


def test_validations_take_at_most_a_fifth_of_a_short_budget() -> None:
    # 12 seconds leave 0.96 * 12 - 3 = 8.52; a validation of 5 batches takes 5 * 0.6 / 3 = 1 second, so one is afforded.
    resolved = resolve(StepTime("fp32", 0.6), max_minutes=0.2, global_batch_size=10)
    assert resolved.max_steps == int((8.52 - 1) / 0.6) == 12
    assert resolved.eval_interval == 12
    # 60 seconds leave 54.6, a fifth of which holds ten.
    resolved = resolve(StepTime("fp32", 0.6), max_minutes=1.0, global_batch_size=10)
    assert resolved.max_steps == int((54.6 - 10) / 0.6) == 74
    assert resolved.eval_interval == 7


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
