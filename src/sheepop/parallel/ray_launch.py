"""Starting the ranks of a command on a Ray cluster: an actor for each, wherever the cluster has room."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sheepop.core.cluster import ray_cluster
from sheepop.core.errors import ENDINGS, SheepOpError, UsageError
from sheepop.parallel.launch import Launch

_ENDING_SECONDS = 30
_PLACING_SECONDS = 120


class RankProcess:
    """One rank: a process on the machine that Ray has chosen for it."""

    def place(self) -> tuple[str, int]:
        """Where others can meet this one: its address and a port that is free."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as server:
            return address, server.getsockname()[1]

    def run(self, command: list[str], directory: str, variables: dict[str, str]) -> Iterator[tuple[int, bytes]]:
        """Runs the command; gives pairs of the stream, 1 or 2, and a line of it, and in the end (0, exit code)."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sheepop", *command],
            cwd=directory,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield 1, line
        yield 0, str(self.process.wait()).encode()

    def stop(self, number: int) -> None:
        """Sends the process a signal, and ends it when it does not end by itself."""
        self.process.send_signal(number)
        try:
            self.process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()


def run_on_ray(launch: Launch) -> int:
    """Runs the ranks on the cluster until they end, anew when one is lost; the exit code of the first that failed.

    All machines need this program and the files at the same paths.
    """
    with ray_cluster(UsageError):
        for attempt in range(launch.restarts + 1):
            code = _attempt(launch, attempt)
            # Settings or data that cannot be used stay so, and who sent a signal wanted the end.
            if code in (0, 2, 3) or code in ENDINGS:
                break
    return code


def _attempt(launch: Launch, attempt: int) -> int:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    size = launch.processes * launch.machines
    bundle = {"CPU": 1, **({"GPU": 1} if launch.has_gpus else {})}
    group = placement_group([bundle] * size)
    if not group.wait(_PLACING_SECONDS):
        remove_placement_group(group)
        raise SheepOpError(f"The Ray cluster has no room for {size} ranks, each with {bundle}.")
    ranks = [
        ray.remote(RankProcess)
        .options(
            num_cpus=1,
            num_gpus=bundle.get("GPU", 0),
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        )
        .remote()
        for rank in range(size)
    ]
    codes: dict[int, int] = {}
    ended = threading.Event()
    try:
        address, port = ray.get(ranks[0].place.remote())
        for rank, actor in enumerate(ranks):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": "0",  # Ray shows an actor the one GPU that is its own
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
            }
            lines = actor.run.options(num_returns="streaming").remote(list(launch.command), str(Path.cwd()), variables)
            threading.Thread(target=_follow, args=(rank, lines, codes, size, ended), daemon=True).start()
        ended.wait()
    finally:
        _stop(ranks, codes)
        remove_placement_group(group)
    return next((code if code >= 0 else 128 - code for code in codes.values() if code), 0)


def _follow(rank: int, lines: Any, codes: dict[int, int], size: int, ended: threading.Event) -> None:
    """Hands on what a rank says; sets `ended` when it fails, or is the last to end."""
    import ray
    from ray.exceptions import RayError

    code = 1
    try:
        for reference in lines:
            stream, line = ray.get(reference)
            if stream:
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
            else:
                code = int(line)
    except RayError:
        sys.stderr.write(f"Rank {rank} was lost.\n")
    codes[rank] = code
    if code or len(codes) == size:
        ended.set()


def _stop(ranks: list[Any], codes: dict[int, int]) -> None:
    import ray
    from ray.exceptions import RayError

    waiting = [actor.stop.remote(int(signal.SIGTERM)) for rank, actor in enumerate(ranks) if rank not in codes]
    for reference in waiting:
        try:
            ray.get(reference, timeout=2 * _ENDING_SECONDS)
        except RayError:
            continue
    for actor in ranks:
        ray.kill(actor)
