"""A long-lived child process that answers requests within limits of time and memory, and ends with its parent.

Parent and child exchange JSON messages, each after its kind and length, over a separate socket, because libraries may
print. The child is never more than one message and a socket's buffer ahead of the parent.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import psutil

from sheepop.core import bounded_child as wire
from sheepop.core.errors import SheepOpError

_STARTUP_SECONDS = 120.0
_WATCH_SECONDS = 0.05
_DESCENDANTS_SECONDS = 1.0
_EXIT_SECONDS = 5.0
_STDERR_BYTES = 2**16
# One thread, and results that do not depend on the hash seed, the time zone or the locale.
_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    # Arrow's own pool reserves a gigabyte at once, which would count against the limit.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "TZ": "UTC",
}


class BoundedProcessError(SheepOpError):
    """A request to a bounded process was not answered in full."""


class TimeLimitError(BoundedProcessError):
    """No message came within the time limit; the process was killed."""


class MemoryLimitError(BoundedProcessError):
    """The process needed more memory than its limit; it was killed."""


class ProcessDiedError(BoundedProcessError):
    """The process ended by itself; `signal_number` is the signal that ended it, or 0 if it exited."""

    def __init__(self, message: str, signal_number: int = 0) -> None:
        super().__init__(message)
        self.signal_number = signal_number


class HandlerError(BoundedProcessError):
    """The handler in the process raised an exception; `kind` is its type's name, `detail` its text."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class BoundedProcess:
    """Answers requests in a child that runs ``python -m command_module``, a module that calls `serve`.

    `memory_bytes` limits the resident memory of the child and its descendants, and on Linux its data segment
    (``RLIMIT_DATA``). `seconds` limits the time until the next message while this process waits for one. The child
    starts with the first request, and again with the first request after it was killed.
    """

    def __init__(self, command_module: str, *, memory_bytes: int, seconds: float) -> None:
        self._module, self._memory_bytes, self._seconds = command_module, memory_bytes, seconds
        self._child: _Child | None = None
        self._busy = False

    @property
    def pid(self) -> int | None:
        """The process id of the child, or None if there is none."""
        return self._child.process.pid if self._child else None

    @property
    def requests(self) -> int:
        """The number of requests that the current child has answered."""
        return self._child.requests if self._child else 0

    def request(self, message: Any, seconds: float | None = None) -> Generator[Any, None, None]:
        """Sends `message` (JSON) and yields the answers as they arrive, within other `seconds` if they are given.

        Kills the child if its answers are not read to the end. Raises `TimeLimitError`, `MemoryLimitError`,
        `ProcessDiedError`, `HandlerError`, and ValueError for a message over 256 MiB.
        """
        if self._busy:
            raise RuntimeError("a bounded process answers one request at a time")
        child = self._started()
        self._busy, answered = True, False
        try:
            child.send(message)
            while True:
                kind, payload = child.receive(self._seconds if seconds is None else seconds)
                if kind == wire.END:
                    answered = True
                    return
                if kind == wire.FAILED:
                    answered = True
                    raise HandlerError(*wire.decode_message(payload))
                if kind != wire.ALIVE:
                    yield wire.decode_message(payload)
        finally:
            self._busy = False
            child.requests += 1
            # A child that has grown is replaced, so that earlier requests leave later ones enough memory.
            if not answered or _resident(child.process.pid) > self._memory_bytes // 2:
                self.close()

    def close(self) -> None:
        """Ends the child, if there is one."""
        if self._child is not None:
            self._child.end()
        self._child = None

    def __enter__(self) -> BoundedProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _started(self) -> _Child:
        # After a fork the child still belongs to the process that started it.
        if self._child is not None and self._child.owner != os.getpid():
            self._child = None
        if self._child is None or self._child.process.poll() is not None:
            self.close()
            self._child = _Child(self._module, self._memory_bytes)
            self._child.await_start()
        return self._child


