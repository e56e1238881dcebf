"""Programs that try to get out of the sandbox, to outlive it, to use up the machine, or to pass without being right."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from sheepop.core.errors import UsageError
from sheepop.core.sandbox import IsolationError, Limits, Sandbox, Verdict

SECRET = "the-secret-of-this-test"
SMALL = Limits(seconds=20.0, memory_bytes=2**28, processes=16, tmp_bytes=2**22, output_bytes=2**14)
# Calls by number, on this processor; a refused one raises.
CALL = """
import ctypes, errno, os, platform
LIBC = ctypes.CDLL(None, use_errno=True)
def call(x86, arm, *values):
    values = [ctypes.c_long(v) if isinstance(v, int) else v for v in values]
    if LIBC.syscall(ctypes.c_long(x86 if platform.machine() == "x86_64" else arm), *values) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""


@dataclass(frozen=True)
class Attempt:
    """A program, how it has to end, and what it has to say then (an error's name, so that it failed by that)."""

    program: str
    outcome: str
    says: str = ""
    tests: str = "pass"


REFUSED = "PermissionError"
ABSENT = "FileNotFoundError"
ATTEMPTS = {
    "a fork bomb": Attempt("import os\nwhile True: os.fork()", "failed", "BlockingIOError"),
    "a fork bomb that goes on": Attempt("import os\nwhile True:\n try: os.fork()\n except OSError: pass", "timeout"),
    "a bomb of threads": Attempt(
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,)).start()", "failed", "thread"
    ),
    "allocates 100 GB": Attempt("bytearray(100 * 2**30)", "memory"),
    "grows and grows": Attempt("x = []\nwhile True: x.append(bytearray(2**20))", "memory"),
    "many processes that take memory together": Attempt(
        "import os, time\nfor i in range(6):\n if os.fork() == 0: x = b'x' * 10**8; time.sleep(9)\ntime.sleep(9)",
        "memory",
    ),
    "memory in a file without a name": Attempt("import os\nos.memfd_create('x')", "failed", REFUSED),
    "memory shared with nobody": Attempt(CALL + "call(29, 194, 0, 2**30, 0o1600)", "failed", REFUSED),
    "prints forever": Attempt("while True: print('x' * 1000)", "output", "xxx"),
    "complains forever": Attempt("import sys\nwhile True: sys.stderr.write('y' * 1000)", "output", "yyy"),
    "never ends": Attempt("while True: pass", "timeout"),
    "sleeps and ignores all signals": Attempt(
        "import signal, time\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\ntime.sleep(99)",
        "timeout",
    ),
    "waits for input": Attempt("input()", "failed", "EOFError"),
    "reads the passwords": Attempt("open('/etc/shadow')", "failed", ABSENT),
    "reads a file of the user's": Attempt("open(FILE)", "failed", ABSENT),
    "reads the home directory": Attempt("open(HOME + '/.ssh/id_rsa')", "failed", ABSENT),
    "reads the working directory": Attempt("import os\nos.chdir(HERE)", "failed", ABSENT),
    "reads a file by a link": Attempt("import os\nos.symlink(FILE, 'x')\nopen('x')", "failed", ABSENT),
    "reads a file by a way up": Attempt("open('../' * 20 + FILE.lstrip('/'))", "failed", ABSENT),
    "opens what it was not given": Attempt(
        CALL + "call(303, 264, -100, b'/usr', ctypes.create_string_buffer(256), ctypes.byref(ctypes.c_int()), 0)",
        "failed",
        REFUSED,
    ),
    "reads the environment": Attempt(
        "import os\nassert not [v for v in os.environ.values() if 'secret' in v]", "passed"
    ),
    "reads the parent's environment": Attempt("open(f'/proc/{PARENT}/environ')", "failed", ABSENT),
    "lists processes": Attempt("import os\nos.listdir('/proc')", "failed", ABSENT),
    "connects to a server of this machine": Attempt(
        "import socket\nsocket.create_connection(('127.0.0.1', PORT)).send(b'out')", "failed", REFUSED
    ),
    "connects by a name that is no file": Attempt(
        "import socket\nsocket.socket(socket.AF_UNIX).connect(ABSTRACT)", "failed", REFUSED
    ),
    "connects to the machine's host": Attempt(
        "import socket\nsocket.socket(40, socket.SOCK_STREAM).connect((2, 1024))", "failed", REFUSED
    ),
    "sends a datagram": Attempt(
        "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', PORT))", "failed", REFUSED
    ),
    "kills its parent": Attempt("import os\nos.kill(PARENT, 9)", "failed", "ProcessLookupError"),
    "kills all processes": Attempt("import os\nos.kill(1, 9)\ntry: os.kill(-1, 9)\nexcept OSError: pass", "passed"),
    "kills its group": Attempt("import os\nos.kill(0, 9)", "crashed"),
    "stops its own reaper": Attempt("import os\nos.kill(1, 19)\nos.kill(1, 2)\nos.kill(1, 15)", "passed"),
    "attaches to a process": Attempt(CALL + "call(101, 117, 16, 1, 0, 0)", "failed", REFUSED),
    "reads a process's memory": Attempt(CALL + "call(310, 270, 1, 0, 0, 0, 0, 0)", "failed", REFUSED),
    "writes to the system": Attempt("open('/usr/bin/sheepop-was-here', 'w')", "failed", "Error: [Errno"),
    "writes to the root": Attempt("open('/sheepop-was-here', 'w')", "failed", "Error: [Errno"),
    "writes to devices": Attempt("open('/dev/sheepop-was-here', 'w')", "failed", "Error: [Errno"),
    "writes to a file of the user's": Attempt("open(FILE, 'w').write('mine')", "failed", ABSENT),
    "changes Python itself": Attempt("import os\nos.remove(os.__file__)", "failed", "Error: [Errno"),
    "changes what runs it": Attempt("import os, sys\nos.chmod('/usr', 0o777)", "failed", "Error: [Errno"),
    "fills the disk": Attempt("f = open('x', 'wb')\nwhile True: f.write(bytes(2**20))", "failed", "OSError"),
    "fills the disk with files": Attempt(
        "for i in range(99): open(f'x{i}', 'wb').write(bytes(2**20))", "failed", "No space left"
    ),
    "mounts": Attempt(CALL + "call(165, 40, b'none', b'/tmp', b'tmpfs', 0, None)", "failed", REFUSED),
    "makes a user namespace": Attempt(CALL + "call(272, 97, 0x10000000)", "failed", REFUSED),
    "makes a network namespace by clone": Attempt(CALL + "call(56, 220, 0x40000011, 0, 0, 0, 0)", "failed", REFUSED),
    "makes a namespace by clone3": Attempt(CALL + "call(435, 435, 0, 0)", "failed", "Function not implemented"),
    "changes its root": Attempt("import os\nos.chroot('/tmp')", "failed", REFUSED),
    "makes a device": Attempt(
        "import os, stat\nos.mknod('d', stat.S_IFBLK | 0o600, os.makedev(8, 0))", "failed", REFUSED
    ),
    "becomes root": Attempt("import os\nos.setuid(0)", "failed", "Error: [Errno"),
    "becomes root by a program": Attempt(
        "import os, shutil\nshutil.copy('/bin/sh', 's')\nos.chmod('s', 0o4755)\n"
        "assert os.spawnv(os.P_WAIT, 's', ['s', '-c', '[ $(id -u) = 0 ]']) == 0",
        "failed",
        "AssertionError",
    ),
    "raises its limits": Attempt(
        "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))", "failed", "ValueError"
    ),
    "reads the keys of the kernel": Attempt(CALL + "call(250, 219, 0, -3, 0)", "failed", REFUSED),
    "uses another way into the kernel": Attempt(
        CALL + "call(425, 425, 1, ctypes.create_string_buffer(120))", "failed", REFUSED
    ),
    "exits before its tests": Attempt("import sys\nsys.exit(0)", "failed", "SystemExit"),
    "exits at once before its tests": Attempt("import os\nos._exit(0)", "failed"),
    "exits within its tests": Attempt("import os\ndef f(): os._exit(0)", "failed", tests="assert f() == 1"),
    "becomes another program": Attempt("import os\nos.execv('/bin/true', ['true'])", "failed"),
    "ends by a signal": Attempt("import os\nos.kill(os.getpid(), 15)", "crashed"),
    "takes the tests in as a text": Attempt('f = """', "failed", "SyntaxError", 'assert f == 1 # """'),
    "changes what tests use": Attempt(
        "import builtins, os, sys\nbuiltins.AssertionError = None\n"
        "os._exit = sys.exit = builtins.compile = os.write = lambda *a: None\nsys.excepthook = None",
        "failed",
        "AssertionError",
        "assert 1 == 2",
    ),
    "changes the tests in the memory of lines": Attempt(
        "import linecache\nlinecache.cache['tests.py'] = (4, None, ['pass'], 'tests.py')",
        "failed",
        "AssertionError",
        "assert 1 == 2",
    ),
    "guesses the token": Attempt(
        "import os\nfor n in range(3, 64):\n try: os.write(n, b'R' * 17)\n except OSError: pass\nos._exit(0)", "failed"
    ),
    "handles the signal of its failure": Attempt(
        "import atexit, os, signal\natexit.register(os._exit, 0)\nsignal.signal(14, lambda *a: os._exit(0))",
        "failed",
        "AssertionError",
        "import signal\nsignal.alarm(0)\nassert 1 == 2",
    ),
    "recurses deeply": Attempt(
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return sorted([0], key=f)\nf(0)", "crashed|failed|memory"
    ),
    "reads address 0": Attempt("import ctypes\nctypes.string_at(0)", "crashed"),
}


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox.find()
    except IsolationError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class World:
    """What lies outside, and must be as it was when a program has run."""

    facts: str
    bystander: subprocess.Popen[bytes]
    servers: tuple[socket.socket, ...]
    file: Path

    def check(self) -> None:
        assert self.bystander.poll() is None
        assert self.file.read_text() == SECRET
        assert not Path("/usr/bin/sheepop-was-here").exists()
        for server in self.servers:
            with pytest.raises(BlockingIOError):
                server.recv(1) if server.type == socket.SOCK_DGRAM else server.accept()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    file = tmp_path_factory.mktemp("user") / "diary.txt"
    file.write_text(SECRET)
    for path in (file, *file.parents[:4]):  # nothing but the sandbox keeps anyone from reading it
        if path.owner() == Path(file).owner() and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0))
    name = f"\0sheepop-{uuid.uuid4()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(type=socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as abstract,
        subprocess.Popen(["sleep", "600"]) as bystander,
        pytest.MonkeyPatch.context() as patch,
    ):
        udp.bind(tcp.getsockname())
        abstract.bind(name)
        abstract.listen()
        for server in (tcp, udp, abstract):
            server.setblocking(False)
        patch.setenv("SHEEPOP_TEST", SECRET)
        facts = {"FILE": str(file), "HOME": str(Path.home()), "HERE": str(Path.cwd()), "PARENT": os.getpid()}
        facts |= {"PORT": tcp.getsockname()[1], "ABSTRACT": name}
        text = "".join(f"{key} = {value!r}\n" for key, value in facts.items())
        yield World(text, bystander, (tcp, udp, abstract), file)
        bystander.kill()


