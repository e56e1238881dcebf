"""Measurements that need a process of their own: peak memory never falls within one."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

CHILD = "--child"


def measured_apart(script: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `script` reports about `settings` from a new process; its errors end this one."""
    command = [sys.executable, script, CHILD, json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(measure: Callable[..., dict[str, Any]]) -> bool:
    """In such a process prints what `measure` finds, and is true; elsewhere does nothing and is false."""
    if CHILD not in sys.argv:
        return False
    print(json.dumps(measure(**json.loads(sys.argv[-1]))))
    return True


def forget_peak(device: str) -> None:
    """Lets `peak_bytes` begin anew from what is in use now, where the system can."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        # Linux, proc(5): 5 sets the peak of the resident memory to its present size.
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    """The most memory in use since `forget_peak`: of the GPU's allocator, or of the whole process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss, which on Linux begins with what the parent process had in use.
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
