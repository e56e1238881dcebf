"""Starts the ranks of a command: torch's elastic agent on one machine, a batch script for Slurm, or actors of Ray."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from sheepop.core.cluster import ray_cluster
from sheepop.core.console import Console
from sheepop.core.errors import ENDINGS, RanksError, SheepOpError, UsageError

_PORT = 29500
_SIGNALS = "SIGTERM,SIGHUP,SIGUSR1"  # forwarded to the ranks
_WARNED_SECONDS = 120  # before the end of a Slurm job
_ENDING_SECONDS = 30
_PLACING_SECONDS = 120


@dataclass(frozen=True)
class Launch:
    """A command of ``sheepop`` for `processes` ranks on each of `machines`, restarted up to `restarts` times."""

    command: Sequence[str]
    processes: int
    machines: int = 1
    restarts: int = 0
    has_gpus: bool = False

    def torchrun(self, *rendezvous: str) -> list[str]:
        """Returns the command line that starts the ranks of one machine."""
        count = ["--nproc-per-node", str(self.processes), "--max-restarts", str(self.restarts)]
        return ["torchrun", *rendezvous, *count, "-m", "sheepop", *self.command]

    def local(self) -> str:
        """Returns the shell command that starts all ranks on one machine."""
        return shlex.join(self.torchrun("--standalone"))

    def slurm(self) -> str:
        """Returns a batch script for Slurm: one torchrun per machine, with the rendezvous on the first machine."""
        # Slurm signals torchrun alone, and the warning before the end of a job has to reach every rank.
        signals = ("--signals-to-handle", f"SIGINT,{_SIGNALS}")
        ranks = shlex.join(self.torchrun("--nnodes", str(self.machines), "--rdzv-backend", "c10d", *signals))
        found = '--rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head"'
        gpus = [f"#SBATCH --gpus-per-node={self.processes}"] if self.has_gpus else []
        lines = [
            "#!/bin/bash",
            "#SBATCH --job-name=sheepop",
            f"#SBATCH --nodes={self.machines}",
            "#SBATCH --ntasks-per-node=1",
            *gpus,
            f"#SBATCH --signal=USR1@{_WARNED_SECONDS}",
            "",
            "set -euo pipefail",
            f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
            f'head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{_PORT}"',
            f"srun {ranks.replace(' --nproc-per-node', f' {found} --nproc-per-node', 1)}",
        ]
        return "\n".join(lines) + "\n"


class _Restarts(logging.Handler):
    """Warns on the console when the agent restarts the ranks."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if "attempts left" in str(record.msg):
            self._console.warn("A rank was lost. All of them start again and continue from the last checkpoint.")


def run_on_this_machine(launch: Launch, console: Console) -> int:
    """Runs the ranks with torch's elastic agent until they end; returns the first failure's exit code, else 0.

    A signal that ends this process is forwarded to them, and they save before they end.
    """
    _leave_the_first_to_the_ranks(console)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.processes)))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The rank that failed says why; of the agent's own messages only a restart is news.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    agent = logging.getLogger("torch.distributed.elastic.agent.server.api")
    agent.handlers, agent.propagate = [_Restarts(console)], False
    agent.setLevel(logging.INFO)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=launch.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=launch.restarts,
        signals_to_handle=_SIGNALS,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "sheepop", *launch.command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return int(failure.exitcode)
        name = signal.Signals(-failure.exitcode).name
        remedy = "The run goes on from its last checkpoint with the same command and --resume auto."
        if launch.command[0] != "train":
            remedy = "Start the command again."
        raise RanksError(f"Rank {rank} was ended by {name}, and the others with it. {remedy}") from None
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _leave_the_first_to_the_ranks(console: Console) -> None:
    """Ignores the first Ctrl-C, because the ranks get it too, save and end; a second one ends this process."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGINT)

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        console.info("The ranks save and end. Press Ctrl-C again to end them at once.")

    signal.signal(signal.SIGINT, once)


def submit_to_slurm(launch: Launch) -> str:
    """Submits the script with ``sbatch`` and returns its output, such as the number of the job."""
    if shutil.which("sbatch") is None:
        raise UsageError("This machine has no sbatch. Use --print to see the script, and submit it where Slurm is.")
    done = subprocess.run(["sbatch"], input=launch.slurm(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"sbatch refused the script: {done.stderr.strip()}")
    return done.stdout.strip()


class RankProcess:
    """A Ray actor for one rank: it runs the rank's process on the machine that Ray has chosen."""

    def place(self) -> tuple[str, int]:
        """Hosts the store of the ranks until this actor ends; returns this machine's address and the store's port."""
        import ray
        from torch._C._distributed_c10d import TCPStore

        address: str = ray.util.get_node_ip_address()
        # A port that is only looked up may be another program's by the time the first rank has loaded its libraries.
        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def run(self, command: list[str], directory: str, variables: dict[str, str]) -> Iterator[tuple[int, bytes]]:
        """Runs the command; yields (1, line) for each line of its output, and at the end (0, exit code)."""
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
        """Sends the process a signal, and kills it if it does not end in time."""
        self.process.send_signal(number)
        try:
            self.process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()


def run_on_ray(launch: Launch) -> int:
    """Runs the ranks on the cluster until they end, and again if one is lost; returns the first failure's exit code.

    All machines need this program and the files at the same paths.
    """
    with ray_cluster(UsageError):
        for attempt in range(launch.restarts + 1):
            code = _attempt(launch, attempt)
            # Unusable settings or data do not change, and a signal was sent to end the run.
            if code in (0, 2, 3) or code in ENDINGS:
                break
    return code


def _attempt(launch: Launch, attempt: int) -> int:
    import ray
    from ray.exceptions import RayError
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
                "LOCAL_RANK": "0",  # Ray shows an actor only its own GPU
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
            }
            lines = actor.run.options(num_returns="streaming").remote(list(launch.command), str(Path.cwd()), variables)
            threading.Thread(target=_follow, args=(rank, lines, codes, size, ended), daemon=True).start()
        ended.wait()
    finally:
        running = [actor for rank, actor in enumerate(ranks) if rank not in codes]
        for stopping in [actor.stop.remote(int(signal.SIGTERM)) for actor in running]:
            with suppress(RayError):
                ray.get(stopping, timeout=2 * _ENDING_SECONDS)
        for actor in ranks:
            ray.kill(actor)
        remove_placement_group(group)
    return next((code if code >= 0 else 128 - code for code in codes.values() if code), 0)


def _follow(rank: int, lines: Any, codes: dict[int, int], size: int, ended: threading.Event) -> None:
    """Prints a rank's output; sets `ended` when the rank fails, or is the last to end."""
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
