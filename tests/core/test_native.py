"""Kernels that come with the package or are compiled when they are first used."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sheepop.core import native
from sheepop.core.errors import UsageError
from sheepop.core.kernel_build import LEVELS, build
from sheepop.core.machine import compiler_command
from sheepop.core.native import load_kernel, native_library, say_once

SOURCE = """
#include "native.h"
extern "C" void squares(int64_t* numbers, int64_t count, int64_t threads) {
  share(count, 1, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) numbers[i] = i * i;
  });
}
"""
SQUARES = [number**2 for number in range(1000)]
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
# Writes which thread computed each item of each owner. Both threads begin before one goes on, and the `late` one waits
# in its first item for all others. Returns false if there is one thread.
OWNERS = """
#include <thread>
#include "native.h"
extern "C" bool own(int64_t* computed_by, const int64_t* sizes, int64_t late) {
  std::atomic<int64_t> threads{0}, begun{0}, done{0};
#pragma omp parallel num_threads(2)
  threads++;
  if (threads < 2) return false;
  together(2, [&](Worker& worker) {
    bool is_first = true;
    worker.share_parts([&](int64_t owner) { return sizes[owner]; }, [&](int64_t owner, int64_t i) {
      computed_by[(owner ? sizes[0] : 0) + i] = omp_get_thread_num();
      if (is_first) {
        begun++;
        while (begun < 2 || (omp_get_thread_num() == late && done < sizes[0] + sizes[1] - 1)) std::this_thread::yield();
      }
      is_first = false;
      done++;
    });
  });
  return true;
}
"""
needs_compiler = pytest.mark.skipif(compiler_command() is None, reason="there is no C++ compiler")
needs_levels = pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one level")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "squares.cpp"
    path.write_text(SOURCE)
    say_once.cache_clear()
    yield path
    load_kernel.cache_clear()


def squares(source: Path) -> list[int] | None:
    """The numbers that the kernel computes; None if there is no kernel."""
    load_kernel.cache_clear()
    if (library := native_library(source)) is None:
        return None
    numbers = (ctypes.c_int64 * 1000)()
    library.squares(numbers, ctypes.c_int64(1000), ctypes.c_int64(3))
    return list(numbers)


def in_cache(source: Path) -> list[Path]:
    return sorted((source.parent / "cache").rglob("*.so"))


@needs_compiler
def test_a_kernel_is_compiled_once_and_shares_its_work(source: Path) -> None:
    assert squares(source) == SQUARES
    (kept,) = in_cache(source)
    changed = kept.stat().st_mtime_ns
    assert squares(source) == SQUARES
    assert kept.stat().st_mtime_ns == changed
    assert load_kernel(source).words.endswith(f"compiled here by {native.find_compiler()}")


@needs_compiler
def test_a_damaged_kernel_is_compiled_again(source: Path) -> None:
    """Before it is loaded, which could end the process."""
    assert squares(source) == SQUARES
    (kept,) = in_cache(source)
    whole = kept.read_bytes()
    bit, other = bytearray(whole), bytearray(whole)
    bit[len(whole) // 2] ^= 1
    other[18:20] = (243).to_bytes(2, "little")  # RISC-V, in the header of an ELF file
    for damaged in (b"", whole[:3000], bit, other):
        kept.unlink()  # what this process has loaded stays as it is
        kept.write_bytes(damaged)
        assert squares(source) == SQUARES
        assert whole in [path.read_bytes() for path in in_cache(source)]


@needs_compiler
def test_a_whole_kernel_that_does_not_load_here_is_compiled_again(source: Path) -> None:
    """With its threads: a cache that several machines share may have a kernel for other libraries."""
    assert squares(source) == SQUARES
    (kept,) = in_cache(source)
    foreign = bytearray(kept.read_bytes())
    foreign[18:20] = (243).to_bytes(2, "little")  # RISC-V
    kept.unlink()
    stem = kept.stem.rpartition("-")[0]
    kept.with_name(f"{stem}-{hashlib.sha256(foreign).hexdigest()[:24]}.so").write_bytes(foreign)
    assert squares(source) == SQUARES
    assert kept.exists() and "without threads" not in load_kernel(source).words


@needs_compiler
@needs_levels
def test_a_processor_with_fewer_instructions_has_its_own_kernels(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the same cache, as on a home directory that several machines share."""
    lowest = next(level for level in reversed(LEVELS) if level.machine == "x86_64")
    assert squares(source) == SQUARES
    before = in_cache(source)
    monkeypatch.setattr(native, "instruction_sets", frozenset)
    assert squares(source) == SQUARES
    assert load_kernel(source).words.startswith(f"{lowest.name}, ")
    assert len(in_cache(source)) == len(before) + 1
    monkeypatch.setenv("SHEEPOP_NATIVE", "avx2")
    caplog.clear()
    assert squares(source) is None
    assert "has no avx2 instructions" in load_kernel(source).words
    assert "Choose another level" in caplog.text and "compiler" not in caplog.text


@needs_compiler
@needs_levels
def test_a_level_can_be_chosen(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHEEPOP_NATIVE", "sse2")
    assert squares(source) == SQUARES
    assert load_kernel(source).words.startswith("sse2, ")
    monkeypatch.setenv("SHEEPOP_NATIVE", "avx3")
    with pytest.raises(UsageError, match="SHEEPOP_NATIVE = avx3 is unknown"):
        squares(source)


@needs_compiler
def test_a_kernel_of_the_package_needs_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used if it was built from this source, and is whole."""
    command = compiler_command()
    assert command is not None
    built = build(source, native.levels()[0], command, ("-fopenmp",), source.parent / "prebuilt")
    monkeypatch.setattr(native, "compiler_command", lambda: None)
    assert squares(source) == SQUARES
    assert load_kernel(source).words == f"{native.levels()[0].name}, built into the package"
    source.write_text(SOURCE + "\n")
    assert squares(source) is None
    source.write_text(SOURCE)
    whole = built.read_bytes()
    built.unlink()  # what this process has loaded stays as it is
    built.write_bytes(whole[:3000])
    assert squares(source) is None


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
def test_a_thread_begins_with_its_own_items_and_helps_with_others(source: Path) -> None:
    """Every pass reads the same rows in the same thread, unless that one is late."""
    source.write_text(OWNERS)
    library = native_library(source)
    assert library is not None
    library.own.restype = ctypes.c_bool
    for sizes in ((1, 1), (3, 200), (200, 3)):
        for late in (0, 1):
            computed_by = (ctypes.c_int64 * sum(sizes))(*[-1] * sum(sizes))
            if not library.own(computed_by, (ctypes.c_int64 * 2)(*sizes), ctypes.c_int64(late)):
                pytest.skip("kernels have one thread here")
            expected = [1 - late] * sum(sizes)
            expected[sizes[0] if late else 0] = late
            assert list(computed_by) == expected


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


def test_where_there_is_none_this_is_said_once(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless the user forbids kernels."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("SHEEPOP_NATIVE", "0")
    assert squares(source) is None
    assert not caplog.messages
    monkeypatch.delenv("SHEEPOP_NATIVE")
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "false")
        patch.setenv("PATH", "")
        assert squares(source) is squares(source) is None
    assert len(caplog.messages) == 1
    assert "there is no C++ compiler" in caplog.messages[0]
    if compiler_command() is not None:
        source.write_text("not C++")
        assert squares(source) is None
        assert "squares.cpp:1" in caplog.messages[1]
