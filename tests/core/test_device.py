"""Which device is meant, and what has to be settled before its first use."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from sheepop.core.device import resolve_device
from sheepop.core.errors import DeviceError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``present("cuda")`` makes torch find these accelerators and no others."""

    def pretend(*names: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in names)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in names)

    monkeypatch.setenv(WORKSPACE, "")  # restored after the test, whatever it does
    monkeypatch.delenv(WORKSPACE)
    return pretend


@pytest.mark.parametrize(
    ("names", "best"), [((), "cpu"), (("mps",), "mps"), (("cuda",), "cuda"), (("cuda", "mps"), "cuda")]
)
def test_auto_is_the_best_device_present(present: Any, names: tuple[str, ...], best: str) -> None:
    present(*names)
    assert resolve_device("auto") == best


def test_what_is_absent_is_refused_with_what_is_there(present: Any) -> None:
    present("mps")
    with pytest.raises(DeviceError, match="Usable here: mps, cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_cuda_is_made_ready_for_deterministic_training(present: Any, name: str) -> None:
    present("cuda")
    resolve_device(name)
    assert os.environ[WORKSPACE] == ":4096:8"


def test_what_the_environment_says_of_cuda_stays(present: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    present("cuda")
    monkeypatch.setenv(WORKSPACE, ":16:8")
    resolve_device("cuda")
    assert os.environ[WORKSPACE] == ":16:8"


def test_other_devices_leave_the_environment_alone(present: Any) -> None:
    present("cuda")
    resolve_device("cpu")
    assert WORKSPACE not in os.environ
