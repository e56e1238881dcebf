"""The native kernels under AddressSanitizer, which ends a process that reads or writes beyond a buffer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sheepop.core.kernel_build import KERNELS
from sheepop.core.machine import compiler_command, program_output

ROOT = Path(__file__).parents[2]
# Tests that run kernels of every kind on sizes of every kind.
TESTS = (
    *("adapt/test_stored_weight.py", "adapt/test_rounded_products.py"),
    *("generate/test_native_attention.py", "generate/test_native_block.py", "generate/test_half_precision.py"),
    *("generate/test_sampler.py", "generate/test_native_experts.py", "model/test_native_scoring.py"),
    *("checkpoint/gguf/test_container.py", "checkpoint/gguf/test_quantized_types.py"),
)
BEYOND = """
#include "native.h"
extern "C" void beyond(float* numbers, int64_t count) { numbers[count] = 1; }
"""

pytestmark = pytest.mark.system


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    command = compiler_command()
    # The library of C++ comes with it, since AddressSanitizer looks for the function that throws when it is loaded.
    libraries = [
        None if command is None else program_output([*command, f"-print-file-name={name}"], seconds=20)
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if any(library is None or not Path(library).is_absolute() for library in libraries):
        pytest.skip("there is no C++ compiler with AddressSanitizer")
    return {
        **os.environ,
        "SHEEPOP_NATIVE": "1",
        "SHEEPOP_NATIVE_FLAGS": "-fsanitize=address -O1 -g",
        "XDG_CACHE_HOME": str(tmp_path),
        "LD_PRELOAD": " ".join(map(str, libraries)),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself leaks
        "OMP_NUM_THREADS": "2",
    }


def test_it_sees_a_kernel_that_writes_beyond_a_tensor(tmp_path: Path, environment: dict[str, str]) -> None:
    source = tmp_path / "beyond.cpp"
    source.write_text(BEYOND)
    program = f"""
import ctypes, pathlib, torch
from sheepop.core.native import native_library
numbers = torch.zeros(100)
library = native_library(pathlib.Path({str(source)!r}))
library.beyond(ctypes.c_void_p(numbers.data_ptr()), ctypes.c_int64(99))
print("inside", flush=True)
library.beyond(ctypes.c_void_p(numbers.data_ptr()), ctypes.c_int64(100))
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "inside\n"
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_the_tests_run_every_kernel() -> None:
    """Each file of kernels, with a test that calls it."""
    reached = {
        "linear": "adapt/test_stored_weight.py",
        "integers": "adapt/test_stored_weight.py",
        "rounded_integers": "adapt/test_rounded_products.py",
        "attention": "generate/test_native_attention.py",
        "block": "generate/test_native_block.py",
        "sampling": "generate/test_sampler.py",
        "scoring": "model/test_native_scoring.py",
        "gguf_blocks": "checkpoint/gguf/test_quantized_types.py",
    }
    assert set(reached) == {path.stem for path in KERNELS.glob("*.cpp")}
    assert set(reached.values()) <= set(TESTS)


@pytest.mark.timeout(1800)
def test_no_kernel_reads_or_writes_beyond_its_buffers(environment: dict[str, str]) -> None:
    # Without capturing, since AddressSanitizer writes past Python.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider"]
    command += [str(ROOT / "tests" / test) for test in TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
