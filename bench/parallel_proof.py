"""What sharing a run changes in it: losses, gradients, what comes after a resumption elsewhere and after kills.

    python bench/parallel_proof.py --json bench/results/parallel_proof.json

Every strategy trains a toy network over 20 steps beside one device. Then it trains for ten steps, and the next strategy
goes on; and it trains while one of its ranks, drawn by chance, is killed at a moment drawn by chance, and all begin
anew. Each number is the largest difference from one process. A new strategy is a new row of `STRATEGIES`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from record import add_json_option, write_record
from sheepop.cli.main import main as sheepop
from sheepop.model import ModelConfig, build_model
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.ranks import Ranks
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken, with_experts
from sheepop.train.pipelined import PipelinedModel
from sheepop.train.placement import OneDevice, Placement
from sheepop.train.sharded import ShardedModel
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch

STEPS, ROWS, LENGTH = 20, 8, 32
NETWORK = {
    "d_model": 32, "num_layers": 4, "num_heads": 4, "max_seq_len": LENGTH, "dropout": 0.0, "norm": "rmsnorm",
    "position_encoding": "rope", "activation": "swiglu", "bias": False, "qk_norm": "head", "short_convolution": 3,
    "ngrams": {"rows": 64},
}  # fmt: skip
TRAINING = {
    "optimizer": "adamw", "learning_rate": 0.001, "schedule": "constant", "warmup_steps": 0, "global_batch_size": ROWS,
    "precision": "fp32", "log_interval": 1, "log_batch_hash": "true", "checkpoint_interval": 3, "eval_interval": 10,
    "sample_prompts": "[]", "sinks": "[]",
}  # fmt: skip


@dataclass(frozen=True)
class Strategy:
    """How many ranks, their layout, and what it needs of the network and of the data."""

    ranks: int
    layout: Mapping[str, Any]
    network: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    def goes_on_with(self, other: Strategy) -> bool:
        """Whether one can go on from the checkpoints of the other."""
        return (self.network, self.data) == (other.network, other.data)


_RING, _ALONE = {"context_method": "ring"}, {"packing": "false"}
_EXPERTS = {"experts": {"count": 4, "per_token": 2, "shared": 1, "d_ff": 32}}
STRATEGIES = {
    "zero=0 (DDP)": Strategy(2, {"zero": 0}),
    "zero=1": Strategy(2, {"zero": 1}),
    "zero=2": Strategy(2, {"zero": 2}),
    "zero=3 (FSDP)": Strategy(2, {"zero": 3}),
    "zero=3 shard=2 (HSDP)": Strategy(4, {"zero": 3, "shard": 2}),
    "tensor=2": Strategy(2, {"tensor": 2}),
    "context=2": Strategy(2, {"context": 2}),
    "context=2 ring": Strategy(2, {"context": 2, "context_method": "ring"}, data={"packing": "false"}),
    "context=4 ring zero=3": Strategy(
        4, {"context": 4, "context_method": "ring", "zero": 3}, data={"packing": "false"}
    ),
    "expert=2 zero=1": Strategy(2, {"expert": 2, "zero": 1}, _EXPERTS),
    "expert=4 context=2 tensor=2": Strategy(4, {"expert": 4, "context": 2, "tensor": 2}, _EXPERTS),
    "expert=2 pipeline=2": Strategy(4, {"expert": 2, "pipeline": 2}, _EXPERTS),
    "pipeline=2 gpipe": Strategy(2, {"pipeline": 2, "schedule": "gpipe"}),
    "pipeline=2 1f1b": Strategy(2, {"pipeline": 2}),
    "pipeline=2 interleaved": Strategy(2, {"pipeline": 2, "schedule": "interleaved"}),
    "pipeline=2 zero_bubble": Strategy(2, {"pipeline": 2, "schedule": "zero_bubble"}),
    "data=2 tensor=2 zero=3": Strategy(4, {"data": 2, "tensor": 2, "zero": 3}),
    "data=2 context=2 zero=2": Strategy(4, {"data": 2, "context": 2, "zero": 2}),
    "data=2 pipeline=2 zero=1": Strategy(4, {"data": 2, "pipeline": 2, "zero": 1}),
    "tensor=2 context=2 zero=3": Strategy(4, {"tensor": 2, "context": 2, "zero": 3}),
    "tensor=2 pipeline=2 zero_bubble": Strategy(4, {"tensor": 2, "pipeline": 2, "schedule": "zero_bubble"}),
    "context=2 pipeline=2 interleaved": Strategy(4, {"context": 2, "pipeline": 2, "schedule": "interleaved"}),
}
ONE_PROCESS = Strategy(1, {})
_WHOLE = {
    "data": "null",
    "zero": 0,
    "shard": "null",
    "tensor": 1,
    "context": 1,
    "pipeline": 1,
    "schedule": "1f1b",
    "expert": 1,
    "context_method": "ulysses",
}
# Ranks are forked from a process that has loaded this, which takes longer than most of their steps.
_DRAWING = ["matplotlib.backends.backend_agg", "plotly.graph_objects", "plotly.validator_cache"]
_LOADED = ["__main__", "sheepop.jobs.run.build", *_DRAWING]
_PROCESSES = multiprocessing.get_context("forkserver")


def main() -> None:
    """Prints a table, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="rows of the table, by a part of their names", default=[""])
    parser.add_argument("--kills", type=int, default=2, help="kills of each strategy")
    add_json_option(parser)
    options = parser.parse_args()
    chosen = {name: each for name, each in STRATEGIES.items() if any(word in name for word in options.only)}
    _PROCESSES.set_forkserver_preload(_LOADED)
    found: dict[str, dict[str, Any]] = {}
    print(_line("strategy", "ranks", "loss", "gradient", "resumed by", "loss then", "kills survived", "loss then"))
    print(_line(*["---"] * 8), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        for name, strategy in chosen.items():
            row = {"ranks": strategy.ranks, **steps_beside_one_device(strategy, Path(folder))}
            row |= runs.resumed(name, strategy) | runs.killed(name, strategy, options.kills)
            found[name] = row
            cells = [f"{each:.1e}" if isinstance(each, float) else each for each in row.values()]
            print(_line(f"`{name}`", *cells), flush=True)
            write_record(options.json, {"steps": STEPS, "kills": options.kills, "strategies": found})


def _line(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


# Losses and gradients, on the same random rows.


def steps_beside_one_device(strategy: Strategy, folder: Path) -> dict[str, float]:
    """The largest difference of a loss in nats, and that of a parameter's gradient relative to it."""
    answer = folder / "answer.json"
    ranks = start(strategy.ranks, _take_steps, strategy, answer)
    _end_well(ranks)
    found: dict[str, float] = json.loads(answer.read_text())
    return found


def _take_steps(strategy: Strategy, answer: Path) -> None:
    torch.set_num_threads(1)
    config = ModelConfig(vocab_size=68, **NETWORK | dict(strategy.network))
    with Ranks.joined() as ranks:
        ranks.connect("cpu")
        model = build_model(config, seed=ranks.rank)  # they begin with those of the first one
        layout = Layout(ranks, ParallelConfig(**strategy.layout))
        kind = PipelinedModel if layout.config.pipeline > 1 else ShardedModel
        spread = kind(model, layout, precision="fp32", device="cpu", compiled=False)
        alone = OneDevice(build_model(config, seed=0), precision="fp32", device="cpu")
        first, second = _runner(spread), _runner(alone)
        loss = gradient = 0.0
        for number, step in enumerate(_random_steps()):
            mine = step.part(layout.share(len(step.micro_batches)))
            mine = mine if spread.context is None else mine.columns(spread.context)
            if number == 0:
                first.gradients(mine)
                second.gradients(step)
                here = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
                ours = dict(spread.pieces.wholes(here))
                for name, parameter in alone.model.named_parameters():
                    theirs = parameter.grad.to_dense()
                    gradient = max(gradient, float((ours[name] - theirs).norm() / theirs.norm()))
            difference = first.take(mine, number=number).loss - second.take(step, number=number).loss
            loss = max(loss, abs(difference))
        if ranks.is_first:
            answer.write_text(json.dumps({"loss": loss, "gradient": gradient}))


def _runner(placement: Placement) -> StepRunner:
    optimizers = build_optimizers(placement.model, TrainingConfig(learning_rate=1e-3, schedule="constant"))
    objective = with_experts(NextToken(), placement.model.config)
    return StepRunner(placement, objective, optimizers, TrainedWeights(), 1.0)


def _random_steps() -> Iterator[PreparedStep]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids = torch.randint(0, 68, (ROWS, LENGTH + 1), generator=generator)
        batches = [
            TensorBatch({"input_ids": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous(), slice(None))
            for rows in ids.split(1)
        ]
        count = ROWS * LENGTH
        yield PreparedStep(batches, num_tokens=count, num_reported=count, num_computed=count)


# Runs of the command, on the same text.


class Runs:
    """Runs of ``sheepop train`` in `folder`, and those that one process made of each network."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._alone = folder, dict[str, Path]()
        chosen = random.Random(1)
        words = ["sheep", "graze", "on", "the", "green", "hill", "and", "count", "stars", "while", "lambs", "sleep"]
        lines = [" ".join(chosen.choices(words, k=9)) + "." for _ in range(600)]
        (folder / "text").mkdir()
        (folder / "text" / "sheep.txt").write_text("\n".join(lines) + "\n")

    def resumed(self, name: str, strategy: Strategy) -> dict[str, Any]:
        """Half of the steps, and the other half by another strategy."""
        others = [key for key, each in STRATEGIES.items() if each.goes_on_with(strategy)]
        following = others[(others.index(name) + 1) % len(others)]
        after = STRATEGIES[following] if following != name else ONE_PROCESS
        run = self._folder / "resumed" / name.replace(" ", "-")
        _end_well(self._start(strategy, run, STEPS // 2))
        _end_well(self._start(after, run, STEPS))
        return {
            "resumed_by": f"`{following}`" if following != name else "one process",
            "loss_resumed": self._difference(run, strategy),
        }

    def killed(self, name: str, strategy: Strategy, kills: int) -> dict[str, Any]:
        """Begins anew after each kill, and at last to the end."""
        chosen, run, survived = random.Random(name), self._folder / "killed" / name.replace(" ", "-"), 0
        for number in range(kills):
            ranks = self._start(strategy, run, STEPS)
            _await_step(ranks, run, (number * STEPS) // (kills + 1) + chosen.randrange(1, STEPS // (kills + 1)))
            chosen.choice(ranks).kill()
            for rank in ranks:
                rank.join()
            survived += any(rank.exitcode == -9 for rank in ranks)
        _end_well(self._start(strategy, run, STEPS))
        return {"kills_survived": survived, "loss_killed": self._difference(run, strategy)}

    def _start(self, strategy: Strategy, run: Path, steps: int) -> list[BaseProcess]:
        settings = {
            "tokenizer.algorithm": "char",
            **{f"model.{name}": value for name, value in {**NETWORK, **strategy.network}.items()},
            **{f"training.{name}": value for name, value in {**TRAINING, "max_steps": steps}.items()},
            **{f"parallel.{name}": value for name, value in {**_WHOLE, **strategy.layout}.items()},
            **{f"data.{name}": value for name, value in strategy.data.items()},
            # Loads are evened out within a micro-batch, so those of experts have one size in every layout.
            **({"training.micro_batch_size": 2} if "experts" in strategy.network else {}),
        }
        places = ["--data", str(self._folder / "text"), "--output", str(run), "--device", "cpu", "--resume", "auto"]
        words = [f"{name}={value}" for name, value in settings.items()]
        run.parent.mkdir(exist_ok=True)
        return start(strategy.ranks, _command, ["train", *places, "--quiet", *words], run.with_suffix(".log"))

    def _difference(self, run: Path, strategy: Strategy) -> float:
        key = json.dumps([dict(strategy.network), dict(strategy.data)])
        if key not in self._alone:
            self._alone[key] = self._folder / f"alone-{len(self._alone)}"
            _end_well(self._start(Strategy(1, {}, strategy.network, strategy.data), self._alone[key], STEPS))
        mine, theirs = _rows(run), _rows(self._alone[key])
        same = [[(row["step"], row["split"], row.get("batch_hash")) for row in rows] for rows in (mine, theirs)]
        if same[0] != same[1]:
            raise RuntimeError(f"{run} did not take the steps of one process")
        return max(abs(one["loss"] - other["loss"]) for one, other in zip(mine, theirs, strict=True) if "loss" in one)


def start(count: int, work: Callable[..., None], *arguments: Any) -> list[BaseProcess]:
    """So many processes, which find the environment that torchrun would give them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks: list[BaseProcess] = []
    for rank in range(count):
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        environment = {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(_PROCESSES.Process(target=_work, args=(environment, work, arguments)))
        ranks[-1].start()
    return ranks


def _work(environment: Mapping[str, str], work: Callable[..., None], arguments: Sequence[Any]) -> None:
    os.environ.update(environment)
    work(*arguments)


def _command(words: list[str], log: Path) -> None:
    sys.argv = ["sheepop", *words]
    with log.open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sheepop()


def _end_well(ranks: Sequence[BaseProcess]) -> None:
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.exitcode for rank in ranks]}")


def _await_step(ranks: Sequence[BaseProcess], run: Path, step: int) -> None:
    """Waits until that step is taken, or the ranks have ended."""
    before = len(_rows(run))
    while all(rank.exitcode is None for rank in ranks):
        rows = _rows(run)
        if len(rows) != before and max((row["step"] for row in rows), default=0) >= step:
            return
        time.sleep(0.005)


def _rows(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


if __name__ == "__main__":
    main()
