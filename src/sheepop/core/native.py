"""Kernels in C++: built into the package, or compiled on first use if the machine has a compiler.

A kernel is a file of C functions on plain pointers, with OpenMP threads from PyTorch's own library, because the threads
of a second library would compete with them. It is compiled for one of a few levels of instructions, and each machine
uses the highest level that its processor has. A built kernel is named after its level and the hashes of its source and
of itself, so one that is damaged, outdated or made for other instructions is not loaded.

``SHEEPOP_NATIVE=0`` forbids the kernels; ``SHEEPOP_NATIVE=1`` uses them for the smallest network too, as does the name
of a level, which is then the one used. ``SHEEPOP_NATIVE_FLAGS`` are more arguments for the compiler.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sheepop.core.errors import UsageError
from sheepop.core.files import cache_directory
from sheepop.core.kernel_build import LEVELS, Level, build, intact_kernels, stem_of
from sheepop.core.machine import compiler_command, find_compiler, instruction_sets

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_OPENMP = ("libgomp*", "libiomp*", "libomp*")
_LOG = logging.getLogger("sheepop.native")
POINTER, COUNT, NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
"""The C types of arguments that most kernels take."""


@dataclass(frozen=True)
class Loaded:
    """A kernel's functions (None without a kernel), and words that name the kernel or say why it is missing."""

    library: ctypes.CDLL | None
    words: str


def native_kernels_allowed() -> bool | None:
    """Returns the choice of ``SHEEPOP_NATIVE``, or None if it is not set; raises `UsageError` if it is unknown."""
    chosen = os.environ.get("SHEEPOP_NATIVE", "")
    names = [level.name for level in LEVELS]
    if chosen not in ("", "0", "1", *names):
        raise UsageError(f"SHEEPOP_NATIVE = {chosen} is unknown. It can be 0, 1 or one of {', '.join(names)}.")
    return chosen != "0" if chosen else None


def native_library(source: Path) -> ctypes.CDLL | None:
    """Returns the functions of a C++ file, or None without them; logs the reason once if they were wanted."""
    loaded = load_kernel(source)
    if loaded.library is None and native_kernels_allowed() is not False:
        remedy = "Install a C++ compiler (sheepop doctor names one)" if levels() else "Choose another level"
        say_once(
            f"SheepOp's own kernels are not used: {loaded.words}. PyTorch computes instead, which is slower, with int8 "
            f"and int4 weights many times. {remedy}, or set SHEEPOP_NATIVE=0."
        )
    return loaded.library


def native_function(source: Path, name: str, arguments: Sequence[Any], result: Any = None) -> Any:
    """Returns a function of a C++ file, for arguments and a result of these C types, or None without the kernel."""
    library = native_library(source)
    function = None if library is None else getattr(library, name)
    if function is not None:
        function.argtypes, function.restype = arguments, result
    return function


def address(name: str, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """The address of a tensor that a kernel reads or writes, or None for None.

    Raises `ValueError` unless it is on a CPU, contiguous, and has the data type and the shape that the kernel assumes.
    """
    if tensor is None:
        return None
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        order = "" if tensor.is_contiguous() else "not contiguous, "
        found = f"{order}{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{name} must be contiguous, {dtype} {shape} on the CPU for a native kernel; it is {found}.")
    return tensor.data_ptr()


def name_of(dtype: torch.dtype) -> str:
    """The name of a data type in those of kernels, such as "float32"."""
    return str(dtype).removeprefix("torch.")


@cache
def say_once(message: str) -> None:
    """Logs a warning, the first time in this process."""
    _LOG.warning("%s", message)


@cache
def load_kernel(source: Path) -> Loaded:
    """Loads the kernel of a C++ file: the one of the package for the highest level that fits, or one compiled here."""
    if native_kernels_allowed() is False:
        return Loaded(None, "SHEEPOP_NATIVE=0 forbids them")
    fitting = levels()
    if not fitting:
        return Loaded(None, f"this processor ({platform.machine()}) has no {os.environ['SHEEPOP_NATIVE']} instructions")
    extra = tuple(shlex.split(os.environ.get("SHEEPOP_NATIVE_FLAGS", "")))
    _load_openmp()
    for level in fitting if not extra else ():
        for path in intact_kernels(source.parent / "prebuilt", stem_of(source, level)):
            with suppress(OSError):
                return Loaded(ctypes.CDLL(str(path)), f"{level.name}, built into the package")
    compiler = compiler_command()
    if compiler is None:
        return Loaded(None, "the package has none for this machine, and there is no C++ compiler")
    version, problem = find_compiler() or "", ""
    for level in fitting:
        for threads in (("-fopenmp",), ()):
            try:
                library = _compiled(source, level, compiler, version, (*threads, *extra))
            except subprocess.CalledProcessError as error:
                lines = error.stderr.decode(errors="replace").strip().splitlines()
                problem = next((line for line in lines if "error" in line), lines[0] if lines else "")
            except (OSError, subprocess.SubprocessError) as error:
                problem = str(error)
            else:
                alone = "" if threads else ", without threads"
                return Loaded(library, f"{level.name}{alone}, compiled here by {version}")
    return Loaded(None, f"{version} cannot build them ({problem})")


def _compiled(source: Path, level: Level, compiler: Sequence[str], version: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """The kernel in the cache, compiled if it is not there, damaged, or of a machine whose libraries are others."""
    folder, stem = cache_directory() / "native", stem_of(source, level, (*compiler, version, *flags))
    for path in intact_kernels(folder, stem):
        with suppress(OSError):
            return ctypes.CDLL(str(path))
    return ctypes.CDLL(str(build(source, level, compiler, flags, folder, stem)))


def levels() -> list[Level]:
    """The levels that this processor has, the highest first, or the one that ``SHEEPOP_NATIVE`` names."""
    machine = {"amd64": "x86_64", "aarch64": "arm64"}.get(platform.machine().lower(), platform.machine().lower())
    chosen, present = os.environ.get("SHEEPOP_NATIVE", ""), instruction_sets()
    fitting = [level for level in LEVELS if level.machine == machine and level.needs <= present]
    fitting = fitting or [Level(machine, machine, frozenset(), ())]
    return [level for level in fitting if chosen in ("", "1", level.name)]


@cache
def _load_openmp() -> None:
    """Loads the OpenMP library that came with PyTorch, whatever its name, or the system's, for all kernels."""
    found = importlib.util.find_spec("torch")
    folders = (found and found.submodule_search_locations) or []
    beside = [Path(folder) / part for folder in folders for part in ("lib", "../torch.libs")]
    libraries = sorted(path.resolve() for folder in beside for name in _OPENMP for path in folder.glob(name))
    with suppress(OSError):
        ctypes.CDLL(str(libraries[0]) if libraries else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
