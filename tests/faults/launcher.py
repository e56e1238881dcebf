"""Commands in processes of their own, each forked from one that has loaded all libraries and done nothing else.

Loading them takes longer than the runs that are killed here, and writes nothing that a kill could damage.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

LIMIT = 300.0  # seconds
COMMAND = "from sheepop.cli.main import main; main()"

# Takes programs from a pipe until it is closed. Each runs in a child, which ends as Python ends: it leaves the loop by
# the exception that `sys.exit` raises, or by that of a fault.
SERVER = """
import json, os, sys
from importlib import import_module
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
for name in sys.argv[2:]:
    import_module(name)
while True:
    try:
        asked = json.loads(pipe.recv_bytes())
    except EOFError:
        break
    child = os.fork()
    if child == 0:
        pipe.close()
        for number, path in enumerate((os.devnull, asked["stdout"], asked["stderr"])):
            os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
        sys.argv = asked["arguments"]
        exec(asked["program"], {"__name__": "__main__"})
        sys.exit()
    pipe.send_bytes(json.dumps(child).encode())
    pipe.send_bytes(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
"""
LOADED = (
    "sheepop.cli.main",
    "sheepop.jobs.train",
    "matplotlib.backends.backend_agg",
    "plotly.graph_objects",
    "torch._inductor.config",
)


@dataclass(frozen=True)
class Ended:
    """How a process ended, its signal as a negative number, and what it said."""

    returncode: int
    stdout: str
    stderr: str


class Launcher:
    """Starts programs, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._said = (folder / "stdout", folder / "stderr")
        self._pipe, theirs = Pipe()
        number = theirs.fileno()
        self._server = subprocess.Popen([sys.executable, "-c", SERVER, str(number), *LOADED], pass_fds=(number,))
        theirs.close()

    def run(self, arguments: list[str], program: str = COMMAND, *, kill_after: float | None = None) -> Ended:
        """Runs `program` in a process with ``sys.argv[1:]`` = `arguments`, killed after so many seconds if asked."""
        for path in self._said:
            path.write_bytes(b"")
        stdout, stderr = map(str, self._said)
        asked = {"program": program, "arguments": ["-c", *arguments], "stdout": stdout, "stderr": stderr}
        self._pipe.send_bytes(json.dumps(asked).encode())
        child = _received(self._pipe)
        if not self._pipe.poll(LIMIT if kill_after is None else kill_after):
            with suppress(ProcessLookupError):  # it may end just now
                os.kill(child, signal.SIGKILL)
            assert kill_after is not None, f"no end after {LIMIT:.0f} seconds: {self._said[1].read_text()}"
        code = _received(self._pipe)
        return Ended(code, *(path.read_text() for path in self._said))

    def close(self) -> None:
        """Ends the process that the others come from."""
        self._pipe.close()
        self._server.wait(timeout=60)


def _received(pipe: Connection) -> int:
    return int(json.loads(pipe.recv_bytes()))
