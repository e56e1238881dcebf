"""What asynchronous checkpoints cost the training loop: the same training without any and with one every few steps.

python bench/checkpoint_cost.py --preset llama-15m --steps 120 --every 30 --json bench/results/checkpoint_cost.json

Both are whole runs of the loop as `sheepop train` has it, in turn, on the same corpus, of the standard library. The
seconds are those between the first and the last row of ``metrics.jsonl``, by the clock on the wall: the copies that
the loop waits for are in it, and what the writing takes away from the steps beside it. The checkpoint at the end of a
run, for which there is nothing left to overlap with, is not. The ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from record import add_json_option, write_record
from sheepop.checkpoint import RunDirectory
from sheepop.core.config import read_config_file
from sheepop.core.console import Console
from sheepop.core.device import resolve_device
from sheepop.jobs.config import load_config
from sheepop.jobs.data import build
from sheepop.jobs.train import run_training
from sheepop.model.cost import num_parameters
from sheepop.train import loop
from sheepop.train.metrics import read_json_lines
from texts import code_files

VOCABULARY = 2048
CODE_BYTES = 1_500_000
FIRST_ROW = 5  # steps before the timed ones
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


def train_once(corpus: Path, run: Path, options: argparse.Namespace, every: int, *settings: str) -> dict[str, Any]:
    """Trains once; the seconds of the timed steps, the loss of the last, and the bytes of a checkpoint."""
    given = (
        f"data.paths={corpus}",
        f"output_dir={run}",
        f"device={options.device}",
        f"model.preset={options.preset}",
        f"training.max_steps={options.steps}",
        f"training.global_batch_size={options.rows}",
        f"training.checkpoint_interval={every}",
        f"training.sample_interval={options.steps}",
        f"training.log_interval={FIRST_ROW}",
        *settings,
    )
    run_training(load_config(overrides=given))
    rows, _ = read_json_lines(run / "metrics.jsonl")
    checkpoint = RunDirectory(run).checkpoint(options.steps)
    return {
        "seconds": rows[-1]["seconds"] - rows[0]["seconds"],
        "loss": rows[-1]["loss"],
        "bytes": sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()),
    }


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Both in turn, `options.rounds` times, in the precision and compilation that a run chooses here."""
    # A run keeps checkpoints of these shares of its steps whatever it is told; here they would be in both.
    vars(loop)["MILESTONES"] = ()
    corpus = write_corpus(place)
    first = train_once(corpus, place / "first", options, options.steps)
    config = load_config(base=read_config_file(place / "first" / "config.yaml"))
    chosen = (f"training.precision={config.training.precision}", f"training.compile={config.training.compile}")
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds):
        found = {}
        for name, every in (("none", options.steps), ("checkpoints", options.every)):
            done = train_once(corpus, place / f"{name}-{number}", options, every, *chosen)
            if done["loss"] != first["loss"]:
                raise SystemExit(f"a training lost {done['loss']}, another {first['loss']}: it is not the same work")
            found[name] = done["seconds"]
        rounds.append(found)
    count = (options.steps - 1) // options.every
    medians = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    return {
        "preset": options.preset,
        "parameters": num_parameters(config.model),
        "device": options.device,
        "precision": config.training.precision,
        "compiled": config.training.compile,
        "rows": options.rows,
        "steps": options.steps - FIRST_ROW,
        "every": options.every,
        "checkpoints": count,
        "checkpoint_bytes": first["bytes"],
        "seconds": medians,
        "seconds_per_checkpoint": (medians["checkpoints"] - medians["none"]) / count,
        "ratio": statistics.median(found["checkpoints"] / found["none"] for found in rounds),
        "rounds": rounds,
    }


def main() -> None:
    """Measures, prints the table and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-4m", help="model preset")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--steps", type=int, default=120, help="steps of a training")
    parser.add_argument("--every", type=int, default=30, help="steps from one checkpoint to the next")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    add_json_option(parser)
    options = parser.parse_args()
    if not FIRST_ROW < options.every < options.steps:
        parser.error(f"--every must be more than {FIRST_ROW} and less than --steps")
    options.device = resolve_device(options.device)
    with tempfile.TemporaryDirectory() as place:
        found = measure(options, Path(place))
    print(
        f"{found['preset']} ({found['parameters']:,} parameters), {found['precision']}, {found['rows']} rows a step, "
        f"{found['checkpoint_bytes'] / MEBIBYTE:,.0f} MiB a checkpoint"
    )
    print(f"{'training':<24} {'checkpoints':>11} {'seconds':>9} {'step':>10} {'ratio':>7}")
    lines = (
        ("without", 0, found["seconds"]["none"], 1.0),
        (f"one every {options.every} steps", found["checkpoints"], found["seconds"]["checkpoints"], found["ratio"]),
    )
    for name, count, seconds, ratio in lines:
        print(f"{name:<24} {count:>11} {seconds:>9.2f} {seconds / found['steps'] * 1e3:>7,.0f} ms {ratio:>7.3f}")
    write_record(options.json, found)


if __name__ == "__main__":
    main()
