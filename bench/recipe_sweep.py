"""Trains a recipe once for every combination of some values, and compares what the models have learned.

    python bench/recipe_sweep.py --config recipes/shakespeare-characters.yaml --data plays.txt --at-once 2 \\
        --vary training.optimizer=adamw,muon --vary training.learning_rate=1e-3,4e-3 --json sweep.json

Further KEY=VALUE arguments hold for all runs. Runs that are made at once share the cores evenly, so that their seconds
compare with each other and with nothing else. Every run has its own directory below --output, and its report.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch

from record import add_json_option, write_record
from sheepop.core.console import Console
from sheepop.jobs.config import load_config
from sheepop.jobs.train import run_training


def train_one(config: Path, data: list[str], output: Path, overrides: tuple[str, ...], threads: int) -> dict[str, Any]:
    """One run: what differs in it, its scores on the held-out text, and its seconds."""
    torch.set_num_threads(threads)
    name = "-".join(override.split("=", 1)[1] for override in overrides).replace("/", "_") or "as-it-is"
    options = {"data": {"paths": data}, "output_dir": str(output / name)}
    started = time.perf_counter()
    outcome = run_training(load_config(config, overrides, options=options), console=Console(quiet=True))
    assert outcome.scores is not None
    seconds = time.perf_counter() - started
    return {
        "overrides": list(overrides),
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "seconds": seconds,
        **outcome.scores.to_dict(),
    }


def combinations(fixed: list[str], varied: list[str]) -> list[tuple[str, ...]]:
    """The overrides of every run: one value of each varied key, and then what is fixed."""
    choices = []
    for text in varied:
        key, separator, values = text.partition("=")
        if not separator or not values:
            raise SystemExit(f"--vary {text}: write KEY=VALUE,VALUE,...")
        choices.append([f"{key}={value}" for value in values.split(",")])
    return [(*chosen, *fixed) for chosen in itertools.product(*choices)]


def main() -> None:
    """Makes every run and prints one row for each, the best last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--config", type=Path, required=True, help="the recipe")
    parser.add_argument("--data", nargs="+", required=True, metavar="PATH")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=V1,V2", help="may be given several times")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--output", type=Path, default=Path("runs/sweep"))
    add_json_option(parser)
    options = parser.parse_args()
    threads = max(1, torch.get_num_threads() // options.at_once)
    runs = [
        (options.config, options.data, options.output, overrides, threads)
        for overrides in combinations(options.overrides, options.vary)
    ]
    with multiprocessing.get_context("spawn").Pool(options.at_once, maxtasksperchild=1) as pool:
        rows = pool.starmap(train_one, runs, chunksize=1)
    print("| overrides | steps | tokens | seconds | loss | bits per byte |\n|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: -row["bits_per_byte"]):
        print(
            f"| {' '.join(row['overrides'])} | {row['steps']:,} | {row['tokens']:,} | {row['seconds']:,.0f} "
            f"| {row['loss']:.4f} | {row['bits_per_byte']:.4f} |"
        )
    write_record(options.json, {"config": options.config.read_text(), "threads": threads, "rows": rows})


if __name__ == "__main__":
    main()