@pytest.fixture(scope="module")
def verdicts(sandbox: Sandbox, world: World) -> dict[str, Future[Verdict]]:
    """What became of all attempts, several of which run at a time."""

    def judged(attempt: Attempt) -> Verdict:
        limits = replace(SMALL, seconds=0.5) if attempt.outcome == "timeout" else SMALL
        return sandbox.run(world.facts + attempt.program, tests=attempt.tests, limits=limits)

    with ThreadPoolExecutor(4) as pool:
        return {name: pool.submit(judged, attempt) for name, attempt in ATTEMPTS.items()}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_tries_to_get_out_stays_in(verdicts: dict[str, Future[Verdict]], world: World, name: str) -> None:
    attempt, verdict = ATTEMPTS[name], verdicts[name].result()

    assert verdict.outcome in attempt.outcome.split("|"), verdict
    assert attempt.says in verdict.output, verdict
    assert SECRET not in verdict.output
    assert len(verdict.output) <= SMALL.output_bytes
    world.check()


def test_a_daemon_does_not_outlive_its_program(sandbox: Sandbox) -> None:
    mark = f"daemon-{uuid.uuid4()}"
    program = f"""
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        open("is-up", "w").close()
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", {mark!r}])
    os._exit(0)
while not os.path.exists("is-up"):
    time.sleep(0.01)
"""

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    verdict = sandbox.run(program)

    assert verdict.outcome == "passed", verdict
    assert not [process for process in psutil.process_iter() if mark in " ".join(arguments(process))]
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_program_that_is_right_passes_with_what_it_read_and_printed(sandbox: Sandbox) -> None:
    verdict = sandbox.run("n = int(input())\nprint(n * n)", tests="assert n == 12", stdin="12\n")

    assert (verdict.outcome, verdict.output) == ("passed", "144\n")
    assert 0 <= verdict.seconds < Limits().seconds


