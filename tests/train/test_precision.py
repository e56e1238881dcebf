"""Which precisions are worth timing on which device."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sheepop.core.console import Console
from sheepop.core.errors import DeviceError
from sheepop.core.json_lines import read_json_lines
from sheepop.data import Corpus, PackedBatches
from sheepop.generate import GenerationConfig, Generator
from sheepop.model import ModelConfig, build_model
from sheepop.model.head import OutputHead
from sheepop.train import Trainer, TrainingConfig, validate
from sheepop.train.budget import StepTime, fastest, measure_step, needs_measuring, resolve_training
from sheepop.train.objective import NextToken
from sheepop.train.placement import OneDevice
from sheepop.train.precision import apply_precision, candidates, check_precision, choose_matrix_arithmetic, use_float8
from sheepop.train.step import Gradients

from .runs import Killed, assert_same_run


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


@pytest.mark.parametrize(
    ("exact", "rounded", "expected"),
    [
        ([1.0] * 6, [0.5] * 6, 1),
        ([1.0] * 6, [1.0] * 6, 0),
        ([1.0] * 6, [0.96] * 6, 0),
        ([1.0] * 6, [0.94] * 6, 1),
        # Every third of the rounded times has one below 0.95, however slow the others are.
        ([1.0] * 6, [0.9, 0.9, 0.9, 7.0, 7.0, 7.0], 1),
        # One third of them has none.
        ([1.0] * 6, [0.5, 0.5, 7.0, 0.5, 0.5, 7.0], 0),
        ([5.0, 5.0, 5.0, 5.0, 5.0, 1.0], [1.1] * 6, 0),
        ([1.0], [0.5], 1),
    ],
)
def test_the_more_exact_precision_is_used_unless_the_other_is_clearly_faster(
    exact: list[float], rounded: list[float], expected: int
) -> None:
    assert fastest([exact, rounded]) == expected


def test_a_busy_machine_does_not_change_the_choice() -> None:
    """Two programs share the processor: most steps take up to three times as long, and two starts must agree."""

    def measured(seconds: float, seed: int) -> list[float]:
        noise = np.random.default_rng(seed)
        return [float(seconds * (noise.uniform(1.0, 3.0) if noise.random() < 0.7 else 1.0)) for _ in range(40)]

    for start in range(200):
        assert fastest([measured(0.1, 2 * start), measured(0.1, 2 * start + 1)]) == 0
        assert fastest([measured(0.1, 2 * start), measured(0.05, 2 * start + 1)]) == 1


def test_a_third_candidate_is_compared_with_the_one_chosen_so_far() -> None:
    assert fastest([[1.0] * 6, [0.5] * 6, [0.49] * 6]) == 1
    assert fastest([[1.0] * 6, [0.5] * 6, [0.4] * 6]) == 2


def measure(
    monkeypatch: pytest.MonkeyPatch,
    times: dict[tuple[str, bool], list[float]],
    *,
    config: TrainingConfig | None = None,
    shape: str | None = None,
    seconds: float = 1.0,
) -> tuple[StepTime, str, list[float]]:
    """A step that takes these times by precision and compilation, after an untimed first one of 9 seconds and another.

    Returns the result, what was printed, and the seconds that each call got for a candidate.
    """
    shares = []

    def time_steps(*arguments: Any) -> list[list[float]]:
        shares.append(arguments[6])
        return [[9.0, 1.0, *times[precision, arguments[7]]] for precision in arguments[5]]

    monkeypatch.setattr("sheepop.train.budget.candidates", lambda precision, device: ["fp32", "bf16"])
    monkeypatch.setattr("sheepop.train.budget._time_steps", time_steps)
    printed = io.StringIO()
    chosen = measure_step(
        lambda: None,  # type: ignore[arg-type, return-value]
        None,  # type: ignore[arg-type]
        NextToken(),
        config or TrainingConfig(),
        "cpu",
        seconds=seconds,
        console=Console(file=printed),
        shape=shape,
    )
    return chosen, " ".join(printed.getvalue().split()), shares


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({}, "Using bf16 50 ms. To always use it: training.precision=bf16."),
        ({"precision": "fp32"}, "Using bf16 50 ms."),
        (
            {"compile": "auto"},
            "Using bf16 50 ms. To always use it: training.precision=bf16 training.compile=false.",
        ),
    ],
)
def test_the_line_that_names_the_choice_names_the_keys_that_fix_it(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], end: str
) -> None:
    times = {("fp32", False): [0.1] * 6, ("bf16", False): [0.05] * 6, ("bf16", True): [0.05] * 6}
    _, line, _ = measure(monkeypatch, times, config=TrainingConfig(**settings))
    assert line.startswith("Measured one step: fp32 100 ms, bf16 50 ms")
    assert line.endswith(end)
    equal = {("fp32", False): [0.1] * 6, ("bf16", False): [0.1] * 6}
    _, line, _ = measure(monkeypatch, equal)
    assert line.endswith("Using fp32 100 ms. To always use it: training.precision=fp32.")


def test_a_choice_against_the_median_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    # Another program disturbed every third step of bf16, so one group of its times is no faster.
    times = {("fp32", False): [0.1] * 6, ("bf16", False): [0.05, 0.12, 0.05] * 2}
    _, line, _ = measure(monkeypatch, times)
    assert line.startswith("Measured one step: fp32 100 ms, bf16 50 ms. Using fp32 100 ms, as the times vary too much")


@pytest.mark.parametrize(("seconds", "each"), [(12.0, 4.0), (3.0, 2.0)])
def test_what_is_timed_shares_the_time_and_tells_how_long_it_took(
    monkeypatch: pytest.MonkeyPatch, seconds: float, each: float
) -> None:
    clock = iter([100.0, 131.5])
    monkeypatch.setattr("sheepop.train.budget.time", SimpleNamespace(monotonic=lambda: next(clock)))
    times = {("fp32", False): [1.0] * 6, ("bf16", False): [1.0] * 6, ("fp32", True): [1.0] * 6}
    timing, _, shares = measure(monkeypatch, times, config=TrainingConfig(compile="auto"), seconds=seconds)
    assert (shares, timing.measured_in) == ([each] * 2, 31.5)


def test_a_step_that_was_measured_before_is_not_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHEEPOP_MEASUREMENTS", str(tmp_path / "measurements.json"))
    monkeypatch.setattr("sheepop.train.budget.processor_share", lambda device: 1.0)
    monkeypatch.setattr("sheepop.core.processor_time.ProcessorTime.take", lambda self: 1.0)
    slow, fast = {("fp32", False): [0.1] * 6, ("bf16", False): [0.1] * 6}, [0.05] * 6
    first, _, shares = measure(monkeypatch, slow, shape="a")
    assert (first.precision, len(shares)) == ("fp32", 1)
    again, line, shares = measure(monkeypatch, {**slow, ("bf16", False): fast}, shape="a")
    assert (again, again.measured_in, shares) == (first, 0.0, [])
    assert line == (
        "Using fp32 100 ms, which an earlier start measured for one step. To always use it: training.precision=fp32."
    )
    other, _, _ = measure(monkeypatch, {**slow, ("bf16", False): fast}, shape="b")
    unnamed, _, _ = measure(monkeypatch, {**slow, ("bf16", False): fast})
    assert other.precision == unnamed.precision == "bf16"
    monkeypatch.setattr("sheepop.core.measurements.installed_versions", lambda names: {"torch": "another"})
    assert measure(monkeypatch, {**slow, ("bf16", False): fast}, shape="a")[0].precision == "bf16"


def test_the_time_of_a_step_is_remembered_as_on_a_quiet_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measured with half of the processors, and used again with a quarter of them."""
    monkeypatch.setenv("SHEEPOP_MEASUREMENTS", str(tmp_path / "measurements.json"))
    monkeypatch.setattr("sheepop.core.processor_time.ProcessorTime.take", lambda self: 0.5)
    monkeypatch.setattr("sheepop.train.budget.processor_share", lambda device: 0.25)
    times = {("fp32", False): [0.1] * 6, ("bf16", False): [0.1] * 6}
    found = [measure(monkeypatch, times, shape="a")[0].seconds for _ in range(3)]
    assert found == [0.1, 0.2, 0.2]


