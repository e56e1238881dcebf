"""The peaks that makers name, against their data sheets."""

import time
from pathlib import Path

import pytest
import torch

from sheepop.core import speed
from sheepop.core.speed import ProcessorTime, nominal_peak, share_of_peak


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H100 NVL", torch.float16, 835.5),
        ("NVIDIA H200", torch.float8_e4m3fn, 1978.9),
        ("NVIDIA A100-SXM4-40GB", torch.bfloat16, 312),
        ("NVIDIA A100-SXM4-40GB", torch.float32, 156),
        ("NVIDIA A100-SXM4-40GB", torch.float8_e4m3fn, None),
        ("NVIDIA A10G", torch.bfloat16, 70),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA L40", torch.bfloat16, 181),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
        ("NVIDIA H200", torch.float64, None),
        ("Tesla K80", torch.float32, None),
    ],
)
def test_a_gpu_is_known_by_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, teraflops: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    found = nominal_peak(dtype, "cuda")
    assert found == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_a_processor_has_no_nominal_peak() -> None:
    assert nominal_peak(torch.float32, "cpu") is None


def test_no_share_of_a_measured_peak_is_above_one() -> None:
    assert [share_of_peak(rate, 4.0) for rate in (0.0, 1.0, 4.0, 43.0)] == [0.0, 0.25, 1.0, 1.0]


def test_the_processor_share_is_own_time_against_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    own, clock = iter([0.0, 1.0, 5.0, 6.0, 6.0, 9.0]), iter([10.0, 12.0, 20.0, 26.0, 30.0, 32.0])
    monkeypatch.setattr(time, "thread_time", own.__next__)
    monkeypatch.setattr(time, "perf_counter", clock.__next__)
    monkeypatch.setattr(speed, "_SCHEDULE", Path("not there"))
    processor = ProcessorTime()
    for _ in range(2):
        with processor.counted():
            pass
    assert processor.take() == (1 + 1) / (2 + 6)
    assert processor.take() == 1.0  # nothing since
    with processor.counted():
        pass
    assert processor.take() == 1.0  # coarse clocks give 3 seconds in 2


def test_the_processor_share_counts_the_waits_for_other_programs_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """3 seconds on a processor and 1 of waiting for it, in a minute in which the thread slept."""
    own, schedule = iter([2.0, 5.0]), tmp_path / "schedstat"
    monkeypatch.setattr(time, "thread_time", own.__next__)
    monkeypatch.setattr(time, "perf_counter", iter([10.0, 70.0]).__next__)
    monkeypatch.setattr(speed, "_SCHEDULE", schedule)
    schedule.write_text("2000000000 500000000 7\n")
    processor = ProcessorTime()
    with processor.counted():
        schedule.write_text("5000000000 1500000000 9\n")
    assert processor.take() == 3 / (3 + 1)
