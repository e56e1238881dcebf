"""The process inside a `Sandbox`: limits itself, then runs a program and its tests.

It imports only Python's own library, because a sandbox shows it nothing else. The first process does nothing but reap:
all others die with it, and their signals do not reach it. The second process runs the program.
"""

from __future__ import annotations

import ctypes
import json
import linecache
import os
import resource
import signal
import struct
import sys
import traceback
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, NoReturn

HEADER = struct.Struct(">I")
TOKEN_BYTES = 16
STARTED = b"R"
MEMORY_STATUS = 97
DEVICES = ("null", "zero", "full", "random", "urandom")
_MOST_FILES = 64

# linux/sched.h: the flags of clone for namespaces of mounts, control groups, host name, IPC, users, processes, network.
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_SET_DEATH_SIGNAL, _SECCOMP, _NO_NEW_PRIVILEGES = 1, 22, 38  # linux/prctl.h

# By architecture: its number for seccomp, and the column of its call numbers below.
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# System calls that no program needs: they show or change other processes and mounts, make namespaces or connections
# (a network namespace does not hold all kinds), keep keys, or take memory that no limit counts.
_FORBIDDEN = (
    (101, 117), (310, 270), (311, 271),  # ptrace, process_vm_readv, process_vm_writev
    (438, 438), (312, 272), (272, 97), (308, 268),  # pidfd_getfd, kcmp, unshare, setns
    (165, 40), (166, 39), (155, 41), (161, 51),  # mount, umount2, pivot_root, chroot
    (428, 428), (429, 429), (430, 430), (432, 432), (442, 442),  # open_tree, move_mount, fsopen, fsmount, mount_setattr
    (303, 264), (304, 265), (41, 198), (321, 280),  # name_to_handle_at, open_by_handle_at, socket, bpf
    (298, 241), (425, 425), (323, 282),  # perf_event_open, io_uring_setup, userfaultfd
    (248, 217), (249, 218), (250, 219),  # add_key, request_key, keyctl
    (319, 279), (447, 447), (29, 194),  # memfd_create, memfd_secret, shmget
)  # fmt: skip
_CLONE, _CLONE3 = (56, 220), 435
_X32 = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Reads a job from the socket whose file descriptor is the first argument, and runs it."""
    descriptor = int(sys.argv[1])
    (length,) = HEADER.unpack(_read(descriptor, HEADER.size))
    job = json.loads(_read(descriptor, length))
    _drop_privileges(job["uid"])
    # After the change of user, which clears it.
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    program = os.fork()
    if program:
        _exit_as(program)
    os.setsid()
    _open_stdin(job["stdin"])
    _become_limited(job["limits"])
    _forbid_calls()
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, _MOST_FILES)
    os.write(descriptor, STARTED)
    _run(job["program"], job["tests"], descriptor)


def _run(program: str, tests: str, descriptor: int) -> NoReturn:
    """Runs program and tests in one module, then reads the token from the socket and sends it back."""
    status = 1
    try:
        module = ModuleType("program" if tests else "__main__")
        # dataclasses looks its module up by name; __main__ must not be this file.
        sys.modules["__main__"] = sys.modules[module.__name__] = module
        texts = {"program.py": program, "tests.py": tests}
        for name, text in texts.items():  # so that tracebacks show source lines
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        # Both are compiled before either runs, so that the program can neither swallow the tests nor change them.
        codes = [compile(text, name, "exec", dont_inherit=True) for name, text in texts.items()]
        for code in codes:
            FunctionType(code, vars(module))()
        with suppress(Exception):
            sys.stdout.flush()
        os.write(descriptor, _read(descriptor, TOKEN_BYTES))
        status = 0
    except MemoryError:
        status = MEMORY_STATUS
    except BaseException as error:
        own = error.__traceback__
        traceback.print_exception(type(error), error, own and own.tb_next)
        sys.stdout.flush()
    finally:
        os._exit(status)


def _read(descriptor: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(descriptor, count - len(data))
        if not piece:
            os._exit(1)  # the parent is gone
        data += piece
    return data


def _exit_as(process: int) -> NoReturn:
    """Reaps children until `process` ends, then exits with its status."""
    while True:
        ended, status = os.wait()
        if ended == process:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _drop_privileges(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(_NO_NEW_PRIVILEGES, 1)
    version = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _require(_libc.capset(version, (ctypes.c_uint32 * 6)()), "capset")


def _become_limited(limits: dict[str, Any]) -> None:
    seconds = int(limits["seconds"]) + 1
    for kind, most in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NPROC, limits["processes"] + 1),  # the reaper counts too
        (resource.RLIMIT_FSIZE, limits["tmp_bytes"]),
        (resource.RLIMIT_NOFILE, _MOST_FILES),
        (resource.RLIMIT_CORE, 1),  # 0 would still pipe a core dump to the system's crash reporter
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _forbid_calls() -> None:
    """Installs a seccomp filter under which the forbidden calls fail with EPERM."""
    architecture, column = ARCHITECTURES[os.uname().machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050001, 0x00050026  # the last two fail with EPERM and ENOSYS
    rules = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, refuse), (load, 0, 0, 0)]
    rules += [(at_least, 0, 1, _X32), (give, 0, 0, refuse)]
    for numbers in _FORBIDDEN:
        rules += [(equal, 0, 1, numbers[column]), (give, 0, 0, refuse)]
    # A filter cannot read the flags of clone3; libraries fall back to clone when it fails with ENOSYS.
    rules += [(equal, 0, 1, _CLONE3), (give, 0, 0, unknown)]
    rules += [(equal, 0, 3, _CLONE[column]), (load, 0, 0, 16), (any_bit, 0, 1, _NEW_NAMESPACES)]
    rules += [(give, 0, 0, refuse), (give, 0, 0, allow)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    program = struct.pack("@HP", len(rules), ctypes.addressof(packed))
    _prctl(_SECCOMP, 2, ctypes.c_char_p(program))


def _open_stdin(text: str) -> None:
    file = os.memfd_create("stdin")
    with os.fdopen(os.dup(file), "wb") as writing:
        writing.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    os.dup2(file, 0)
    os.close(file)


def _prctl(option: int, *values: Any) -> None:
    padded = [*values, 0, 0, 0, 0][:4]
    _require(_libc.prctl(option, *(ctypes.c_ulong(v) if isinstance(v, int) else v for v in padded)), f"prctl {option}")


def _require(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
