from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from sheepop.core.machine import LIBRARIES, describe_machine, find_compiler, matrix_flags, memory_nodes, usable_cores

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_the_description_agrees_with_the_system(tmp_path: Path):
    machine = describe_machine(tmp_path)
    assert machine.python == f"CPython {platform.python_version()}"
    assert machine.platform == platform.platform()
    assert 0 < machine.cores <= (os.cpu_count() or 1)
    assert 0 < machine.memory_available <= machine.memory <= psutil.virtual_memory().total
    assert machine.disk_free == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert machine.versions["torch"] == importlib.metadata.version("torch")


def test_the_description_is_plain_data():
    machine = describe_machine()
    assert json.loads(json.dumps(machine.to_dict()))["versions"] == machine.versions


def test_the_versions_are_those_of_all_direct_dependencies():
    declared = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    assert [Requirement(line).name for line in declared] == list(LIBRARIES)


@pytest.mark.parametrize(
    ("memory", "processors", "allowed", "count"),
    [
        (None, None, None, 1),
        ("0", "0", "0", 1),
        ("0-1", "0-1", None, 2),
        ("0,2-3", "0-3", "0-7", 3),
        ("0-2", "0-1", "0-2", 2),
        ("1", "0", "0-1", 1),
        ("0-1", "0-1", "1", 1),
    ],
)
def test_memory_near_processors_is_counted(
    memory: str | None, processors: str | None, allowed: str | None, count: int, tmp_path: Path
) -> None:
    """The nodes that a container may use: of a machine with memory cards or processors of their own, not those."""
    files = {"sys/devices/system/node/has_memory": memory, "sys/devices/system/node/has_cpu": processors}
    files["proc/self/status"] = None if allowed is None else f"Name:\ttest\nMems_allowed_list:\t{allowed}"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (tmp_path / name).write_text(text + "\n")
    assert memory_nodes(tmp_path) == count


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_affinity_cuts_the_usable_cores():
    program = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    program += "from sheepop.core.machine import usable_cores; assert 0 < usable_cores() <= 1"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cpuinfo", "flags"),
    [
        (
            "processor : 0\nflags\t\t: fpu avx avx2 avx512f amx_bf16 avx512_bf16 amx_tile\n",
            "avx2 avx512f avx512_bf16 amx_bf16",
        ),
        ("model name : flags: avx2\nflags : fpu sse2\nflags : avx2\n", ""),
        ("Features\t: fp asimd bf16 sve i8mm\n", "asimd sve bf16"),
        ("", ""),
    ],
)
def test_matrix_units_are_found_among_the_flags(cpuinfo: str, flags: str):
    assert matrix_flags(cpuinfo) == tuple(flags.split())


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_compiler_named_by_cxx_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiler = program(tmp_path / "my c++", 'echo "my compiler 7 $1"; echo more')
    monkeypatch.setenv("CXX", f"'{compiler}' -m64")
    assert find_compiler() == "my compiler 7 -m64"


def test_a_compiler_that_fails_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program(tmp_path / "c++", "echo no developer tools; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "absent")
    assert find_compiler() is None
    program(tmp_path / "g++", "echo g++ 12")
    assert find_compiler() == "g++ 12"
