"""Kernels in C++ that are compiled when they are first used, where the machine has a compiler.

A kernel is a file with C functions on plain pointers, and threads by OpenMP, whose library is PyTorch's own. What is
compiled is kept by source, compiler and processor, so each is compiled once on a machine. ``SHEEPOP_NATIVE=0`` forbids
the kernels, and ``SHEEPOP_NATIVE=1`` uses them for the smallest network too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sheepop.core.machine import compiler_command

_HEADER = Path(__file__).with_name("native.h")
# Sums of products are rounded as the source says, not as suits the place where a compiler puts them.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-std=c++20", "-shared", "-fPIC", "-fopenmp")
_SECONDS = 120


def native_kernels_allowed() -> bool | None:
    """What ``SHEEPOP_NATIVE`` says; None where it says nothing."""
    return {"0": False, "1": True}.get(os.environ.get("SHEEPOP_NATIVE", ""))


@cache
def native_library(source: Path) -> ctypes.CDLL | None:
    """The functions of a C++ file; None where it cannot be compiled, or must not be."""
    compiler = compiler_command()
    if compiler is None or native_kernels_allowed() is False:
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, compiler)))
    except (OSError, subprocess.SubprocessError):
        return None


def _compiled(source: Path, compiler: Sequence[str]) -> Path:
    content = source.read_bytes() + _HEADER.read_bytes()
    key = repr((content, compiler, _FLAGS, _processor())).encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sheepop" / "native"
    target = folder / f"{source.stem}-{hashlib.sha256(key).hexdigest()[:24]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            built = Path(work) / target.name
            command = [*compiler, *_FLAGS, f"-I{_HEADER.parent}", str(source), "-o", str(built)]
            subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
            built.replace(target)
    return target


def _processor() -> str:
    """What code for this processor may depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
