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
# Each loop needs the whole of the loop before: item i of the next is the sum of the first i + 1 items.
SUMS = """
#include "native.h"
extern "C" void sum(int64_t* numbers, int64_t count, int64_t loops, int64_t threads) {
  together(threads, [&](Worker& worker) {
    for (int64_t loop = 0; loop < loops; loop++) {
      const int64_t* before = numbers + loop * count;
      worker.share(count, [&](int64_t i) {
        int64_t total = 0;
        for (int64_t j = 0; j <= i; j++) total += before[j];
        numbers[(loop + 1) * count + i] += total;
      });
    }
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
def test_threads_share_loops_and_wait_for_their_items(source: Path) -> None:
    """With more threads than processors, some come late."""
    source.write_text(SUMS)
    library = native_library(source)
    assert library is not None
    count, loops = 7, 300
    expected = [[1] * count]
    for _ in range(loops):
        expected.append([sum(expected[-1][: i + 1]) % 2**64 for i in range(count)])
    for threads in (1, 2, 5):
        numbers = (ctypes.c_uint64 * ((loops + 1) * count))(*expected[0])
        library.sum(numbers, *map(ctypes.c_int64, (count, loops, threads)))
        assert list(numbers) == [number for row in expected for number in row]


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
