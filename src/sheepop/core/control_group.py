"""The limits of Linux control groups on this process: a container's share of the machine's cores and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ControlGroupLimits:
    """The tightest limits of our group and its parents; None means unlimited. Memory is in bytes."""

    cores: float | None
    memory: int | None
    memory_left: int | None


def control_group_limits(root: Path = Path("/")) -> ControlGroupLimits:
    """Reads control groups of version 1 and 2 below `root`; without them, as on macOS, there are no limits."""
    cores: list[float] = []
    memory: list[tuple[int, int]] = []
    for controllers, group in _groups(root):
        if controllers == [""]:
            quota = _read(group / "cpu.max").split()
            cores += _quota(quota[0], quota[1]) if len(quota) == 2 else []
            memory += _memory(group, "memory.max", "memory.current", "inactive_file")
        if "cpu" in controllers:
            cores += _quota(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))
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
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not path:
            continue
        controllers = names.split(",")
        base = mount / names if names and (mount / names).is_dir() else mount / controllers[-1]
        group = base / path.lstrip("/")
        if ".." in group.parts:
            continue
        while True:
            yield controllers, group
            if group == base:
                break
            group = group.parent


def _quota(quota: str, period: str) -> list[float]:
    return [int(quota) / int(period)] if quota.isdigit() and period.isdigit() and int(quota) and int(period) else []


def _memory(group: Path, limit_name: str, used_name: str, cache_name: str) -> list[tuple[int, int]]:
    """Returns the limit and the memory left under it; file pages that the kernel can drop count as left."""
    limit, used = _read(group / limit_name), _read(group / used_name)
    if not limit.isdigit() or not used.isdigit():
        return []
    statistics = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
    cache = statistics.get(cache_name, "0")
    held = int(used) - (int(cache) if cache.isdigit() else 0)
    return [(int(limit), max(0, int(limit) - held))]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
