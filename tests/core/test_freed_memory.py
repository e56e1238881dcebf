"""Memory that is freed and asked for again, as the system counts the pages that it hands out."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")

# Asks for 100 MB four times and frees them again; the pages handed out for the last three.
PROGRAM = """
import resource, sys
from sheepop.core.device import keep_freed_memory
print(keep_freed_memory(sys.argv[1]))
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(100_000_000)[::4096]
before = faults()
for _ in range(3):
    piece = bytearray(b"1") * 100_000_000
    del piece
print((faults() - before) * resource.getpagesize())
"""

# Frees 100 MB below a piece that stays, so that the heap cannot shrink; the resident pages before and after.
RETURNING = """
import ctypes
from sheepop.core.device import keep_freed_memory, return_freed_memory
assert keep_freed_memory("cpu")
allocator = ctypes.CDLL(None)
allocator.malloc.restype = ctypes.c_void_p
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
place = ctypes.c_void_p(allocator.malloc(ctypes.c_size_t(100_000_000)))
ctypes.memset(place, 1, 100_000_000)
allocator.malloc(ctypes.c_size_t(1000))
allocator.free(place)
before = resident()
return_freed_memory()
print(before - resident())
"""


def pages_handed_out(device: str, **environment: str) -> tuple[str, int]:
    kept = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device], env=kept | environment, capture_output=True, text=True, check=True
    )
    told, size = done.stdout.split()
    return told, int(size)


def test_pages_are_handed_out_once() -> None:
    assert pages_handed_out("cuda")[1] > 250_000_000
    told, size = pages_handed_out("cpu")
    assert told == "True"
    assert size < 150_000_000  # at most the first of the three


@pytest.mark.parametrize(
    "environment", [{"MALLOC_MMAP_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}]
)
def test_the_environment_decides_first(environment) -> None:
    told, size = pages_handed_out("cpu", **environment)
    assert told == "False"
    assert size > 250_000_000


def test_freed_memory_is_returned_when_asked() -> None:
    kept = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable, "-c", RETURNING], env=kept, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 90_000_000
