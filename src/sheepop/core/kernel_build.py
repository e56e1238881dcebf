"""Compiles kernels in C++ for levels of instructions, for `sheepop.core.native` and for wheels.

Imports nothing but the standard library, because wheels are built where nothing else is installed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels"
"""The folder of the package's kernels and of the headers that any kernel may include."""
_HEADERS = sorted(KERNELS.glob("*.h"))
# No contraction: sums of products are rounded as in the source, not depending on the compiler's choices.
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-std=c++20", "-fPIC")
# Calls of OpenMP are bound to PyTorch's library when a kernel is loaded.
_LINKING = ("-shared", "-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-shared",)
_SECONDS = 600  # for a machine that is busy


@dataclass(frozen=True)
class Level:
    """Instructions that a kernel is compiled for: processors of `machine` with all of `needs`."""

    name: str
    machine: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _AVX512 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")
LEVELS = (
    Level("amx", "x86_64", _AMX, (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")),
    Level("avx512-bf16", "x86_64", _BF16, _BF16_FLAGS),
    Level("avx512-vnni", "x86_64", _VNNI, _VNNI_FLAGS),
    Level("avx512", "x86_64", _AVX512, ("-march=x86-64-v4",)),
    Level("avx2", "x86_64", _AVX2, ("-march=x86-64-v3",)),
    Level("sse2", "x86_64", frozenset(), ()),
    Level("neon", "arm64", frozenset(), ()),
)
"""The levels, the highest of each kind of processor first."""


def build(
    source: Path, level: Level, compiler: Sequence[str], flags: Sequence[str], folder: Path, stem: str | None = None
) -> Path:
    """Compiles a C++ file for `level` with more `flags`; returns the new file in `folder`.

    Its name begins with `stem`, by default that of a kernel of the package. Raises `subprocess.SubprocessError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        part, built = Path(work) / "part.o", Path(work) / "kernel.so"
        for command in (
            [*compiler, *_FLAGS, *level.flags, *flags, f"-I{KERNELS}", "-c", str(source), "-o", str(part)],
            [*compiler, *_LINKING, str(part), "-o", str(built)],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
        target = folder / f"{stem or stem_of(source, level)}-{_hash(built.read_bytes())}.so"
        built.replace(target)
    return target


def stem_of(source: Path, level: Level, made_by: Sequence[str] = ()) -> str:
    """The beginning of the names of the kernels that a compiler with its flags builds from these files."""
    files = [path.read_bytes() for path in (source, *_HEADERS)]
    return f"{source.stem}-{level.name}-{_hash(repr((files, sys.platform, _FLAGS, level.flags, made_by)).encode())}"


def intact_kernels(folder: Path, stem: str) -> Iterator[Path]:
    """The kernels of a folder whose content has the hash in their names."""
    for path in folder.glob(f"{stem}-*.so"):
        with suppress(OSError):
            if path.name == f"{stem}-{_hash(path.read_bytes())}.so":
                yield path


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]
