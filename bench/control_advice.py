"""A learning rate chosen by `sheepop analyze rate`, beside the best of a sweep of nine rates.

    python bench/control_advice.py wiki=wikitext/ plays=plays/ code=headers/ --json bench/results/control_advice.json

Each case is a small network, a seed and a folder of text. The sweep trains it for all steps at nine rates, and again
with two more seeds where the loss is near the lowest, because single runs of networks as small as these scatter by
several percent. From each of the nine rates on, a search goes downhill as `sheepop.jobs.rates.downhill` does, with
trainings for all steps and for a quarter of them. The table compares the mean loss of whole runs at its last rate with
the lowest.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from record import add_json_option, write_record
from sheepop.checkpoint import RunDirectory
from sheepop.core.console import Console
from sheepop.core.files import finite
from sheepop.jobs.config import load_config
from sheepop.jobs.rates import RATIO, downhill, short_loss
from sheepop.jobs.run.open import task_of, with_local_data
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.resolve import prepare_process
from sheepop.jobs.task.interface import Task

LOWEST, COUNT = 1e-4, 9  # to 1
SEEDS, NEAR = 3, 1.06  # times the lowest loss of the sweep
SHARES = (1.0, 0.25)
SETTINGS = (
    *("device=cpu", "tokenizer.algorithm=char", "model.num_layers=2", "model.num_heads=2", "model.max_seq_len=64"),
    *("model.dropout=0", "model.ngrams=null", "model.short_convolution=null", "training.optimizer=adamw"),
    *("training.global_batch_size=16", "training.micro_batch_size=16", "training.precision=fp32"),
    *("data.validation_fraction=0.1", "training.sample_prompts=[]"),
)
GPT2 = ("model.position_encoding=learned", "model.norm=layernorm", "model.activation=gelu", "model.bias=true")
LLAMA = ("model.position_encoding=rope", "model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false")
BPE = ("tokenizer.algorithm=bpe", "tokenizer.vocab_size=512")
CASES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "wiki": (21, (*GPT2, *BPE, "model.d_model=40", "model.num_heads=4")),
    "plays": (22, (*LLAMA, "model.d_model=32", "model.num_layers=3", "model.qk_norm=head")),
    "code": (
        23,
        (*LLAMA, "training.optimizer=muon", "model.d_model=40", "model.num_heads=4", "model.short_convolution=3"),
    ),
}
"""The seed and the settings of each case."""


def task_in(folder: Path, data: Path, steps: int, name: str) -> Task:
    """The data of a case, prepared in a folder, and its settings."""
    seed, settings = CASES[name]
    lengths = dict.fromkeys(("max_steps", "eval_interval", "checkpoint_interval", "sample_interval"), steps)
    lengths["warmup_steps"] = steps // 20
    given = (*(f"training.{key}={value}" for key, value in lengths.items()), f"data.paths={data}", f"seed={seed}")
    place = f"output_dir={folder / 'run'}"
    request = with_local_data(RunRequest.exactly(load_config(overrides=(*SETTINGS, *settings, *given, place))))
    prepare_process(request.settings)
    task = task_of(request.completed().config, RunDirectory(folder), Console.silent())
    return task.prepared(request.given).settled()


def compared(task: Task, steps: int) -> dict[str, Any]:
    """The sweep of a case and the search from each of its rates; prints both."""

    @cache
    def loss(place: int, length: int, number: int) -> float:
        config = task.config.replace(seed=task.config.seed + 100 * number)
        found = short_loss(task.with_config(config), length, rate(place) / config.training.learning_rate, "cpu")
        print(f"{rate(place):9.2g}  {length:5} steps  seed {number}  {found:.4f}", flush=True)
        return found

    def whole(place: int) -> float:
        return mean(loss(place, steps, number) for number in range(SEEDS))

    sweep = {place: loss(place, steps, 0) for place in range(COUNT)}
    best = min(whole(place) for place, found in sweep.items() if found < NEAR * min(sweep.values()))
    starts = []
    for share in SHARES:
        for start in range(COUNT):
            tried = downhill(lambda to, start=start, share=share: loss(start + to, round(share * steps), 0))  # type: ignore[misc]
            last = start + min(tried, key=tried.__getitem__)
            above = whole(last) / best - 1
            row = {"share": share, "start": rate(start), "found": rate(last), "trainings": len(tried), "above": above}
            starts.append(row)
            print(f"{share:g} of a run: {row['start']:.2g} -> {row['found']:.2g}, {len(tried)} trainings: {above:+.2%}")
    return {"sweep": {rate(place): found for place, found in sweep.items()}, "best": best, "starts": starts}


def rate(place: int) -> float:
    """One of the nine rates, or one beyond them."""
    return LOWEST * RATIO**place


def main() -> None:
    """Runs the cases that are named, and prints a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="CASE=FOLDER", help=f"one of {', '.join(CASES)}, and its text")
    parser.add_argument("--steps", type=int, default=240)
    add_json_option(parser)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name, _, data in (given.partition("=") for given in options.cases):
        print(name)
        with tempfile.TemporaryDirectory() as folder:
            found[name] = compared(task_in(Path(folder), Path(data), options.steps, name), options.steps)
        write_record(options.json, finite({"steps": options.steps, "cases": found}))


if __name__ == "__main__":
    main()