def test_a_program_without_tests_is_the_main_module_and_one_with_tests_is_not(sandbox: Sandbox) -> None:
    program = "if __name__ == '__main__':\n    print('I am run')"

    assert sandbox.run(program).output == "I am run\n"
    assert sandbox.run(program, tests="pass").output == ""


def test_dataclasses_threads_and_processes_of_its_own_are_allowed(sandbox: Sandbox) -> None:
    program = """
from __future__ import annotations
import subprocess, sys, threading
from dataclasses import dataclass
@dataclass
class Point:
    x: int
seen = []
thread = threading.Thread(target=seen.append, args=(Point(3),))
thread.start(); thread.join()
command = [sys.executable, "-S", "-c", "print(40 + 2)"]
out = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True).stdout
noise = open("/dev/urandom", "rb").read(4)
"""

    verdict = sandbox.run(program, tests="assert seen == [Point(3)] and out == '42\\n' and len(noise) == 4")

    assert verdict.outcome == "passed", verdict


def test_a_failure_shows_the_line_of_the_test(sandbox: Sandbox) -> None:
    verdict = sandbox.run("def f(x):\n    return x + 1", tests="assert f(1) == 2\nassert f(2) == 4")

    assert verdict.outcome == "failed"
    assert 'File "tests.py", line 2' in verdict.output and "assert f(2) == 4" in verdict.output
    assert "sandbox_child" not in verdict.output


