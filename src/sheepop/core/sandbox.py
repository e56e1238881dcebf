"""Runs untrusted Python programs under bubblewrap, after a probe has proven that its isolation holds."""

from __future__ import annotations

import json
import os
import platform
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from sheepop.core import sandbox_child as inside
from sheepop.core.bounded import descendants
from sheepop.core.errors import UsageError

Outcome = Literal["passed", "failed", "timeout", "memory", "output", "crashed"]
_START_SECONDS = 60.0
_END_SECONDS = 10.0
_WATCH_SECONDS = 0.05
_READ_BYTES = 2**16
_FIRST_UNUSED_UID, _UNUSED_UIDS = 2_000_000_000, 100_000_000  # above those of users and containers
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/nix/store", "/gnu/store")
_HARNESS = "/sandbox_child.py"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": "2",
}
_TIME_IS_UP, _CRASHED = 128 + signal.SIGXCPU, 128
_NEEDS = "Programs of models run only in isolation, on Linux (x86_64 or aarch64) with bubblewrap."
_INSTALL = "Install it: apt-get install bubblewrap (Debian, Ubuntu), or dnf install bubblewrap (Fedora)."
_ALLOW = (
    "Allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 and "
    "kernel.apparmor_restrict_unprivileged_userns=0). In a container, run as an ordinary user and start the container "
    "with --security-opt seccomp=unconfined, or run as root and start it with --privileged."
)


class IsolationError(UsageError):
    """This machine cannot isolate a program, or the sandbox could not start it."""


@dataclass(frozen=True)
class Limits:
    """What a program and its tests may use together.

    `memory_bytes` bounds each process, and the sum over all processes, which is checked 20 times a second. `tmp_bytes`
    bounds the total size of files, `processes` the number of processes and threads, `output_bytes` what is printed.
    """

    seconds: float = 10.0
    memory_bytes: int = 2**30
    processes: int = 32
    tmp_bytes: int = 2**26
    output_bytes: int = 2**16

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise UsageError(f"limits: {name} = {value} must be above 0.")


@dataclass(frozen=True)
class Verdict:
    """How a program ended, the first `output_bytes` of stdout and stderr, and the seconds that it ran.

    ``passed``: program and tests ran to their end. ``failed``: an exception or an early exit. ``crashed``: a signal
    ended it. ``timeout``, ``memory`` and ``output``: it exceeded that limit.
    """

    outcome: Outcome
    output: str
    seconds: float


