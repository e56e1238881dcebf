"""Starting the ranks of a command on an existing engine: torchrun on one machine, Slurm, or Ray."""

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from sheepop.core.console import Console
from sheepop.core.errors import RanksError, UsageError

_PORT = 29500
_SIGNALS = "SIGTERM,SIGHUP,SIGUSR1"  # that are handed on to the ranks
_WARNED_SECONDS = 120  # before the end of a Slurm job


@dataclass(frozen=True)
class Launch:
    """A command of ``sheepop`` that `processes` ranks run on each of `machines`, anew up to `restarts` times."""

    command: Sequence[str]
    processes: int
    machines: int = 1
    restarts: int = 0
    has_gpus: bool = False

    def torchrun(self, *rendezvous: str) -> list[str]:
        """The words that start the ranks of one machine."""
        count = ["--nproc-per-node", str(self.processes), "--max-restarts", str(self.restarts)]
        return ["torchrun", *rendezvous, *count, "-m", "sheepop", *self.command]

    def local(self) -> str:
        """What to type to start all ranks on one machine."""
        return shlex.join(self.torchrun("--standalone"))

    def slurm(self) -> str:
        """A batch script for Slurm: one torchrun a machine, which find each other on the first one."""
        # Slurm sends signals to torchrun alone; a warning that the job ends has to reach every rank.
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


def _leave_the_first_to_the_ranks(console: Console) -> None:
    """A terminal sends Ctrl-C to the ranks too, which save; only a second one ends this process."""
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGINT)

    def once(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        console.info("The ranks save and end. Ctrl-C again ends them at once.")

    signal.signal(signal.SIGINT, once)


class _Restarts(logging.Handler):
    """Says when the agent begins anew."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Hears what the agent logs."""
        if "attempts left" in str(record.msg):
            self._console.warn("A rank was lost. All of them begin anew and go on from the last checkpoint.")


def run_on_this_machine(launch: Launch, console: Console) -> int:
    """Runs the ranks with torch's elastic agent until they end; the exit code of the first that failed, else 0.

    A signal that ends this process is handed to them, and they save before they go.
    """
    _leave_the_first_to_the_ranks(console)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.processes)))
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The rank that failed says why; of what the agent says in its own words only a restart is news.
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


def submit_to_slurm(launch: Launch) -> str:
    """Hands the script to ``sbatch``; what that says, such as the number of the job."""
    if shutil.which("sbatch") is None:
        raise UsageError("This machine has no sbatch. Use --print to see the script, and submit it where Slurm is.")
    done = subprocess.run(["sbatch"], input=launch.slurm(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"sbatch refused the script: {done.stderr.strip()}")
    return done.stdout.strip()
