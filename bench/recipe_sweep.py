"""Trains a recipe once for every combination of some values, and compares what the models have learned.

    python bench/recipe_sweep.py --config recipes/shakespeare-characters.yaml --data plays.txt --at-once 2 \\
        --vary training.optimizer=adamw,muon --vary training.learning_rate=1e-3,4e-3 --json sweep.json

    python bench/recipe_sweep.py --config minutes.yaml --data FOLDER --seconds 300 --vary seed=3,4 \\
        --change "model.ngrams=null" --change "training.optimizer=adamw training.learning_rate=4e-3"

Further KEY=VALUE arguments hold for all runs. Runs that are made at once share the cores evenly, so that their seconds
compare with each other and with nothing else. Every run has its own directory below --output, and its report.

With --law NAME a scaling law is fitted to the runs, which differ in size and in tokens, and kept with its origin in
src/sheepop/scale/laws.json. The recipe uses the law that "recipe" names there.

    python bench/recipe_sweep.py --config minutes.yaml --data FOLDER --law library --origin "Python 3.11" \\
        --vary model.d_model=64,128,192 --vary training.max_steps=300,900,2700

With --seconds each kind of run takes the steps that fit so many seconds of training, by a measurement of a few steps of
all kinds one after the other before the first run. What else the machine does later changes no result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from record import add_json_option, write_record
from sheepop.checkpoint import load_model
from sheepop.core.console import Console
from sheepop.core.files import write_json
from sheepop.jobs.config import load_config
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train
from sheepop.model.accounting.cost import matrix_parameters
from sheepop.scale.fit import PRIOR, Observation, fit_law
from sheepop.scale.law import LAWS

LAWS_FILE = Path(__file__).parents[1] / "src" / "sheepop" / "scale" / LAWS
_MEASURED_STEPS, _ROUNDS = 18, 3


def train_one(config: Path, data: list[str], output: Path, overrides: tuple[str, ...], threads: int) -> dict[str, Any]:
    """One run: what differs in it, its scores on the held-out text, and its seconds."""
    torch.set_num_threads(threads)
    name = "-".join(override.removeprefix("training.").removeprefix("model.") for override in overrides)
    name = name.replace("/", "_") or "as-it-is"
    options = {"data": {"paths": data}, "output_dir": str(output / name)}
    started = time.perf_counter()
    settings = load_config(config, overrides, options=options)
    outcome = train(RunRequest.exactly(settings, console=Console(quiet=True)))
    assert outcome.scores is not None
    seconds = time.perf_counter() - started
    return {
        "overrides": list(overrides),
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "parameters": matrix_parameters(load_model(outcome.run).model.config),
        "seconds": seconds,
        **outcome.scores.to_dict(),
    }


def steps_in(seconds: float, config: Path, data: list[str], output: Path, kinds: list[tuple[str, ...]]) -> list[int]:
    """The steps of each kind of run that fit so many seconds, by the fastest steps of several rounds over all kinds.

    So another program that runs for a moment does not count against one of them.
    """
    short = (f"training.max_steps={_MEASURED_STEPS}", "training.log_interval=1", "training.eval_interval=null")
    fastest = [float("inf")] * len(kinds)
    for _ in range(_ROUNDS):
        for number, kind in enumerate(kinds):
            options = {"data": {"paths": data}, "output_dir": str(output)}
            settings = load_config(config, [*kind, *short], options=options)
            train(RunRequest.exactly(settings, overwrite=True))
            rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
            ends = [row["seconds"] for row in rows if row["split"] == "train"][_MEASURED_STEPS // 3 :]
            times = sorted(end - begin for begin, end in itertools.pairwise(ends))
            fastest[number] = min(fastest[number], statistics.mean(times[: len(times) // 2]))
    return [max(1, round(seconds / each)) for each in fastest]


def combinations(fixed: list[str], changes: list[str], varied: list[str]) -> list[tuple[str, ...]]:
    """The overrides of every run: what is fixed, one of the changes or none, and one value of each varied key."""
    choices: list[list[str]] = []
    for text in varied:
        key, separator, values = text.partition("=")
        if not separator or not values:
            raise SystemExit(f"--vary {text}: write KEY=VALUE,VALUE,...")
        choices.append([f"{key}={value}" for value in values.split(",")])
    return [(*fixed, *change.split(), *chosen) for chosen in itertools.product(*choices) for change in ("", *changes)]


def keep_law(name: str, origin: str, rows: list[dict[str, Any]]) -> None:
    """Fits a law to the rows and writes it into the file of laws under `name`."""
    runs = [Observation(" ".join(row["overrides"]), row["parameters"], row["tokens"], row["loss"]) for row in rows]
    found, kept = fit_law(runs), json.loads(LAWS_FILE.read_text(encoding="utf-8"))
    by_prior = f", exponents drawn to {PRIOR}" if found.with_prior else ""
    kept["laws"][name] = {**found.law.to_dict(), "origin": f"{origin}: {len(runs)} runs{by_prior}"}
    write_json(LAWS_FILE, kept)
    print(json.dumps(found.to_dict(), indent=2))


def main() -> None:
    """Makes every run and prints one row for each, the best last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--config", type=Path, required=True, help="the recipe")
    parser.add_argument("--data", nargs="+", required=True, metavar="PATH")
    parser.add_argument("--vary", action="append", default=[], metavar="KEY=V1,V2", help="may be given several times")
    parser.add_argument("--change", action="append", default=[], metavar="KEYS", help="one row more: KEY=VALUE ...")
    parser.add_argument("--seconds", type=float, help="equal time: so many seconds of training for each run")
    parser.add_argument("--measured-data", nargs="+", metavar="PATH", help="less text, to measure the steps with")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    parser.add_argument("--output", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--law", metavar="NAME", help="fit a law to the runs and keep it under this name")
    parser.add_argument("--origin", help="with --law: what the runs are")
    add_json_option(parser)
    options = parser.parse_args()
    if (options.law is None) != (options.origin is None):
        raise SystemExit("--law and --origin belong together: a name, and where the law comes from.")
    threads = max(1, torch.get_num_threads() // options.at_once)
    plans = combinations(options.overrides, options.change, options.vary)
    if options.seconds is not None:
        torch.set_num_threads(threads)
        kinds = combinations(options.overrides, options.change, [])
        measured = options.measured_data or options.data
        steps = steps_in(options.seconds, options.config, measured, options.output / "measured", kinds)
        plans = [(*plan, f"training.max_steps={steps[number % len(kinds)]}") for number, plan in enumerate(plans)]
    runs = [(options.config, options.data, options.output, overrides, threads) for overrides in plans]
    with multiprocessing.get_context("spawn").Pool(options.at_once, maxtasksperchild=1) as pool:
        rows = pool.starmap(train_one, runs, chunksize=1)
    print("| overrides | steps | tokens | seconds | loss | bits per byte |\n|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: -row["bits_per_byte"]):
        print(
            f"| {' '.join(row['overrides'])} | {row['steps']:,} | {row['tokens']:,} | {row['seconds']:,.0f} "
            f"| {row['loss']:.4f} | {row['bits_per_byte']:.4f} |"
        )
    if options.law is not None:
        keep_law(options.law, options.origin, rows)
    write_record(options.json, {"config": options.config.read_text(), "threads": threads, "rows": rows})


if __name__ == "__main__":
    main()
