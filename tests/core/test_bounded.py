from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sheepop.core.bounded import (
    BoundedProcess,
    HandlerError,
    MemoryLimitError,
    ProcessDiedError,
    TimeLimitError,
)

MIB = 2**20


@pytest.fixture(autouse=True)
def _children_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def bounded() -> Iterator[Callable[..., BoundedProcess]]:
    made = []

    def make(*, memory_bytes: int = 512 * MIB, seconds: float = 30.0) -> BoundedProcess:
        made.append(BoundedProcess("answering", memory_bytes=memory_bytes, seconds=seconds))
        return made[-1]

    yield make
    for process in made:
        process.close()


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_answers_come_in_order_and_one_child_serves_many_requests(bounded):
    process = bounded()
    assert list(process.request({"count": 1000})) == list(range(1000))
    first = process.pid
    assert list(process.request({"count": 0})) == []
    assert [list(process.request({"echo": number})) for number in range(50)] == [[number] for number in range(50)]
    assert process.pid == first
    assert process.requests == 52


def test_any_json_travels_unharmed_also_names_that_are_not_utf8_and_large_texts(bounded):
    process = bounded()
    undecodable = os.fsdecode(b"name-\xff\xfe.txt")
    for value in (None, True, 1.5, "tab\tline\nNUL\0 é 漢 🐑", {"a": [1, {"b": undecodable}]}, "x" * 20 * MIB):
        assert list(process.request({"echo": value})) == [value]


def test_the_child_is_only_a_little_ahead_of_a_parent_that_is_busy(bounded, tmp_path: Path):
    progress = tmp_path / "progress"
    answers = bounded().request({"progress": str(progress), "size": MIB})
    next(answers)
    time.sleep(0.5)
    assert int(progress.read_text()) <= 3
    assert sum(1 for _ in answers) == 29


def test_what_the_child_prints_disturbs_nothing(bounded):
    assert list(bounded().request({"print": 500})) == ["printed"]


def test_the_child_works_with_one_thread_and_a_fixed_hash_seed_and_leaves_interrupts_to_the_parent(bounded):
    process = bounded()
    (about,) = process.request({"about": 1})
    assert about == {"pid": process.pid, "interrupt": True, "hash seed": "0", "threads": "1"}


def test_the_time_limit_counts_between_messages(bounded):
    process = bounded(seconds=2.0)
    assert list(process.request({"slowly": 0.6, "times": 4})) == [0, 1, 2, 3]


def test_a_sign_of_life_gives_the_whole_time_again(bounded):
    process = bounded(seconds=2.0)
    assert list(process.request({"alive": 0.6, "times": 4})) == ["done"]


@pytest.mark.parametrize("request_", [{"then sleep": "before"}, {"hold the lock": 1}])
def test_a_child_that_says_nothing_is_killed_and_replaced(bounded, request_: dict[str, object]):
    process = bounded(seconds=1.0)
    answers = []
    with pytest.raises(TimeLimitError, match=r"within 1 s"):
        for answer in process.request(request_):
            answers.append((answer, process.pid))
    assert [answer for answer, _ in answers] == [value for name, value in request_.items() if name == "then sleep"]
    assert process.pid is None
    assert not any(is_running(pid) for _, pid in answers)
    assert list(process.request({"echo": "again"}, seconds=30)) == ["again"]


def test_time_that_the_parent_takes_does_not_count(bounded):
    answers = bounded(seconds=1.0).request({"slowly": 0.05, "times": 5})
    received = []
    for answer in answers:
        received.append(answer)
        time.sleep(0.4)
    assert received == [0, 1, 2, 3, 4]


def test_an_answer_that_came_in_time_counts_though_the_parent_was_paused(bounded, monkeypatch: pytest.MonkeyPatch):
    class PausedSocket(socket.socket):
        """Whoever reads from it is paused for longer than the limit when something has arrived."""

        def recv_into(self, *arguments: Any) -> int:
            received = super().recv_into(*arguments)
            clock[0] += 100
            return received

    clock = [0.0]
    monkeypatch.setattr(socket, "socket", PausedSocket)
    monkeypatch.setattr("sheepop.core.bounded.time", SimpleNamespace(monotonic=lambda: time.monotonic() + clock[0]))
    process = bounded(seconds=30.0)
    assert list(process.request({"count": 3})) == [0, 1, 2]


@pytest.mark.parametrize("step", [4096, MIB, 2**40])
def test_a_child_that_wants_too_much_memory_is_stopped(bounded, step: int):
    process = bounded(memory_bytes=128 * MIB)
    with pytest.raises(MemoryLimitError, match=r"134,217,728 bytes"):
        list(process.request({"hoard": step}))
    assert process.pid is None
    assert list(process.request({"echo": "again"})) == ["again"]


def test_the_memory_of_what_the_child_started_counts(bounded):
    process = bounded(memory_bytes=128 * MIB)
    # The limit on the data segment is each process's own, so each of the two stays below it.
    with pytest.raises(MemoryLimitError):
        list(process.request({"grown children": 70 * MIB}))


def test_what_the_child_started_is_ended_with_it(bounded):
    process = bounded(seconds=0.5)
    started = []
    with pytest.raises(TimeLimitError):
        started.extend(process.request({"spawn": 1}))
    answers = process.request({"spawn": 1})
    started.append(next(answers))
    answers.close()
    assert wait_until(lambda: not any(is_running(pid) for pid in started))