class _Child:
    """A running child: its process, the socket to it, and the monitoring of its memory."""

    def __init__(self, module: str, memory_bytes: int) -> None:
        self.owner, self.requests = os.getpid(), 0
        self._memory_bytes = memory_bytes
        self._checked = self._checked_descendants = time.monotonic()
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), str(memory_bytes), str(self.owner)]
            # -P: a file in the working directory must not be imported as a module.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, **_ENVIRONMENT},
            )
        self.end = weakref.finalize(self, _end, self.process, self._socket, self.owner)
        self._socket.settimeout(_WATCH_SECONDS)

    def await_start(self) -> None:
        """Waits for the child's first message; raises `ProcessDiedError` with the last line of its standard error."""
        try:
            kind, _ = self.receive(_STARTUP_SECONDS)
        except BoundedProcessError as error:
            line = _last_line(self.process)
            self.end()
            raise ProcessDiedError(f"the process did not start: {line or error}") from None
        assert kind == wire.READY
        assert self.process.stderr is not None
        self.process.stderr.close()

    def send(self, message: Any) -> None:
        """Sends a request; if the child has died, `receive` raises the error."""
        self._socket.settimeout(_STARTUP_SECONDS)
        try:
            wire.send_message(self._socket, wire.REQUEST, message)
        except OSError:
            pass
        finally:
            self._socket.settimeout(_WATCH_SECONDS)

    def receive(self, seconds: float) -> tuple[bytes, bytes]:
        """Returns kind and content of the next message; raises if a limit is exceeded or the child has died."""
        deadline = time.monotonic() + seconds
        kind, length = wire.FRAME.unpack(self._read(wire.FRAME.size, deadline, seconds))
        if kind not in (wire.READY, wire.ITEM, wire.ALIVE, wire.END, wire.FAILED) or length > wire.LONGEST_MESSAGE:
            raise ProcessDiedError("the process sent something that is not a message")
        return kind, self._read(length, deadline, seconds)

    def _read(self, count: int, deadline: float, seconds: float) -> bytes:
        data = bytearray(count)
        view, filled = memoryview(data), 0
        while filled < count:
            try:
                received = self._socket.recv_into(view[filled:])
                if not received:
                    raise self._death()
                filled += received
            except TimeoutError:
                pass
            except ConnectionError:
                raise self._death() from None
            if time.monotonic() - self._checked >= _WATCH_SECONDS:
                # What has arrived is not late, even if this process was paused before it read it.
                self._check(deadline if filled < count else math.inf, seconds)
        return bytes(data)

    def _check(self, deadline: float, seconds: float) -> None:
        self._checked = time.monotonic()
        if self._checked >= deadline:
            raise TimeLimitError(f"it did not respond within {seconds:g} s")
        total = _resident(self.process.pid)
        if self._checked - self._checked_descendants >= _DESCENDANTS_SECONDS:
            self._checked_descendants = self._checked
            total += sum(map(_resident, descendants(self.process.pid)))
        if total > self._memory_bytes:
            raise self.memory_error()

    def memory_error(self) -> MemoryLimitError:
        """Returns the error for a child that needed more memory than its limit."""
        return MemoryLimitError(f"it needed more than {self._memory_bytes:,} bytes of memory")

    def _death(self) -> BoundedProcessError:
        """Returns the error that says why the child closed the connection."""
        try:
            code = self.process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return ProcessDiedError("the process closed its connection")
        if code == wire.MEMORY_STATUS:
            return self.memory_error()
        if code == -signal.SIGKILL:
            return MemoryLimitError("the system killed it (SIGKILL), most likely because memory ran out")
        if code < 0:
            names = {each.value: each.name for each in signal.Signals}
            return ProcessDiedError(f"the process was ended by {names.get(-code, f'signal {-code}')}", -code)
        return ProcessDiedError(f"the process ended with exit status {code}")


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    """Kills the child and its descendants, and waits for it so that no zombie remains."""
    connection.close()
    if process.stderr is not None:
        process.stderr.close()
    # A forked copy of the owner must not end the owner's child.
    if os.getpid() != owner:
        return
    others = descendants(process.pid) if process.poll() is None else []
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for other in others:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(other, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """The ids of all processes that a process started, directly or not; none if it is gone."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _last_line(process: subprocess.Popen[bytes]) -> str:
    """Returns the last line of a child's standard error without waiting, because others may keep the pipe open."""
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    text = (process.stderr.read(_STDERR_BYTES) or b"").decode("utf-8", "replace")
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()
