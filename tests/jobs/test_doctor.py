from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sheepop.core.machine import Accelerator, Machine
from sheepop.jobs.doctor import (
    Check,
    DoctorReport,
    check_accelerator,
    check_bfloat16,
    check_compiler,
    check_disk,
    check_headers,
    check_memory,
    check_platform,
    check_processor,
    check_sandbox,
    check_torch,
    doctor,
    render_doctor,
)

LAPTOP = Machine(
    python="CPython 3.12.1",
    platform="Linux-6.1",
    processor="Some CPU",
    cores=2.0,
    matrix_units=("avx2",),
    memory=16_000_000_000,
    memory_available=9_000_000_000,
    disk_free=50_000_000_000,
    compiler="g++ 12",
    accelerators=(),
    versions={},
)


def with_(**changes: object) -> Machine:
    return dataclasses.replace(LAPTOP, **changes)  # type: ignore[arg-type]


def test_what_is_there_is_ok():
    assert check_memory(LAPTOP) == Check("Memory", "ok", "16.0 GB, 9.0 GB free")
    assert check_disk(LAPTOP) == Check("Disk", "ok", "50.0 GB free")
    assert check_compiler(LAPTOP) == Check("C++ compiler", "ok", "g++ 12")
    assert check_processor(LAPTOP) == Check("Processor", "ok", "Some CPU, 2 usable cores, avx2")
    card = Accelerator("cuda", "Card", 24_000_000_000)
    assert check_accelerator(with_(accelerators=(card,))) == Check("GPU", "ok", "Card (cuda, 24 GB)")


@pytest.mark.parametrize(
    ("check", "status", "consequence"),
    [
        (check_memory(with_(memory_available=3_900_000_000)), "warning", "up to 4 GB"),
        (check_disk(with_(disk_free=100)), "warning", "may not fit"),
        (check_compiler(with_(compiler=None)), "missing", "training is not compiled"),
        (check_headers(False), "missing", "cannot build"),
        (check_accelerator(LAPTOP), "missing", "run on the CPU"),
        (check_platform(with_(platform="Windows-11")), "warning", "Windows is not supported"),
        (check_processor(with_(matrix_units=())), "warning", "slow"),
    ],
)
def test_what_is_missing_says_what_it_would_give(check: Check, status: str, consequence: str):
    assert check.status == status
    assert consequence in check.consequence


@pytest.mark.parametrize(
    ("processor", "capability", "status"),
    [
        ("x86_64", "AVX512", "ok"),
        ("x86_64", "DEFAULT", "warning"),
        ("aarch64", "DEFAULT", "ok"),
        ("arm64", "SVE256", "ok"),
    ],
)
def test_the_default_of_torch_is_slow_on_x86_alone(
    processor: str, capability: str, status: str, monkeypatch: pytest.MonkeyPatch
):
    """On ARM it has NEON, and PyTorch says "DEFAULT" on every such processor without SVE."""
    monkeypatch.setattr("platform.machine", lambda: processor)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert check_torch().status == status


def test_bfloat16_is_judged_by_the_measured_rates_of_the_best_device():
    slow = {"cpu float32": 100e9, "cpu bfloat16": 0.5e9}
    assert check_bfloat16(slow).status == "missing"
    assert check_bfloat16(slow).value == "0.005 times the speed of float32 on cpu"
    gpu = check_bfloat16({**slow, "cuda float32": 20e12, "cuda bfloat16": 100e12})
    assert (gpu.status, gpu.value) == ("ok", "5 times the speed of float32 on cuda")


def test_the_text_holds_every_check_and_counts_those_that_want_a_look():
    checks = (
        Check("torch", "ok", "2.13.0"),
        Check("numpy", "ok", "2.4.6"),
        Check("pydantic", "missing", "not installed", "Without it, nothing.", "pip install it"),
        check_compiler(with_(compiler=None)),
    )
    text = render_doctor(DoctorReport(checks, LAPTOP, {"cpu float32": 123.4e9, "cuda float32": 45.6e12}))
    lines = text.splitlines()
    assert lines[0] == "none  pydantic                   not installed"
    assert lines[1:3] == [" " * 33 + "Without it, nothing.", " " * 33 + "pip install it"]
    assert "ok    Libraries                  torch 2.13.0, numpy 2.4.6" in lines
    assert "ok    Matrix peak, cpu float32   123 GFLOP/s" in lines
    assert "ok    Matrix peak, cuda float32  45.6 TFLOP/s" in lines
    assert lines[-1] == "2 of 4 checks need attention."
    assert max(map(len, lines)) <= 110


def test_nothing_missing_says_so():
    assert render_doctor(DoctorReport((Check("A", "ok", "x"),), LAPTOP, {})).endswith("Everything is in place.")


def test_without_isolation_no_program_of_a_model_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.platform", "darwin")
    found = check_sandbox()
    assert (found.status, found.consequence) == ("missing", "sheepop eval code does not work here.")
    assert "only in isolation, on Linux" in found.remedy


def test_the_doctor_looks_at_this_machine(tmp_path: Path):
    import numpy
    import torch

    report = doctor(tmp_path)
    found = {check.name: check for check in report.checks}
    assert len(found) == len(report.checks)
    assert found["numpy"].value == numpy.__version__
    assert torch.__version__ in found["torch kernels"].value
    assert {"cpu float32", "cpu bfloat16"} <= report.matrix_peaks.keys()
    assert all(1e6 < rate < 1e17 for rate in report.matrix_peaks.values())
    assert all(check.consequence for check in report.checks if check.status != "ok")
    assert json.loads(json.dumps(report.to_dict()))["machine"]["python"] == report.machine.python
    assert all(check.name in render_doctor(report) for check in report.checks)