@dataclass(frozen=True)
class Sandbox:
    """Runs programs without network, with no files but Python's and the system's, and no processes but their own.

    Bubblewrap makes namespaces (mounts, processes, network, IPC, host name, control groups, and users if the caller is
    an ordinary user). `sandbox_child` drops all privileges, sets resource limits and installs a seccomp filter for
    what namespaces leave open. All processes are killed when the program ends or its time is up.

    ``passed`` proves that the program did not end early: after the tests, `sandbox_child` reads a token and sends it
    back. It does not prove that a program is honest, because program and tests share a process: one written against
    this sandbox can look for the token's socket, replace functions that the tests use, or return objects that equal
    everything. Such a program can pass; it cannot get out.
    """

    # (source, target) ordered by depth; None as source hides target under an empty directory.
    mounts: tuple[tuple[str | None, str], ...] = field(repr=False)

    @classmethod
    def find(cls) -> Sandbox:
        """Returns a sandbox after a probe program has failed to get out of it.

        Raises `IsolationError` with the reason and the remedy if this machine has none.
        """
        if sys.platform != "linux" or platform.machine() not in inside.ARCHITECTURES:
            raise IsolationError(
                f"{_NEEDS} This is {platform.system()} on {platform.machine()}, where it cannot be had. Use a Linux "
                "machine, or Linux in a virtual machine or container."
            )
        if shutil.which("bwrap") is None:
            raise IsolationError(f"{_NEEDS} bubblewrap is not installed. {_INSTALL}")
        sandbox = cls(_mounts())
        try:
            verdict = sandbox._probed()
        except IsolationError as error:
            raise IsolationError(f"{_NEEDS} bubblewrap does not work here: {error}. {_ALLOW}") from None
        if verdict.outcome != "passed":
            reason = (verdict.output.strip().splitlines() or [verdict.outcome])[-1]
            raise IsolationError(f"{_NEEDS} bubblewrap does not isolate here: {reason}. {_ALLOW}")
        return sandbox

    def run(self, program: str, *, tests: str = "", stdin: str = "", limits: Limits | None = None) -> Verdict:
        """Runs `program` and then `tests`, both Python source, in one module.

        Without tests the module is ``__main__``. Safe to call from several threads. Raises `IsolationError` if the
        program could not be started.
        """
        limits = limits or Limits()
        uid = _FIRST_UNUSED_UID + secrets.randbelow(_UNUSED_UIDS) if _is_root() else None
        job: dict[str, Any] = {"program": program, "tests": tests, "stdin": stdin, "limits": asdict(limits), "uid": uid}
        token, text = secrets.token_bytes(inside.TOKEN_BYTES), json.dumps(job).encode("ascii")
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = subprocess.Popen(
                    self._command(theirs.fileno(), limits, uid),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    cwd="/",
                    env=_ENVIRONMENT,
                )
            with process:
                try:
                    ours.settimeout(_START_SECONDS)
                    with suppress(OSError):  # it is gone already; its output says why
                        ours.sendall(inside.HEADER.pack(len(text)) + text + token)
                    return _watched(process, ours, limits, token)
                finally:
                    _kill(process)

    def _command(self, descriptor: int, limits: Limits, uid: int | None) -> list[str]:
        python = [os.path.realpath(sys.executable), "-P", "-s", "-S"]
        command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
        command += [f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup")]
        if uid is None:
            command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        else:  # sandbox_child changes to that user
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        command += ["--perms", "1777", "--size", str(limits.tmp_bytes), "--tmpfs", "/tmp"]
        for source, target in (*self.mounts, (str(Path(inside.__file__).resolve()), _HARNESS)):
            # Directories that bwrap makes on the way by itself can be entered by root only.
            command += [word for above in reversed(Path(target).parents[:-1]) for word in ("--dir", str(above))]
            command += ["--tmpfs", target] if source is None else ["--ro-bind", source, target]
        command += ["--dir", "/dev"]
        command += [word for name in inside.DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")]
        for target in ("/", *(target for source, target in self.mounts if source is None)):
            command += ["--remount-ro", target]
        return [*command, "--chdir", "/tmp", *python, _HARNESS, str(descriptor)]

    def _probed(self) -> Verdict:
        """The verdict on a program that fails if it finds a way out."""
        seen = [Path(target) for _, target in self.mounts]
        home = Path.home()
        allowed = {path.relative_to(home).parts[0] for path in seen if home in path.parents}
        with (
            tempfile.NamedTemporaryFile(prefix="sheepop-probe-") as secret,
            socket.create_server(("127.0.0.1", 0)) as server,
        ):
            Path(secret.name).chmod(0o644)
            port = server.getsockname()[1]
            facts = f"SECRET, PORT, HOME, ALLOWED, MOST = {secret.name!r}, {port}, {str(home)!r}, {allowed!r}, 8\n"
            return self.run(facts + _PROBE, limits=Limits(processes=8))


_PROBE = """
import os

def refused(attempt, what):
    try:
        attempt()
    except OSError:
        return
    raise SystemExit(what + " is not isolated")

refused(lambda: open(SECRET), "the directory for temporary files")
import signal, socket
refused(lambda: socket.create_connection(("127.0.0.1", PORT), 5), "the network")
for place in ("/", "/usr", "/dev"):
    refused(lambda: open(place + "/sheepop-probe", "w"), place)
found = set(os.listdir(HOME)) if HOME != "/" and os.path.isdir(HOME) else set()
if found - ALLOWED:
    raise SystemExit("the home directory is not isolated")
if hasattr(os, "unshare"):
    refused(lambda: os.unshare(os.CLONE_NEWUSER), "user namespaces")
if os.getpid() != 2 or os.getuid() == 0:
    raise SystemExit("processes are not isolated")
started = 0
try:
    while started <= MOST:
        if os.fork() == 0:
            signal.pause()
        started += 1
except OSError:
    pass
if started >= MOST:
    raise SystemExit("the number of processes is not bounded")
import ast, collections, dataclasses, decimal, functools, hashlib, heapq, itertools, json, math, random, re, typing
"""


def _watched(process: subprocess.Popen[bytes], connection: socket.socket, limits: Limits, token: bytes) -> Verdict:
    """Waits for the end of an isolated process, kills it if it exceeds a limit, and returns the verdict."""
    assert process.stdout is not None
    output, received = bytearray(), bytearray()
    begun: float | None = None
    over: Outcome | None = None
    seconds, created = 0.0, time.monotonic()
    looked = created
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout.fileno(), selectors.EVENT_READ, output)
        selector.register(connection.fileno(), selectors.EVENT_READ, received)
        while over is None and selector.get_map():  # until both are closed
            for key, _ in selector.select(_WATCH_SECONDS):
                try:
                    piece = os.read(key.fd, _READ_BYTES)
                except ConnectionResetError:  # it ended before it had read the job
                    piece = b""
                key.data.extend(piece)
                if not piece:
                    selector.unregister(key.fd)
            now = time.monotonic()
            if begun is None and received:
                begun = now
            seconds = now - (begun or now)
            if len(output) > limits.output_bytes or len(received) > _READ_BYTES:
                over = "output"
            elif seconds > limits.seconds or (begun is None and now - created > _START_SECONDS):
                over = "timeout"
            elif now - looked >= _WATCH_SECONDS:
                looked = now
                if sum(map(_memory, descendants(process.pid))) > limits.memory_bytes:
                    over = "memory"
    if over is not None:
        _kill(process)
    status = process.wait(_END_SECONDS)
    text = output[: limits.output_bytes].decode("utf-8", "replace")
    if begun is None:
        raise IsolationError(f"It could not start: {text.strip()[-1000:] or f'exit status {status}'}")
    return Verdict(over or _outcome(status, bytes(received) == inside.STARTED + token), text, seconds)


def _outcome(status: int, ran_to_the_end: bool) -> Outcome:
    if status == 0:
        return "passed" if ran_to_the_end else "failed"
    if status == inside.MEMORY_STATUS:
        return "memory"
    if status == _TIME_IS_UP:
        return "timeout"
    return "crashed" if status > _CRASHED or status < 0 else "failed"


def _mounts() -> tuple[tuple[str | None, str], ...]:
    """Mounts of the system's and Python's files; hides the home and the working directory if they lie among them."""
    shown = {path for path in (*_SYSTEM, sys.base_prefix, os.path.realpath(sys.base_prefix)) if Path(path).exists()}
    executable = Path(os.path.realpath(sys.executable))
    if not any(executable.is_relative_to(path) for path in shown):
        shown.add(str(executable))
    home = Path.home().resolve()
    if str(home) in shown or "/" in shown:
        raise IsolationError(
            f"Python's own directory {sys.base_prefix} contains the home directory {home}, which programs must not "
            "see. Install Python elsewhere."
        )
    mounts: list[tuple[str | None, str]] = [(os.path.realpath(path), path) for path in shown]
    for secret in {home, Path.cwd().resolve()}:
        above = [(Path(source), Path(target)) for source, target in mounts if source and Path(source) in secret.parents]
        mounts += [(None, str(target / secret.relative_to(source))) for source, target in above]
    return tuple(sorted(mounts, key=lambda mount: (len(Path(mount[1]).parts), mount[1])))


def _is_root() -> bool:
    """Whether this process is the system's root, not the root of a user namespace."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and its descendants."""
    for pid in descendants(process.pid) if process.poll() is None else []:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.kill()


def _memory(pid: int) -> int:
    """The proportional set size of a process in bytes, or its resident set size if that cannot be read."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        with suppress(psutil.AccessDenied):
            return int(process.memory_full_info().pss)
        return int(process.memory_info().rss)
    return 0
