"""A Ray cluster of two nodes on this machine, none of whose processes outlives the tests that use it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

NODE = {"num_cpus": 1, "object_store_memory": 2**27, "include_dashboard": False, "include_log_monitor": False}
NODE |= {"no_monitor": True}  # of what scales clusters


@contextmanager
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes of one core each; at the end none of its processes is left."""
    from ray.cluster_utils import Cluster

    # Its sockets lie in this folder, and the path of a socket may have few characters.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as place,
        pytest.MonkeyPatch.context() as patch,
    ):
        # By this their own children are known too.
        patch.setenv("RAY_SHEEPOP_TEST", place)
        # Where the address of a cluster is written down, in a folder that is not made for it.
        patch.setenv("RAY_TMPDIR", place)
        (Path(place) / "ray").mkdir()
        cluster = Cluster(initialize_head=False)
        try:
            cluster.add_node(**NODE, temp_dir=place)
            cluster.add_node(**NODE)
            cluster.wait_for_nodes(timeout=60)
            yield cluster
        finally:
            cluster.shutdown()
            for process in processes_of(place):
                process.kill()
            _, alive = psutil.wait_procs(processes_of(place), timeout=20)
            assert not alive


def processes_of(place: str | None = None) -> list[psutil.Process]:
    """The processes that were started on behalf of the cluster whose files are in `place`, by what they were told."""
    place = place or os.environ["RAY_SHEEPOP_TEST"]
    found = []
    for process in psutil.process_iter():
        try:
            told = [*process.cmdline(), process.environ().get("RAY_SHEEPOP_TEST", "")]
        except psutil.Error:
            continue
        if process.pid != os.getpid() and any(place in word for word in told):
            found.append(process)
    return found
