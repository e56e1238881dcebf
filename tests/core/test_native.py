"""Kernels that are compiled when they are first used."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from sheepop.core.machine import compiler_command
from sheepop.core.native import native_library

SOURCE = """
#include "native.h"
extern "C" void squares(int64_t* numbers, int64_t count, int64_t threads) {
  share(count, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) numbers[i] = i * i;
  });
}
"""
needs_compiler = pytest.mark.skipif(compiler_command() is None, reason="there is no C++ compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "squares.cpp"
    path.write_text(SOURCE)
    return path


@needs_compiler
def test_a_kernel_is_compiled_once_and_shares_its_work(source: Path) -> None:
    library = native_library(source)
    assert library is not None
    numbers = (ctypes.c_int64 * 1000)()
    library.squares(numbers, ctypes.c_int64(1000), ctypes.c_int64(3))
    assert list(numbers) == [number**2 for number in range(1000)]
    (kept,) = (source.parent / "cache").rglob("*.*")
    changed = kept.stat().st_mtime_ns
    native_library.cache_clear()
    assert native_library(source) is not None
    assert kept.stat().st_mtime_ns == changed


@needs_compiler
def test_its_threads_are_those_of_pytorch(source: Path) -> None:
    """A second OpenMP in the process would have threads that wait for work on the same cores."""
    program = f"""
import torch
from pathlib import Path
from sheepop.core.native import native_library
before = {{line.split()[-1] for line in open("/proc/self/maps") if "omp" in line}}
assert native_library(Path({str(source)!r})) is not None
print({{line.split()[-1] for line in open("/proc/self/maps") if "omp" in line}} - before)
"""
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux lists the libraries of a process")
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == "set()"


def test_without_a_compiler_or_where_it_must_not_be_there_is_none(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("SHEEPOP_NATIVE", "0"), ("CXX", "false")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            if name == "CXX":
                patch.setenv("PATH", "")
            native_library.cache_clear()
            assert native_library(source) is None
    native_library.cache_clear()
    source.write_text("not C++")
    assert native_library(source) is None