def test_candidates_are_timed_in_turn(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    class Recorded(OneDevice):
        def begin_step(self) -> None:
            taken.append(self.precision)
            super().begin_step()

    monkeypatch.setattr("sheepop.train.budget.OneDevice", Recorded)
    monkeypatch.setattr("sheepop.train.budget._LEAST_MEASURING_SECONDS", 0.0)
    monkeypatch.setattr("sheepop.train.budget.candidates", lambda precision, device: ["fp32", "bf16"])
    config = ModelConfig(vocab_size=corpus.tokenizer().vocab_size, d_model=16, num_layers=1, num_heads=1)
    measure_step(
        lambda: build_model(config, 0),
        PackedBatches(corpus.train, max_length=16, pad_id=corpus.tokenizer().pad_id),
        NextToken(),
        TrainingConfig(global_batch_size=2),
        "cpu",
        seconds=0.0,
        console=Console.silent(),
    )
    assert taken == ["fp32", "bf16"] * 8


def losses(trainer: Trainer) -> torch.Tensor:
    trainer.run()
    rows = read_json_lines(trainer.checkpointer.run.metrics_file)[0]
    return torch.tensor([row["loss"] for row in rows if row["split"] == "train"], dtype=torch.float64)


def test_the_loss_curves_of_two_byte_precisions_follow_float32_for_fifty_steps(
    make_trainer: Callable[..., Trainer],
) -> None:
    """Within 1 percent at every step and 0.3 percent in the mean, while the loss falls to less than half.

    bfloat16 keeps 8 bits of a number and float16 keeps 11: their products are off by up to 0.4 and 0.05 percent.
    """
    settings = {"dropout": 0.0, "max_steps": 50, "eval_interval": 50, "sample_interval": 50, "checkpoint_interval": 50}
    curves = {name: losses(make_trainer(name, precision=name, **settings)) for name in ("fp32", "bf16", "fp16")}
    exact = curves["fp32"]
    assert len(exact) == 50
    assert exact[-1] < exact[0] / 2
    for name in ("bf16", "fp16"):
        error = (curves[name] - exact).abs() / exact
        assert 0 < error.max() < 0.01, name
        assert error.mean() < 0.003, name


def test_weights_and_optimizer_state_are_float32_in_every_precision(make_trainer: Callable[..., Trainer]) -> None:
    for precision in ("fp32", "bf16", "fp16"):
        trainer = make_trainer(precision, precision=precision, max_steps=1)
        trainer.run()
        states = [
            value
            for optimizer in trainer.runner.optimizers
            for state in optimizer.state.values()
            for value in state.values()
        ]
        tensors = [*trainer.model.parameters(), *(value for value in states if torch.is_tensor(value))]
        assert {tensor.dtype for tensor in tensors} == {torch.float32}


def test_float8_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match="fp8 needs an NVIDIA GPU"):
        check_precision("fp8", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(DeviceError, match="fp8 needs an NVIDIA GPU"):
        check_precision("fp8", "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("sheepop.train.precision.find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r'needs the library torchao.*pip install "sheepop\[fp8\]"'):
        check_precision("fp8", "cuda")


def test_float16_is_refused_where_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    check_precision("fp16", "cpu")

    def no_kernel(*arguments: object, **settings: object) -> None:
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", no_kernel)
    with pytest.raises(DeviceError, match=r"fp16 does not work on cpu .* not implemented for 'Half'"):
        check_precision("fp16", "cpu")


def test_float8_keeps_names_weights_and_head_and_comes_close() -> None:
    """torchao's layers, emulated: scaled to eight bits, three of them fraction, a factor is off by up to 6 percent."""
    pytest.importorskip("torchao", reason="float8 needs torchao")
    config = ModelConfig(vocab_size=64, d_model=64, num_layers=2, num_heads=4, max_seq_len=32, dropout=0.0)
    exact, rounded = build_model(config, 0), build_model(config, 0)
    parameters = dict(rounded.named_parameters())
    use_float8(rounded, emulate=True)
    assert dict(rounded.named_parameters()).keys() == parameters.keys()
    assert all(parameter is parameters[name] for name, parameter in rounded.named_parameters())
    assert type(rounded.lm_head) is OutputHead
    assert all(
        type(module) is not torch.nn.Linear for name, module in rounded.named_modules() if name.endswith("_proj")
    )
    ids = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        error = (rounded(ids) - exact(ids)).float()
    assert 0 < error.std() < 0.05 * exact(ids).std()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_only_float8_changes_the_network(precision: str) -> None:
    model = build_model(ModelConfig(vocab_size=16, d_model=16, num_layers=1, num_heads=1), 0)
    before = [type(module) for module in model.modules()]
    apply_precision(model, precision)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize(("device", "expected"), [("cuda", "high"), ("cpu", "highest"), ("mps", "highest")])
def test_matrix_products_are_rounded_to_tensor_float_32_on_nvidia_only(device: str, expected: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        choose_matrix_arithmetic(device)
        assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("compiled_seconds", "expected"), [(0.4, True), (0.49, False), (0.6, False)])
def test_what_is_fastest_is_timed_compiled_too(
    monkeypatch: pytest.MonkeyPatch, compiled_seconds: float, expected: bool
) -> None:
    times = {("fp32", False): [0.9] * 6, ("bf16", False): [0.5] * 6, ("bf16", True): [compiled_seconds] * 3}
    timing, _, _ = measure(monkeypatch, times, config=TrainingConfig(compile="auto", max_steps=10))
    assert timing == StepTime("bf16", compiled_seconds if expected else 0.5, expected)
    config = TrainingConfig(compile="auto", max_steps=10)
    resolved = resolve_training(config, timing, device="cpu", num_samples=10, seq_len=8, validation_tokens=0)
    assert (resolved.precision, resolved.compile) == ("bf16", expected)


def test_a_choice_of_compilation_is_measured_even_where_nothing_else_is() -> None:
    assert needs_measuring(TrainingConfig(precision="fp32", compile="auto"), "cpu")
    assert not needs_measuring(TrainingConfig(precision="fp32", compile=True), "cpu")


def test_float8_trains_validates_samples_and_goes_on(make_trainer: Callable[..., Trainer], corpus: Corpus) -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao")
    tokenizer = corpus.tokenizer()
    held_out = PackedBatches(corpus.validation, max_length=32, pad_id=tokenizer.pad_id)
    settings = GenerationConfig(max_new_tokens=4, seed=1)

    def trainer_of(name: str, *, resume: bool = False) -> Trainer:
        trainer = make_trainer(
            name, resume=resume, precision="fp8", max_steps=8, change=partial(use_float8, emulate=True)
        )
        trainer.validate = lambda: validate(
            trainer.model, held_out, tokenizer.byte_lengths(), batch_size=8, precision="fp8", device="cpu"
        )

        def sample(step: int) -> list[dict[str, Any]]:
            (done,) = Generator(trainer.model, tokenizer, device="cpu").generate(["the"], settings)
            return [{"prompt": done.prompt, "text": done.text}]

        trainer.sample = sample
        return trainer

    unbroken = trainer_of("unbroken")
    assert any(type(module).__name__ == "Float8Linear" for module in unbroken.runner.placement.modules.modules())
    unbroken.run()
    first = trainer_of("stopped")
    gradients = first.runner.gradients

    def stop_at_six(*arguments: Any, **given: Any) -> Gradients:
        if first.state.step == 6:
            raise Killed
        return gradients(*arguments, **given)

    first.runner.gradients = stop_at_six  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.run()
    second = trainer_of("stopped", resume=True)
    assert second.state.step == 6
    second.run()
    assert_same_run(unbroken, second)
    rows = read_json_lines(second.checkpointer.run.metrics_file)[0]
    scores = [row["loss"] for row in rows if row["split"] == "validation"]
    assert len(scores) == 2
    assert scores[1] < scores[0]
    assert len(read_json_lines(second.checkpointer.run.samples_file)[0]) == 3
