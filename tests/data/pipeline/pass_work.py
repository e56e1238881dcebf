"""Work for the passes of `test_engine`, in a module of its own that worker processes can import."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from sheepop.core.errors import TokenizerError


@dataclass(frozen=True)
class Noted:
    """Writes a square, notes in `control` that it ran, and does what a file there of its name says."""

    control: Path

    def __call__(self, rank: int, staging: Path) -> None:
        with (self.control / "calls").open("a", encoding="ascii") as calls:
            calls.write(f"{rank}\n")
        order = self.control / f"order-{rank}"
        what = order.read_text() if order.is_file() else ""
        if what == "wait":
            time.sleep(5)
        (staging / "square").write_text(str(rank * rank))
        if what == "refuse":
            raise TokenizerError(f"part {rank} cannot be had. Take another.")
        if what == "fail":
            raise LookupError(f"part {rank} is broken")
        if what == "die":
            os._exit(9)
