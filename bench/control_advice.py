"""A learning rate chosen by the advice of a run's analysis, beside the best of a sweep of nine rates.

    python bench/control_advice.py files/ --steps 300 --json bench/results/control_advice.json

A small model of characters trains on the text files at each of nine rates with `analysis.quantities=[sharpness]`, which
changes no weight. From each of them on the advice is followed: as long as the analysis of a run advises another rate,
the model trains again at that one. The table compares the held-out loss of the last run of each start with the best of
the nine.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import add_json_option, write_record
from sheepop.core.json_lines import read_json_lines
from sheepop.interpret.control.advice import LAYER, RATE, advice_of
from sheepop.jobs.config import load_config
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train

RATES = tuple(float(f"{10 ** (power / 2):.2g}") for power in range(-8, 1))  # 1e-4, 3.2e-4, ..., 1
MOST_RUNS = 6
SETTINGS = (
    *("device=cpu", "tokenizer.algorithm=char", "model.d_model=32", "model.num_layers=2", "model.num_heads=2"),
    *("model.max_seq_len=32", "model.position_encoding=rope", "model.norm=rmsnorm", "model.activation=swiglu"),
    *("model.bias=false", "model.dropout=0", "model.ngrams=null", "model.short_convolution=null"),
    *("training.optimizer=adamw", "training.global_batch_size=16", "training.precision=fp32", "training.sinks=[]"),
    *("training.sample_prompts=[]", "training.keep_milestones=false", "training.trouble.spike=ignore"),
)


def trained(data: Path, steps: int, rate: float) -> dict[str, Any]:
    """Trains once, and returns the held-out loss in nats per token (infinite if the run failed) and the next rate."""
    with tempfile.TemporaryDirectory() as folder:
        places = (f"data.paths={data}", f"output_dir={folder}/run", f"training.learning_rate={rate}")
        lengths = (f"training.{name}={steps}" for name in ("max_steps", "eval_interval", "checkpoint_interval"))
        watched = ("analysis.quantities=[sharpness]", f"analysis.interval={max(1, steps // 20)}", "analysis.rows=16")
        outcome = train(RunRequest.exactly(load_config(overrides=(*SETTINGS, *places, *lengths, *watched))))
        advice = advice_of(read_json_lines(outcome.run / "metrics.jsonl").rows)
    found = next((each for each in advice if each.cause in (RATE, LAYER)), None)
    return {
        "rate": rate,
        "loss": outcome.scores.loss if outcome.scores is not None else math.inf,
        "advice": found and found.words,
        "next": found and float(f"{rate * found.changes['training.learning_rate']:.3g}"),
    }


def followed(first: dict[str, Any], again: Callable[[float], dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs at a rate and at those that are advised from there on, at most six."""
    runs = [first]
    while runs[-1]["next"] is not None and len(runs) < MOST_RUNS:
        runs.append(again(runs[-1]["next"]))
    return runs


def main() -> None:
    """Runs the sweep and the advised runs, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder of text")
    parser.add_argument("--steps", type=int, default=300)
    add_json_option(parser)
    options = parser.parse_args()
    known: dict[float, dict[str, Any]] = {}

    def run(rate: float) -> dict[str, Any]:
        if rate not in known:
            known[rate] = trained(options.data, options.steps, rate)
            print(f"{rate:9.2g}  {known[rate]['loss']:.4f}  {known[rate]['advice'] or 'no advice'}", flush=True)
        return known[rate]

    print(f"{'rate':>9}  held-out loss")
    sweep = [run(rate) for rate in RATES]
    best = min(each["loss"] for each in sweep)
    starts = [followed(first, run) for first in sweep]
    for runs in starts:
        path = " -> ".join(f"{each['rate']:.2g}" for each in runs)
        print(f"{path}: {runs[-1]['loss'] / best - 1:+.2%} above the best of the sweep")
    write_record(options.json, {"steps": options.steps, "best": best, "starts": starts})


if __name__ == "__main__":
    main()
