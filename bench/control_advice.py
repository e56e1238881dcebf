"""A learning rate chosen by the advice of a run's analysis, beside the best of a sweep of nine rates.

    python bench/control_advice.py held-1=wikitext/ held-2=plays/ held-3=library/ --json advice.json

Each case is a small network, a seed and a folder of text. It trains at each of nine rates with
`analysis.quantities=[sharpness]`, which changes no weight. From each of them on the advice is followed: as long as the
analysis of a run advises another rate, the network trains again at that one. The table compares the held-out loss at
the last rate of each start with the best of the nine: both are means over three seeds, because single runs of networks
as small as these scatter by 2 percent. The constants of the advice were chosen on runs like `seen-1` and
`seen-2`, and on none of the texts, seeds and shapes of `held-1` to `held-3`.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from record import add_json_option, write_record
from sheepop.core.errors import TrainingError
from sheepop.core.json_lines import read_json_lines
from sheepop.interpret.control.advice import LAYER, RATE, advice_of
from sheepop.jobs.config import load_config
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train

RATES = tuple(float(f"{10 ** (power / 2):.2g}") for power in range(-8, 1))  # 1e-4, 3.2e-4, ..., 1
MOST_RUNS = 6
SEEDS = 3
NEAR = 1.06  # times the best of the sweep
SETTINGS = (
    *("device=cpu", "tokenizer.algorithm=char", "model.d_model=32", "model.num_layers=2", "model.num_heads=2"),
    *("model.max_seq_len=32", "model.position_encoding=rope", "model.norm=rmsnorm", "model.activation=swiglu"),
    *("model.bias=false", "model.dropout=0", "model.ngrams=null", "model.short_convolution=3"),
    *("training.optimizer=adamw", "training.global_batch_size=32", "training.precision=fp32", "training.sinks=[]"),
    *(
        "data.validation_fraction=0.1",
        "training.sample_prompts=[]",
        "training.keep_milestones=false",
        "training.trouble.spike=ignore",
    ),
)
GPT2 = ("model.position_encoding=learned", "model.norm=layernorm", "model.activation=gelu", "model.bias=true")
CASES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "seen-1": (1, ()),
    "seen-2": (11, GPT2),
    "held-1": (7, ("model.d_model=48", "model.num_heads=4", *GPT2)),
    "held-2": (3, ("model.num_layers=3", "model.max_seq_len=48", "model.qk_norm=head")),
    "held-3": (21, ("tokenizer.algorithm=bpe", "tokenizer.vocab_size=512", "model.d_model=40", "model.num_kv_heads=1")),
}
"""The seed and the settings of each case."""


@dataclass
class Case:
    """The runs of a case on a folder of text, each of them trained once."""

    name: str
    data: Path
    steps: int
    known: dict[tuple[float, int], dict[str, Any]] = field(default_factory=dict)

    def run(self, rate: float, number: int = 0) -> dict[str, Any]:
        """Trains at a rate with one of the seeds: the held-out loss in nats per token, the advice, the next rate."""
        if (rate, number) not in self.known:
            self.known[rate, number] = self._trained(rate, number)
            loss, words = (self.known[rate, number][key] for key in ("loss", "advice"))
            print(f"{rate:9.2g}  {loss:.4f}  {words or 'no advice'}", flush=True)
        return self.known[rate, number]

    def _trained(self, rate: float, number: int) -> dict[str, Any]:
        seed, settings = CASES[self.name]
        with tempfile.TemporaryDirectory() as folder:
            places = (f"data.paths={self.data}", f"output_dir={folder}/run", f"training.learning_rate={rate}")
            lengths = (
                f"training.{name}={self.steps}" for name in ("max_steps", "eval_interval", "checkpoint_interval")
            )
            watched = ("analysis.quantities=[sharpness]", f"analysis.interval={self.steps // 20}", "analysis.rows=16")
            watched = watched if number == 0 else ()  # only the loss counts
            given = (*SETTINGS, *settings, *places, *lengths, *watched, f"seed={seed + 100 * number}")
            try:
                scores = train(RunRequest.exactly(load_config(overrides=given))).scores
            except TrainingError:  # it diverged
                scores = None
            advice = advice_of(read_json_lines(Path(folder) / "run" / "metrics.jsonl").rows)
        found = next((each for each in advice if each.cause in (RATE, LAYER)), None)
        return {
            "rate": rate,
            "loss": math.inf if scores is None else scores.loss,
            "advice": found and found.words,
            # As people write rates.
            "next": found and float(f"{rate * found.changes['training.learning_rate']:.0e}"),
        }

    def followed(self, rate: float) -> list[dict[str, Any]]:
        """The runs at a rate and at those that are advised from there on, at most six."""
        runs = [self.run(rate)]
        while runs[-1]["next"] is not None and len(runs) < MOST_RUNS:
            runs.append(self.run(runs[-1]["next"]))
        return runs

    def mean_loss(self, rate: float) -> float:
        """The loss at a rate, as the mean over the seeds."""
        return mean(self.run(rate, number)["loss"] for number in range(SEEDS))


def compared(case: Case) -> dict[str, Any]:
    """The sweep and the advised runs of a case; prints a table."""
    print(f"{case.name}\n{'rate':>9}  held-out loss")
    sweep = {rate: case.run(rate)["loss"] for rate in RATES}
    near = [rate for rate, loss in sweep.items() if loss < NEAR * min(sweep.values())]
    starts = [case.followed(rate) for rate in RATES]
    means = {rate: case.mean_loss(rate) for rate in sorted({*near, *(runs[-1]["rate"] for runs in starts)})}
    best = min(means[rate] for rate in near)
    for runs in starts:
        path, last = " -> ".join(f"{each['rate']:.2g}" for each in runs), means[runs[-1]["rate"]]
        print(f"{path}: {last / best - 1:+.2%} above the best of the sweep", flush=True)
    return {"sweep": sweep, "means": means, "best": best, "starts": starts}


def main() -> None:
    """Runs the cases that are named, and prints a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="CASE=FOLDER", help=f"one of {', '.join(CASES)}, and its text")
    parser.add_argument("--steps", type=int, default=400)
    add_json_option(parser)
    options = parser.parse_args()
    found = {}
    for case, _, folder in (given.partition("=") for given in options.cases):
        found[case] = compared(Case(case, Path(folder), options.steps))
        write_record(options.json, {"steps": options.steps, "cases": found})


if __name__ == "__main__":
    main()
