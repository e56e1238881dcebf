"""The inner side of a `Sandbox`: shuts itself in, then runs a program and its tests. Imports nothing of ours.

It stands alone because inside there is only Python's own library. Processes: with ``namespaces`` this one makes them
and waits outside; the first process inside does nothing but reap, since all others die with it, and so that no signal
of theirs reaches it; the second one runs the program.
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
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

HEADER = struct.Struct(">I")
TOKEN_BYTES = 16
STARTED = b"R"
MEMORY_STATUS = 97
DEVICES = ("null", "zero", "full", "random", "urandom")
_MOST_FILES = 64
_MOST_INODES = 4096  # they take memory of the kernel's
_NOBODY = 65534

# linux/sched.h: namespaces of mounts, control groups, host name, IPC, users, processes, network.
_NEW_USER = 0x10000000
_NEW_ALL = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_PRIVATE, _RECURSIVE, _BIND, _NOSUID, _NODEV, _DETACH = 1 << 18, 1 << 14, 1 << 12, 2, 4, 2  # linux/mount.h
_MOUNT_SETATTR, _HERE, _SET_RECURSIVE, _SET_READ_ONLY, _SET_NOSUID = 442, -100, 0x8000, 1, 2
_SET_DEATH_SIGNAL, _SECCOMP, _NO_NEW_PRIVILEGES = 1, 22, 38  # linux/prctl.h

# Calls that no program needs, by the processor's numbers: what shows or changes other processes and mounts, makes
# namespaces or connections (some kinds know no namespace), keeps keys, or takes memory that no limit counts.
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_FORBIDDEN = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "socket": (41, 198),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
}
_CLONE, _CLONE3 = (56, 220), 435
_X32 = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Reads what to do from the socket whose number is the argument, and does it."""
    descriptor = int(sys.argv[1])
    (length,) = HEADER.unpack(_read(descriptor, HEADER.size))
    job = json.loads(_read(descriptor, length))
    if job["mounts"] is not None:
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        _enter_namespaces(job["uid"] is None)
        _mount(job["mounts"], job["limits"]["tmp_bytes"])
    _drop_privileges(job["uid"])
    # Only now: a change of the user forgets it.
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
    """Runs both in one module; sends back the token, which lies unread in the socket until then."""
    status = 1
    try:
        module = ModuleType("program" if tests else "__main__")
        # What dataclasses and the like look up; not our own module, which is called __main__ too.
        sys.modules["__main__"] = sys.modules[module.__name__] = module
        texts = {"program.py": program, "tests.py": tests}
        for name, text in texts.items():  # so that a traceback shows the lines
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        # Both are compiled before either runs, so that no text of the program takes in the tests or changes them.
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
            os._exit(1)  # nobody waits for an answer
        data += piece
    return data


def _exit_as(process: int) -> NoReturn:
    """Waits for `process`, and for whatever it leaves behind until then, and exits with its status."""
    while True:
        ended, status = os.wait()
        if ended == process:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _enter_namespaces(as_ordinary_user: bool) -> None:
    """Returns in the first process of the new namespaces; this one only waits for it.

    Root needs no user namespace: it gives up what it is, for a user that the system has no other process of.
    """
    user, group = os.geteuid(), os.getegid()
    _require(_libc.unshare(_NEW_ALL | (_NEW_USER if as_ordinary_user else 0)), "unshare")
    if as_ordinary_user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{_NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{_NOBODY} {group} 1")
    first = os.fork()
    if first:
        _exit_as(first)


def _mount(mounts: list[tuple[str | None, str]], tmp_bytes: int) -> None:
    """A new root with ``(source, target)``, an empty directory where there is no source, devices and a small /tmp."""
    _mount_call("none", "/", None, _PRIVATE | _RECURSIVE)
    small = "size=1m,nr_inodes=1000,mode=755"
    _mount_call("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, small)
    old = Path("/tmp/old")
    old.mkdir()
    _require(_libc.pivot_root(b"/tmp", bytes(old)), "pivot_root")
    os.chdir("/")
    Path("/tmp").mkdir()
    _mount_call("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, f"size={tmp_bytes},nr_inodes={_MOST_INODES},mode=1777")
    Path("/dev").mkdir()
    for name in DEVICES:
        Path("/dev", name).touch()
        _mount_call(f"/old/dev/{name}", f"/dev/{name}", None, _BIND)
    for source, target in mounts:
        is_directory = source is None or Path(f"/old{source}").is_dir()
        (Path(target) if is_directory else Path(target).parent).mkdir(parents=True, exist_ok=True)
        if not is_directory:
            Path(target).touch()
        if source is None:
            _mount_call("tmpfs", target, "tmpfs", _NOSUID | _NODEV, small)
        else:
            _mount_call(f"/old{source}", target, None, _BIND | _RECURSIVE)
            _make_read_only(target, _SET_RECURSIVE)
    _require(_libc.umount2(b"/old", _DETACH), "umount")
    Path("/old").rmdir()
    for target in ("/", *(target for source, target in mounts if source is None)):
        _make_read_only(target, 0)
    os.chdir("/tmp")


def _mount_call(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _require(_libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def _make_read_only(target: str, flags: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(_SET_READ_ONLY | _SET_NOSUID)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    call = (ctypes.c_long(_MOUNT_SETATTR), ctypes.c_long(_HERE), os.fsencode(target), ctypes.c_long(flags))
    _require(_libc.syscall(*call, attributes, size), f"mount {target} read-only")


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
        (resource.RLIMIT_NPROC, limits["processes"] + 1),  # the first one counts, but is not the program's
        (resource.RLIMIT_FSIZE, limits["tmp_bytes"]),
        (resource.RLIMIT_NOFILE, _MOST_FILES),
        (resource.RLIMIT_CORE, 1),  # 0 would not keep the system from handing a core to its crash reporter
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _forbid_calls() -> None:
    """A seccomp filter: a forbidden call fails with EPERM, whatever else the system would allow."""
    architecture, column = ARCHITECTURES[os.uname().machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050001, 0x00050026  # the latter two with EPERM and ENOSYS
    rules = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, refuse), (load, 0, 0, 0)]
    rules += [(at_least, 0, 1, _X32), (give, 0, 0, refuse)]
    for numbers in _FORBIDDEN.values():
        rules += [(equal, 0, 1, numbers[column]), (give, 0, 0, refuse)]
    # A filter cannot read the flags of clone3; without it libraries take clone.
    rules += [(equal, 0, 1, _CLONE3), (give, 0, 0, unknown)]
    rules += [(equal, 0, 3, _CLONE[column]), (load, 0, 0, 16), (any_bit, 0, 1, _NEW_ALL | _NEW_USER)]
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
