"""Kernels in C++ that are compiled when they are first used, where the machine has a compiler.

A kernel is a file with C functions on plain pointers; PyTorch's own threads run it. The compiled file is kept by its
source, compiler, processor and version of PyTorch, so each is compiled once on a machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path


_FLAGS = ("-O3", "-march=native", "-ffast-math", "-fno-finite-math-only", "-std=c++20", "-shared", "-fPIC", "-fopenmp")
_COMPILERS = (os.environ.get("CXX", ""), "g++", "clang++")
_SECONDS = 120


@cache
def native_library(source: Path) -> ctypes.CDLL | None:
    """The functions of a C++ file; None where it cannot be compiled, or ``SHEEPOP_NATIVE=0`` forbids it."""
    compiler = next((found for name in _COMPILERS if name and (found := shutil.which(name))), None)
    if compiler is None or os.environ.get("SHEEPOP_NATIVE") == "0":
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, compiler)))
    except (OSError, subprocess.SubprocessError):
        return None


def _compiled(source: Path, compiler: str) -> Path:
    import torch
    from torch.utils.cpp_extension import include_paths

    content = source.read_bytes()
    processor = torch.backends.cpu.get_cpu_capability()
    key = repr((content, compiler, _FLAGS, torch.__version__, processor, _processor_flags())).encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sheepop" / "native"
    target = folder / f"{source.stem}-{hashlib.sha256(key).hexdigest()[:24]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=folder) as work:
        built = Path(work) / target.name
        command = [
            compiler,
            *_FLAGS,
            *(f"-I{path}" for path in include_paths()),
            str(source),
            "-o",
            str(built),
            f"-L{library}",
            "-ltorch_cpu",
            "-lc10",
            f"-Wl,-rpath,{library}",
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
        built.replace(target)
    return target


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("flags")), "")
