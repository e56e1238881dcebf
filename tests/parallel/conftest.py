"""Ranks of one command: processes that meet on loopback, as a launcher would start them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from ..command_line import COMMAND, Ended, Launcher, Started, free_port

SETTINGS = (
    "tokenizer.algorithm=char",
    "model.d_model=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.max_seq_len=32",
    "model.position_encoding=rope",
    "model.norm=rmsnorm",
    "model.activation=swiglu",
    "model.bias=false",
    "model.dropout=0",
    "model.ngrams.rows=64",
    "model.short_convolution=3",
    "training.optimizer=muon",
    "training.learning_rate=0.01",
    "training.schedule=constant",
    "training.ema_decay=0.9",
    "training.global_batch_size=8",
    "training.max_steps=12",
    "training.precision=fp32",
    "training.log_interval=1",
    "training.log_batch_hash=true",
    "training.checkpoint_interval=4",
    "training.eval_interval=4",
    "training.sample_prompts=[Sheep]",
    "training.sample_tokens=4",
)
ENDS = Sequence[Ended]
# Calls a pickled function, which a module of tests defines, with its arguments. Python would take all libraries apart
# at the end, which takes longer than many a call.
CALL = """
import os, pickle, sys
from pathlib import Path
root, call = sys.argv[1:]
sys.path.insert(0, root)
function, arguments = pickle.loads(Path(call).read_bytes())
function(*arguments)
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


@dataclass(frozen=True)
class Together:
    """Starts ``sheepop train`` as several ranks."""

    launcher: Launcher
    text: Path

    def options(self, run: Path, *settings: str) -> list[str]:
        """What ``sheepop`` is told."""
        places = ["--data", str(self.text), "--output", str(run), "--device", "cpu", "--quiet"]
        return ["train", *places, *SETTINGS, *settings]

    def start(self, size: int, options: Sequence[str], *, port: int | None = None, **each: Any) -> list[Started]:
        """The ranks of a command; ``rank_1=[...]`` gives that one other options, ``program_1`` another program."""
        port = free_port() if port is None else port
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        return [
            self.launcher.start(
                *each.get(f"rank_{rank}", options),
                program=each.get(f"program_{rank}", COMMAND),
                environment={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(size)
        ]

    def run(self, size: int, options: Sequence[str], **more: Any) -> ENDS:
        """What became of them."""
        ranks = self.start(size, options, **more)
        try:
            return [rank.wait() for rank in ranks]
        except TimeoutError as error:
            for number, rank in enumerate(ranks):
                error.add_note(f"rank {number}: {rank.kill_without_end()}")
            raise

    def call(self, size: int, function: Callable[..., None], *arguments: object) -> None:
        """Calls `function` in each of `size` ranks, whose processes have all libraries loaded; none may fail."""
        with TemporaryDirectory() as folder:
            file = Path(folder, "call")
            file.write_bytes(pickle.dumps((function, arguments)))
            programs = {f"program_{rank}": CALL for rank in range(size)}
            ends = self.run(size, [str(Path(__file__).parents[2]), str(file)], **programs)
        assert [end.code for end in ends] == [0] * size, "\n".join(end.err for end in ends)

    def alone(self, options: Sequence[str]) -> Ended:
        """What became of the same command in one process."""
        return self.launcher.run(*options)


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def together(launcher: Launcher, text_folder: Path) -> Together:
    """A way to start ranks."""
    return Together(launcher, text_folder)


@pytest.fixture(scope="session")
def alone(together: Together, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that one process makes."""
    run = tmp_path_factory.mktemp("alone") / "run"
    done = together.alone(together.options(run))
    assert done.code == 0, done.err
    return run
