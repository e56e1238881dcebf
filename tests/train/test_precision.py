"""Which precisions are worth timing on which device."""

from __future__ import annotations

import pytest
import torch

from sheepop.core.console import Console
from sheepop.train import TrainingConfig
from sheepop.train.plan import StepTime, measure_step, needs_measuring, resolve_training
from sheepop.train.precision import candidates


@pytest.mark.parametrize(("native", "expected"), [(True, ["bf16"]), (False, ["fp32"])])
def test_emulated_bfloat16_is_not_chosen_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, native: bool, expected: list[str]
) -> None:
    """Where bfloat16 is only emulated, torch calls it supported unless asked to leave emulation out."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    assert candidates("auto", "cuda") == expected


def test_the_precision_asked_for_is_the_only_candidate() -> None:
    assert candidates("bf16", "cpu") == ["bf16"]
    assert candidates("fp32", "mps") == ["fp32"]


@pytest.mark.parametrize(("bf16_rate", "expected"), [(4e11, ["fp32", "bf16"]), (1e9, ["fp32"])])
def test_a_cpu_times_bfloat16_only_where_its_products_are_faster(
    monkeypatch: pytest.MonkeyPatch, bf16_rate: float, expected: list[str]
) -> None:
    rates = {torch.float32: 1e11, torch.bfloat16: bf16_rate}
    monkeypatch.setattr("sheepop.train.precision.matrix_peak", lambda dtype, device: rates[dtype])
    assert candidates("auto", "cpu") == expected


def test_the_precision_with_the_lower_median_step_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"fp32": [3.0, 0.5, 3.0], "bf16": [2.0, 9.0, 2.0]}
    monkeypatch.setattr("sheepop.train.plan.candidates", lambda precision, device: list(times))
    monkeypatch.setattr("sheepop.train.plan._time_steps", lambda *arguments: times[arguments[4]])
    chosen = measure_step(
        lambda: None,  # type: ignore[arg-type, return-value]
        None,  # type: ignore[arg-type]
        TrainingConfig(),
        "cpu",
        seconds=1.0,
        console=Console.silent(),
    )
    assert chosen == StepTime("bf16", 2.0)


@pytest.mark.parametrize(("compiled_seconds", "expected"), [(0.4, True), (0.6, False)])
def test_what_is_fastest_is_timed_compiled_too(
    monkeypatch: pytest.MonkeyPatch, compiled_seconds: float, expected: bool
) -> None:
    times = {("fp32", False): 0.9, ("bf16", False): 0.5, ("bf16", True): compiled_seconds}
    monkeypatch.setattr("sheepop.train.plan.candidates", lambda precision, device: ["fp32", "bf16"])
    monkeypatch.setattr("sheepop.train.plan._time_steps", lambda *arguments: [times[arguments[4], arguments[6]]])
    config = TrainingConfig(compile="auto", max_steps=10)
    timing = measure_step(
        lambda: None,  # type: ignore[arg-type, return-value]
        None,  # type: ignore[arg-type]
        config,
        "cpu",
        seconds=1.0,
        console=Console.silent(),
    )
    assert timing == StepTime("bf16", min(0.5, compiled_seconds), expected)
    resolved = resolve_training(config, timing, device="cpu", num_samples=10, seq_len=8, validation_tokens=0)
    assert (resolved.precision, resolved.compile) == ("bf16", expected)


def test_a_choice_of_compilation_is_measured_even_where_nothing_else_is() -> None:
    assert needs_measuring(TrainingConfig(precision="fp32", compile="auto"), "cpu")
    assert not needs_measuring(TrainingConfig(precision="fp32", compile=True), "cpu")
