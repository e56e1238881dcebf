"""What asynchronous checkpoints cost the training loop: the steps behind one beside the steps long after it.

python bench/checkpoint_cost.py --preset llama-4m --checkpoints 20 --every 30 --json bench/results/checkpoint_cost.json

One whole run of the loop as `sheepop train` has it, on a corpus of the standard library, with a checkpoint every few
steps. Each step is timed by the clock on the wall, from one row of ``metrics.jsonl`` to the next: the copies that the
loop waits for are in it, and what the writing takes away from the steps beside it. Of the steps from one checkpoint to
the next the first half bears its cost and the second half does not; the difference of their means, over all of
them, is what a checkpoint costs. The one at the end of the run, for which there is nothing left to overlap with, is
left out. How much longer the first steps took one by one, by medians over the checkpoints, shows that the writing was
over within its half; their sum is a second measure, which single slow steps do not move.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from record import add_json_option, write_record
from sheepop.checkpoint import RunDirectory
from sheepop.core.config import read_config_file
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.core.json_lines import read_json_lines
from sheepop.jobs.config import SheepOpConfig, load_config
from sheepop.jobs.data import build
from sheepop.jobs.run import train as job
from sheepop.jobs.run.request import RunRequest
from sheepop.model.accounting.cost import num_parameters
from texts import code_files

VOCABULARY = 2048
CODE_BYTES = 1_500_000
SHOWN = 8  # steps behind a checkpoint in the table
MEBIBYTE = 2**20


def write_corpus(place: Path) -> Path:
    """A corpus of some of the standard library's modules, none of it held out."""
    text, size = place / "text", 0
    text.mkdir()
    for number, (_, data) in enumerate(code_files()):
        (text / f"{number:04}.py").write_bytes(data)
        size += len(data)
        if size >= CODE_BYTES:
            break
    settings = [f"tokenizer.vocab_size={VOCABULARY}", "data.validation_fraction=0"]
    build([str(text), *settings], place / "corpus", None, Console.silent())
    return place / "corpus"


def train(corpus: Path, run: Path, options: argparse.Namespace) -> SheepOpConfig:
    """Trains in the precision and compilation that a run chooses here; returns the resolved configuration."""
    given = (
        f"data.paths={corpus}",
        f"output_dir={run}",
        f"device={options.device}",
        f"model.preset={options.preset}",
        f"training.max_steps={(options.checkpoints + 1) * options.every}",
        f"training.global_batch_size={options.rows}",
        f"training.checkpoint_interval={options.every}",
        "training.keep_milestones=false",
        f"training.sample_interval={(options.checkpoints + 1) * options.every}",
        "training.log_interval=1",
    )
    job.train(RunRequest.exactly(load_config(overrides=given)))
    return load_config(base=read_config_file(run / "config.yaml"))


def seconds_by_distance(rows: list[dict[str, Any]], every: int) -> NDArray[np.float64]:
    """Seconds of the steps (checkpoints, `every`): in column i those of the step that is i + 1 behind a checkpoint."""
    at = np.array([row["seconds"] for row in rows if row["split"] == "train"])
    steps = np.diff(at)  # of the second step and those after it
    return steps[every - 1 :].reshape(-1, every)


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """The cost of a checkpoint, its standard error over the checkpoints, and what it is a share of."""
    config = train(write_corpus(place), place / "run", options)
    rows, _ = read_json_lines(place / "run" / "metrics.jsonl")
    checkpoint = RunDirectory(place / "run").checkpoint((options.checkpoints + 1) * options.every)
    seconds, half = seconds_by_distance(rows, options.every), options.every // 2
    costs = half * (seconds[:, :half].mean(1) - seconds[:, half:].mean(1))
    step = float(seconds[:, half:].mean())
    between = options.every * step
    longer = np.median(seconds, axis=0) / np.median(seconds[:, half:]) - 1
    return {
        "preset": options.preset,
        "parameters": num_parameters(config.model),
        "device": options.device,
        "precision": config.training.precision,
        "compiled": config.training.compile,
        "rows": options.rows,
        "every": options.every,
        "checkpoints": len(costs),
        "checkpoint_bytes": sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()),
        "seconds_per_step": step,
        "seconds_per_checkpoint": float(costs.mean()),
        "share": float(costs.mean()) / between,
        "standard_error": float(costs.std(ddof=1)) / len(costs) ** 0.5 / between,
        "share_by_medians": float(longer[:half].sum()) / options.every,
        "longer_by_distance": longer.tolist(),
    }


def main() -> None:
    """Measures, prints the table and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-4m", help="model preset")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--checkpoints", type=int, default=20, help="checkpoints whose cost is measured")
    parser.add_argument("--every", type=int, default=30, help="steps from one checkpoint to the next")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    add_json_option(parser)
    options = parser.parse_args()
    if options.every < 4 or options.checkpoints < 2:
        parser.error("--every must be at least 4 and --checkpoints at least 2")
    options.device = resolve_device(options.device)
    with tempfile.TemporaryDirectory() as place:
        found = measure(options, Path(place))
    print(
        f"{found['preset']} ({found['parameters']:,} parameters), {found['precision']}, {found['rows']} rows a step of "
        f"{found['seconds_per_step'] * 1e3:,.0f} ms, {found['checkpoint_bytes'] / MEBIBYTE:,.0f} MiB a checkpoint"
    )
    print(
        f"{found['checkpoints']} checkpoints, one every {options.every} steps: "
        f"{found['seconds_per_checkpoint'] * 1e3:,.0f} ms each, "
        f"{found['share']:.2%} of the time (standard error {found['standard_error']:.2%})"
    )
    longer = ", ".join(f"{share:+.0%}" for share in found["longer_by_distance"][:SHOWN])
    print(
        f"the steps behind a checkpoint took longer by: {longer}; together {found['share_by_medians']:.2%} of the time"
    )
    write_record(options.json, found)


if __name__ == "__main__":
    main()