def test_an_exit_and_a_signal_are_told_apart(bounded):
    process = bounded()
    with pytest.raises(ProcessDiedError, match="exit status 3") as exited:
        list(process.request({"exit": 3}))
    assert exited.value.signal_number == 0
    with pytest.raises(ProcessDiedError, match="SIGSEGV") as crashed:
        list(process.request({"signal": int(signal.SIGSEGV)}))
    assert crashed.value.signal_number == signal.SIGSEGV
    # Nobody but the system, short of memory, kills like this.
    with pytest.raises(MemoryLimitError, match="SIGKILL"):
        list(process.request({"signal": int(signal.SIGKILL)}))
    assert list(process.request({"echo": "again"})) == ["again"]


def test_what_was_answered_before_the_end_is_delivered(bounded):
    answers = bounded().request({"exit": 3})
    assert next(answers) == "before"
    with pytest.raises(ProcessDiedError):
        next(answers)


def test_an_exception_in_the_handler_is_told_and_the_child_lives_on(bounded):
    process = bounded()
    answers = process.request({"raise": "so it goes"})
    assert next(answers) == "before"
    with pytest.raises(HandlerError, match="RuntimeError: so it goes") as failed:
        next(answers)
    assert (failed.value.kind, failed.value.detail) == ("RuntimeError", "so it goes")
    pid = process.pid
    assert list(process.request({"echo": 1})) == [1]
    assert process.pid == pid


def test_answers_that_are_not_read_to_the_end_end_the_child(bounded):
    process = bounded()
    answers = process.request({"count": 10**6})
    assert next(answers) == 0
    pid = process.pid
    answers.close()
    assert not is_running(pid)
    assert list(process.request({"count": 2})) == [0, 1]


def test_two_requests_at_a_time_are_refused(bounded):
    process = bounded()
    answers = process.request({"count": 10})
    next(answers)
    with pytest.raises(RuntimeError, match="one request at a time"):
        next(process.request({"count": 10}))
    assert list(answers) == list(range(1, 10))


def test_a_child_that_has_grown_is_replaced_between_requests(bounded):
    process = bounded(memory_bytes=256 * MIB)
    (first,) = process.request({"keep": MIB})
    (same,) = process.request({"keep": 150 * MIB})
    (other,) = process.request({"keep": MIB})
    assert first == same != other


def test_a_child_that_died_between_requests_is_replaced(bounded):
    process = bounded()
    list(process.request({"echo": 1}))
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # until all of its threads have ended
    assert list(process.request({"echo": 2})) == [2]


def test_a_message_beyond_the_limit_is_refused(bounded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sheepop.core.bounded_child.LONGEST_MESSAGE", 1000)
    with pytest.raises(ValueError, match=r"1,\d\d\d bytes is over the limit of 1,000"):
        list(bounded().request({"echo": "x" * 1000}))


def test_closing_twice_is_no_error_and_leaves_no_process(bounded):
    process = bounded()
    list(process.request({"echo": 1}))
    pid = process.pid
    process.close()
    process.close()
    assert process.pid is None
    assert not psutil.pid_exists(pid)


def test_a_module_that_cannot_start_says_why():
    with BoundedProcess("no_such_module", memory_bytes=512 * MIB, seconds=30) as process:
        for _ in range(2):
            with pytest.raises(ProcessDiedError, match=r"did not start.*No module named no_such_module"):
                list(process.request({}))


def test_a_file_in_the_working_directory_is_not_taken_for_a_module(
    bounded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "json.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    assert list(bounded().request({"echo": 1})) == [1]


PARENT = """
import sys
from sheepop.core.bounded import BoundedProcess
process = BoundedProcess("answering", memory_bytes=2**29, seconds=600)
if sys.argv[1] == "idle":
    list(process.request({"echo": 1}))
    print(process.pid, flush=True)
    sys.stdin.read()
(about,) = process.request({"about": 1})
print(about["pid"], flush=True)
list(process.request({sys.argv[1]: 1}))
"""


@pytest.mark.parametrize("state", ["idle", "then sleep", "hold the lock"])
def test_a_parent_killed_without_warning_leaves_no_child(state: str):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, state], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not is_running(pid))


def test_a_parent_that_ends_normally_leaves_no_child():
    program = PARENT.replace("sys.stdin.read()", "sys.exit()")
    done = subprocess.run([sys.executable, "-c", program, "idle"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_running(int(done.stdout))


def test_it_works_inside_a_daemonic_worker_process():
    program = """
import multiprocessing
from sheepop.core.bounded import BoundedProcess

def work(queue):
    assert multiprocessing.current_process().daemon
    with BoundedProcess("answering", memory_bytes=2**29, seconds=60) as process:
        queue.put(list(process.request({"count": 3})))

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=work, args=(queue,), daemon=True)
    worker.start()
    print(queue.get(timeout=60))
    worker.join()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[0, 1, 2]", "")


def test_a_forked_copy_starts_a_child_of_its_own_and_leaves_the_first_alone():
    program = """
import os
from sheepop.core.bounded import BoundedProcess
process = BoundedProcess("answering", memory_bytes=2**29, seconds=60)
(first,) = process.request({"about": 1})
copy = os.fork()
if copy == 0:
    (other,) = process.request({"about": 1})
    process.close()
    os._exit(0 if other["pid"] != first["pid"] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 0
(again,) = process.request({"about": 1})
print(again["pid"] == first["pid"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("True", "")
