"""A child for the tests of `BoundedProcess`: does what the request names, for good or ill."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sheepop.core.bounded_child import serve


def answer(request: dict[str, Any], alive: Callable[[], None]) -> Iterator[Any]:
    match request:
        case {"echo": value}:
            yield value
        case {"count": number}:
            yield from range(number)
        case {"progress": path, "size": size}:
            for number in range(30):
                Path(path).write_text(str(number))
                yield "x" * size
        case {"slowly": seconds, "times": times}:
            for number in range(times):
                time.sleep(seconds)
                yield number
        case {"alive": seconds, "times": times}:
            for _ in range(times):
                time.sleep(seconds)
                alive()
            yield "done"
        case {"then sleep": value}:
            yield value
            time.sleep(600)
        case {"hold the lock": _}:
            # Native code that neither releases the interpreter lock nor answers signals.
            ctypes.PyDLL(None).sleep(600)
        case {"hoard": step}:
            hoard = []
            while True:
                hoard.append(b"x" * step)
        case {"spawn": _}:
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            yield child.pid
            time.sleep(600)
        case {"grown children": size}:
            program = f"import time; held = b'x' * {size}; time.sleep(600)"
            for _ in range(2):
                subprocess.Popen([sys.executable, "-c", program])
            time.sleep(600)
        case {"exit": status}:
            yield "before"
            os._exit(status)
        case {"signal": number}:
            yield "before"
            os.kill(os.getpid(), number)
            time.sleep(600)
        case {"raise": text}:
            yield "before"
            raise RuntimeError(text)
        case {"print": count}:
            for _ in range(count):
                print("x" * 1000)
                print("y" * 1000, file=sys.stderr)
            os.write(2, b"z" * 10**6)
            yield "printed"
        case {"keep": size}:
            _kept.append(b"x" * size)
            yield os.getpid()
        case {"about": _}:
            yield {
                "pid": os.getpid(),
                "interrupt": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
                "hash seed": os.environ["PYTHONHASHSEED"],
                "threads": os.environ["OMP_NUM_THREADS"],
            }


_kept: list[bytes] = []

if __name__ == "__main__":
    serve(answer)
