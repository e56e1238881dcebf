"""A learning rate chosen by the advice of a run's analysis, beside the best of a sweep of nine rates.

    python bench/control_advice.py held-1=wikitext/ held-2=plays/ held-3=library/ --json advice.json

Each case is a small network, a seed and a folder of text. It trains at each of nine rates with
`analysis.quantities=[sharpness]`, which changes no weight. From each of them on the advice is followed: as long as the
analysis of a run advises another rate, the network trains again at that one. The table compares the held-out loss of
the last run of each start with the best of the nine. The constants of the advice were chosen on the cases `seen-1` to
`seen-3`, and on none of `held-1` to `held-3`.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Mapping
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
GPT2 = ("model.position_encoding=learned", "model.norm=layernorm", "model.activation=gelu", "model.bias=true")
CASES: Mapping[str, tuple[str, ...]] = {
    "seen-1": (),
    "seen-2": ("seed=5", "model.d_model=48", "training.global_batch_size=32"),
    "seen-3": (
        *("seed=11", "model.num_layers=3", "model.d_model=64", "model.num_heads=4", "model.max_seq_len=48"),
        *("training.global_batch_size=48", *GPT2),
    ),
    "held-1": ("seed=7", "model.d_model=48", "model.num_heads=4", "training.global_batch_size=24", *GPT2),
    "held-2": ("seed=3", "model.num_layers=3", "model.max_seq_len=48", "model.qk_norm=head"),
    "held-3": (
        *("seed=21", "tokenizer.algorithm=bpe", "tokenizer.vocab_size=512", "model.d_model=40"),
        *("training.global_batch_size=32", "model.num_kv_heads=1"),
    ),
}


def trained(data: Path, steps: int, rate: float, settings: tuple[str, ...]) -> dict[str, Any]:
    """Trains once, and returns the held-out loss in nats per token (infinite if the run failed) and the next rate."""
    with tempfile.TemporaryDirectory() as folder:
        places = (f"data.paths={data}", f"output_dir={folder}/run", f"training.learning_rate={rate}")
        lengths = (f"training.{name}={steps}" for name in ("max_steps", "eval_interval", "checkpoint_interval"))
        watched = ("analysis.quantities=[sharpness]", f"analysis.interval={max(1, steps // 20)}", "analysis.rows=16")
        config = load_config(overrides=(*SETTINGS, *settings, *places, *lengths, *watched))
        outcome = train(RunRequest.exactly(config))
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


def compared(case: str, data: Path, steps: int) -> dict[str, Any]:
    """The sweep and the advised runs of a case; prints a table."""
    known: dict[float, dict[str, Any]] = {}

    def run(rate: float) -> dict[str, Any]:
        if rate not in known:
            known[rate] = trained(data, steps, rate, CASES[case])
            print(f"{rate:9.2g}  {known[rate]['loss']:.4f}  {known[rate]['advice'] or 'no advice'}", flush=True)
        return known[rate]

    print(f"{case}\n{'rate':>9}  held-out loss")
    sweep = [run(rate) for rate in RATES]
    best = min(each["loss"] for each in sweep)
    starts = [followed(first, run) for first in sweep]
    for runs in starts:
        path = " -> ".join(f"{each['rate']:.2g}" for each in runs)
        print(f"{path}: {runs[-1]['loss'] / best - 1:+.2%} above the best of the sweep", flush=True)
    return {"best": best, "starts": starts}


def main() -> None:
    """Runs the cases that are named, and prints a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="CASE=FOLDER", help=f"one of {', '.join(CASES)}, and its text")
    parser.add_argument("--steps", type=int, default=500)
    add_json_option(parser)
    options = parser.parse_args()
    found = {}
    for case, _, folder in (given.partition("=") for given in options.cases):
        found[case] = compared(case, Path(folder), options.steps)
        write_record(options.json, {"steps": options.steps, "cases": found})


if __name__ == "__main__":
    main()
