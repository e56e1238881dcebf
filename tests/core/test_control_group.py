from __future__ import annotations

from pathlib import Path

import pytest

from sheepop.core.machine import ControlGroupLimits, control_group_limits


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


def test_version_2_limits_are_read_from_our_group(tmp_path: Path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/work/job",
            "sys/fs/cgroup/work/job/cpu.max": "150000 100000",
            "sys/fs/cgroup/work/job/memory.max": "8000000000",
            "sys/fs/cgroup/work/job/memory.current": "3000000000",
            "sys/fs/cgroup/work/job/memory.stat": "anon 1\nactive_file 7\ninactive_file 1000000000",
        },
    )
    assert control_group_limits(root) == ControlGroupLimits(1.5, 8_000_000_000, 6_000_000_000)


@pytest.mark.parametrize(
    ("job", "work", "expected"),
    [
        (("max 100000", "9000"), ("50000 100000", "4000"), ControlGroupLimits(0.5, 4000, 0)),
        (("300000 100000", "9000"), ("50000 100000", "6000"), ControlGroupLimits(0.5, 6000, 1000)),
        (("50000 100000", "4000"), ("300000 100000", "9000"), ControlGroupLimits(0.5, 4000, 3500)),
    ],
)
def test_the_tightest_group_on_the_way_counts(
    tmp_path: Path, job: tuple[str, str], work: tuple[str, str], expected: ControlGroupLimits
):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/work/job",
            "sys/fs/cgroup/work/job/cpu.max": job[0],
            "sys/fs/cgroup/work/job/memory.max": job[1],
            "sys/fs/cgroup/work/job/memory.current": "500",
            "sys/fs/cgroup/work/cpu.max": work[0],
            "sys/fs/cgroup/work/memory.max": work[1],
            "sys/fs/cgroup/work/memory.current": "5000",
        },
    )
    assert control_group_limits(root) == expected


def test_version_1_limits_are_read_from_each_controller(tmp_path: Path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n0::/",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1024",
            "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 24",
        },
    )
    assert control_group_limits(root) == ControlGroupLimits(2.0, 4096, 3096)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/"},
        {"proc/self/cgroup": "nonsense\n0::/../../etc"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": "max"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "fast"},
    ],
)
def test_nothing_is_limited_where_nothing_says_so(tmp_path: Path, files: dict[str, str]):
    assert control_group_limits(tree(tmp_path, files)) == ControlGroupLimits(None, None, None)
