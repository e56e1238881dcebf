"""The peaks that makers name, against their data sheets."""

import pytest
import torch

from sheepop.core.speed import nominal_peak, share_of_peak


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
