"""A child whose reader of zip files does what the file's name says, for the tests of `Extraction`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from sheepop.core.bounded_child import serve
from sheepop.data.extract import archive
from sheepop.data.extract.dispatch import read_file
from sheepop.data.extract.interface import Content, Context, Extracted, Refused

_kept: list[bytes] = []


def extract_zip(content: Content, context: Context) -> Iterator[Extracted | Refused]:
    yield Extracted("before")
    match content.name:
        case "sleep.zip":
            time.sleep(600)
        case "slow pages.zip":
            for _ in range(4):
                time.sleep(0.6)
                context.alive()
            yield Extracted("after")
        case "hoard.zip":
            while True:
                _kept.append(b"x" * 2**20)
        case "crash.zip":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(600)
        case "exit.zip":
            os._exit(7)
        case "keep.zip":
            _kept.append(b"x" * 2**26)
        case "needs much.zip":
            yield Extracted("needs much")
            held = b"x" * (150 * 2**20)
            yield Extracted(f"had {len(held)}")
        case "dies second.zip":
            yield Extracted("one")
            if _kept:
                os._exit(7)
            yield Extracted("two")
        case "litter.zip":
            Path(context.scratch, "litter").mkdir()
            Path(context.scratch, "litter", "file").write_bytes(b"x")
            os._exit(7)
        case "print.zip":
            print("noise" * 10**6)
        case "pid.zip":
            yield Extracted(str(os.getpid()))


archive.extract_zip = extract_zip

if __name__ == "__main__":
    serve(read_file)