def test_a_program_sees_only_the_directories_it_needs(sandbox: Sandbox) -> None:
    shown = {Path(target).parts[1] for _, target in sandbox.mounts} | {"tmp", "dev", "sandbox_child.py"}

    verdict = sandbox.run("import os\nprint(*os.listdir('/'))")

    assert set(verdict.output.split()) <= shown
    assert not {"proc", "sys", "var", "run", "mnt"} & shown


def test_the_working_directory_is_hidden_where_it_lies_among_the_systems_files(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/usr/share")

    verdict = Sandbox.find().run("import os\nprint(os.listdir('/usr/share'))")

    assert (verdict.outcome, verdict.output) == ("passed", "[]\n")


def test_an_ordinary_user_is_isolated_in_a_user_namespace(sandbox: Sandbox) -> None:
    if os.geteuid() != 0:
        pytest.skip("the other tests run as an ordinary user already")
    program = f"""
import os, sys
os.setgroups([]); os.setgid(54321); os.setuid(54321)
sys.path[:0] = {[*sys.path, str(Path(__file__).parents[2] / "src")]!r}
os.environ["HOME"] = "/nonexistent"
try:
    from sheepop.core.sandbox import IsolationError, Limits, Sandbox
except (ImportError, OSError) as error:
    sys.exit(f"77 {{error}}")
try:
    sandbox = Sandbox.find()
except IsolationError as error:
    sys.exit(f"77 {{error}}")
for text in ("x = 1", "import os; os.setuid(0)", "open('/etc/passwd')", "import os\\nwhile True: os.fork()"):
    print(sandbox.run(text, limits=Limits(seconds=5)).outcome)
"""
    pythons = [os.path.realpath(sys.executable), f"/usr/bin/python3.{sys.version_info.minor}"]
    runs = [
        subprocess.run([python, "-B", "-c", program], capture_output=True, text=True, cwd="/")
        for python in pythons
        if Path(python).exists()
    ]
    said = [run.stdout.split() for run in runs if run.returncode == 0]
    if not said:
        pytest.skip(f"no Python that an ordinary user may run: {runs[-1].stderr[-200:]}")

    assert said[0] == ["passed", "failed", "failed", "failed"]


def test_limits_hold_for_each_program_by_itself(sandbox: Sandbox) -> None:
    verdicts = [sandbox.run("open('x', 'w').write('x')\nimport os\nassert os.listdir() == ['x']") for _ in range(2)]

    assert [verdict.outcome for verdict in verdicts] == ["passed", "passed"]


@pytest.mark.skipif(sys.platform != "linux", reason="there is no isolation but on Linux")
def test_without_bubblewrap_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")

    with pytest.raises(IsolationError, match=r"bubblewrap is not installed.*apt-get install bubblewrap") as error:
        Sandbox.find()

    assert isinstance(error.value, UsageError) and error.value.exit_code == 2


def test_on_another_system_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(IsolationError, match=r"only in isolation, on Linux.*cannot be had\. Use a Linux machine"):
        Sandbox.find()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no isolation but on Linux")
def test_a_bubblewrap_that_does_not_isolate_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    child = Path(__file__).parents[2] / "src/sheepop/core/sandbox_child.py"
    fake.write_text(
        f"#!{sys.executable}\nimport os, sys\ncommand = sys.argv[sys.argv.index('--chdir') + 2 :]\n"
        f"command[-2] = {str(child)!r}\nos.execv(command[0], command)\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(IsolationError, match=r"bubblewrap does not isolate here: .*is not isolated"):
        Sandbox.find()


def test_a_limit_that_allows_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="processes = 0 must be above 0"):
        Limits(processes=0)


def test_verdicts_of_many_threads_are_their_own(sandbox: Sandbox) -> None:
    def judged(number: int) -> Verdict:
        return sandbox.run(f"print({number})", tests=f"assert {number} % 2 == 0")

    with ThreadPoolExecutor(4) as pool:
        verdicts = list(pool.map(judged, range(8)))

    assert [verdict.outcome for verdict in verdicts] == ["passed", "failed"] * 4
    assert all(str(number) in verdict.output.splitlines() for number, verdict in enumerate(verdicts))
