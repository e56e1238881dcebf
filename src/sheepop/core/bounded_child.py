"""The child's side of a `BoundedProcess`: sets its own limits, receives requests and streams answers."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# The head of a message: its kind and the length of the JSON that follows.
FRAME = struct.Struct(">cI")
LONGEST_MESSAGE = 2**28
READY, REQUEST, ITEM, ALIVE, END, FAILED = b"R", b"Q", b"I", b"A", b"E", b"F"
MEMORY_STATUS = 97
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_DETAIL_CHARACTERS = 1000

Alive = Callable[[], None]
Handler = Callable[[Any, Alive], Iterable[Any]]


def serve(handler: Handler) -> None:
    """Answers requests until the parent is gone; ``handler(request, alive)`` yields the answers, and all are JSON.

    Call it in a module that a `BoundedProcess` runs. A handler can call ``alive()`` while it works on a long answer to
    restart the time limit. The parent gets its exceptions as `HandlerError`, and MemoryError as `MemoryLimitError`.
    """
    descriptor, memory_bytes, parent = map(int, sys.argv[1:4])
    connection = socket.socket(fileno=descriptor)
    end_with(parent, descriptor)
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # other systems do not count mapped memory
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    # Nobody reads standard error from now on, and a full pipe would block libraries that write there.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        _reply(connection, READY, None)
        while (request := _receive(connection)) is not None:
            _answer(connection, handler, decode_message(request))
    except MemoryError:
        # There is no memory left for a message.
        os._exit(MEMORY_STATUS)


def send_message(connection: socket.socket, kind: bytes, message: Any) -> None:
    """Sends one message; raises ValueError if it is over 256 MiB."""
    # JSON escapes can represent lone surrogates, which file names have for bytes that are not UTF-8. Not orjson: it
    # crashes if memory runs out.
    data = json.dumps(message).encode("ascii")
    if len(data) > LONGEST_MESSAGE:
        raise ValueError(f"a message of {len(data):,} bytes is over the limit of {LONGEST_MESSAGE:,}")
    connection.sendall(FRAME.pack(kind, len(data)))
    connection.sendall(data)


def decode_message(data: bytes) -> Any:
    """Decodes the bytes of a message from `send_message`."""
    return json.loads(data)


def leave_the_network() -> None:
    """Moves this process into an empty network namespace, if the system allows it."""
    try:
        unshare = ctypes.CDLL(None, use_errno=True).unshare
    except (OSError, AttributeError):  # not Linux
        return
    user, group = os.getuid(), os.getgid()
    if unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _answer(connection: socket.socket, handler: Handler, request: Any) -> None:
    try:
        for item in handler(request, lambda: _reply(connection, ALIVE, None)):
            _reply(connection, ITEM, item)
    except MemoryError:
        raise
    except Exception as error:
        _reply(connection, FAILED, [type(error).__name__, str(error)[:_DETAIL_CHARACTERS]])
    else:
        _reply(connection, END, None)


def _reply(connection: socket.socket, kind: bytes, message: Any) -> None:
    try:
        send_message(connection, kind, message)
    except OSError:
        os._exit(1)  # the parent is gone


def _receive(connection: socket.socket) -> bytes | None:
    """Returns the content of the next request, or None if the parent has closed the connection."""
    header = _read(connection, FRAME.size)
    return None if header is None else _read(connection, FRAME.unpack(header)[1])


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        received = connection.recv(min(count - len(data), 2**20))
        if not received:
            return None
        data += received
    return bytes(data)


def end_with(parent: int, descriptor: int) -> None:
    """Makes this process end when the parent is gone, even if the parent was killed.

    `descriptor` is a connection of which the parent alone holds the other end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_end_when_closed, args=(descriptor,), daemon=True).start()


def _end_when_closed(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)  # only the end of the connection
    poll.poll()
    os._exit(1)
