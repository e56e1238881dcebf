"""Which device is meant, and what has to be settled before its first use."""

from __future__ import annotations

import mmap
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sheepop.core.device import resolve_device, use_huge_pages
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


def _of_linux(first: int, second: int) -> bool:
    version = re.match(r"(\d+)\.(\d+)", platform.release())
    return sys.platform == "linux" and version is not None and (int(version[1]), int(version[2])) >= (first, second)


@pytest.mark.skipif(not _of_linux(6, 1), reason="Linux collapses pages since 6.1")
def test_tensors_move_into_huge_pages_where_they_are(tmp_path: Path) -> None:
    memory = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.int32)
    tensor.copy_(torch.arange(len(tensor), dtype=torch.int32))
    (tmp_path / "weights").write_bytes(bytes(8 << 20))
    of_file = torch.from_file(str(tmp_path / "weights"), size=8 << 20, dtype=torch.uint8)
    address, beyond = tensor.data_ptr(), torch.zeros(3)  # which shares its page with other memory
    use_huge_pages([tensor, of_file, beyond])
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, torch.arange(len(tensor), dtype=torch.int32))
    assert int(of_file.sum()) == 0
    assert beyond.tolist() == [0, 0, 0]
    page = Path("/proc/self/smaps").read_text().partition(f"{address:x}-")[2]
    found = re.search(r"AnonHugePages: +(\d+) kB", page)
    if not page or found is None or not (Path("/sys/kernel/mm/transparent_hugepage")).exists():
        pytest.skip("this kernel does not say where it has huge pages")
    assert int(found[1]) >= 8 << 10
