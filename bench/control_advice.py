"""A learning rate chosen by the advice of a run's analysis, beside the best of a sweep of nine rates.

    python bench/control_advice.py files/ --steps 300 --json bench/results/control_advice.json

A small model of characters trains on the text files at each of nine rates. Then it trains at the highest of these with
`analysis.quantities=[sharpness]`, and as long as the analysis advises a lower rate, it trains again at that rate. The
table compares the held-out loss of the last run with the best of the sweep.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

from record import add_json_option, write_record
from sheepop.core.json_lines import read_json_lines
from sheepop.interpret.control.advice import LAYER, RATE, Advice, advice_of
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


def held_out_loss(data: Path, steps: int, rate: float, *settings: str) -> tuple[float, list[Advice]]:
    """Trains once; returns the held-out loss in nats per token (infinite if the run failed) and its advice."""
    with tempfile.TemporaryDirectory() as folder:
        given = (f"data.paths={data}", f"training.max_steps={steps}", f"training.learning_rate={rate}")
        places = (
            f"training.eval_interval={steps}",
            f"training.checkpoint_interval={steps}",
            f"output_dir={folder}/run",
        )
        config = load_config(overrides=(*SETTINGS, *given, *places, *settings))
        outcome = train(RunRequest.exactly(config))
        loss = outcome.scores.loss if outcome.scores is not None else math.inf
        return loss, advice_of(read_json_lines(outcome.run / "metrics.jsonl").rows)


def main() -> None:
    """Runs the sweep and the advised runs, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder of text")
    parser.add_argument("--steps", type=int, default=300)
    add_json_option(parser)
    options = parser.parse_args()
    print(f"{'rate':>9}  held-out loss", flush=True)
    sweep = {}
    for rate in RATES:
        sweep[rate], _ = held_out_loss(options.data, options.steps, rate)
        print(f"{rate:9.2g}  {sweep[rate]:.4f}", flush=True)
    watched = (
        "analysis.quantities=[sharpness]",
        f"analysis.interval={max(1, options.steps // 20)}",
        "analysis.rows=16",
    )
    rate, advised = RATES[-1], []
    while len(advised) < MOST_RUNS:
        loss, advice = held_out_loss(options.data, options.steps, rate, *watched)
        found = next((each for each in advice if each.cause in (RATE, LAYER)), None)
        advised.append({"rate": rate, "loss": loss, "advice": found.words if found else None})
        print(f"{rate:9.2g}  {loss:.4f}  {found.words if found else 'no advice'}", flush=True)
        if found is None:
            break
        rate *= found.changes["training.learning_rate"]
    best = min(sweep, key=sweep.__getitem__)
    above = advised[-1]["loss"] / sweep[best] - 1
    print(f"best of the sweep: {best:.2g} with {sweep[best]:.4f}; advised: {above:+.2%}")
    numbers = {"steps": options.steps, "sweep": sweep, "advised": advised, "above_best": above}
    write_record(options.json, numbers)


if __name__ == "__main__":
    main()
