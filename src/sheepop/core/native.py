"""Compiles kernels in C++ on first use, if the machine has a compiler.

A kernel is a file of C functions on plain pointers, with OpenMP threads from PyTorch's own library, because the threads
of a second library would compete with them. Compiled kernels are cached by source, compiler, processor and that
library, so each is compiled once on a machine. ``SHEEPOP_NATIVE=0`` forbids the kernels; ``SHEEPOP_NATIVE=1`` uses them
for the smallest network too. ``SHEEPOP_NATIVE_ARCH`` is the compiler's ``-march``, such as ``x86-64-v3`` for AVX2 on a
processor that has AVX-512 too.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sheepop.core.files import cache_directory
from sheepop.core.machine import compiler_command, find_compiler, processor_flags, system_text

_HEADER = Path(__file__).with_name("native.h")
# No contraction: sums of products are rounded as in the source, not depending on the compiler's choices.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-std=c++20", "-fPIC", "-fopenmp")
_OPENMP = ("libgomp*", "libiomp*", "libomp*")
_SECONDS = 120


def native_kernels_allowed() -> bool | None:
    """Returns the choice of ``SHEEPOP_NATIVE``, or None if it is not set to 0 or 1."""
    return {"0": False, "1": True}.get(os.environ.get("SHEEPOP_NATIVE", ""))


@cache
def native_library(source: Path) -> ctypes.CDLL | None:
    """Returns the functions of a C++ file, or None if it cannot or must not be compiled."""
    compiler = compiler_command()
    if compiler is None or native_kernels_allowed() is False:
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, compiler)))
    except (OSError, subprocess.SubprocessError):
        return None


def _compiled(source: Path, compiler: Sequence[str]) -> Path:
    content = source.read_bytes() + _HEADER.read_bytes()
    threads, flags = _openmp(), processor_flags(system_text("/proc/cpuinfo"))
    options = (*_FLAGS, f"-march={os.environ.get('SHEEPOP_NATIVE_ARCH') or 'native'}")
    key = repr((content, compiler, find_compiler(), options, flags, threads)).encode()
    folder = cache_directory() / "native"
    target = folder / f"{source.stem}-{hashlib.sha256(key).hexdigest()[:24]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            part, built = Path(work) / "part.o", Path(work) / target.name
            for command in (
                [*compiler, *options, f"-I{_HEADER.parent}", "-c", str(source), "-o", str(part)],
                [*compiler, "-shared", str(part), threads, "-o", str(built)],
            ):
                subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
            built.replace(target)
    return target


def _openmp() -> str:
    """Returns the OpenMP library to link: the one that came with PyTorch, whatever its name, or the compiler's flag."""
    found = importlib.util.find_spec("torch")
    folders = (found and found.submodule_search_locations) or []
    beside = [Path(folder) / part for folder in folders for part in ("lib", "../torch.libs")]
    libraries = sorted(path.resolve() for folder in beside for name in _OPENMP for path in folder.glob(name))
    return str(libraries[0]) if libraries else "-fopenmp"
