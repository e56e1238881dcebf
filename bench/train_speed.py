"""Training speed: tokens per second and share of the machine's matrix peak, or beside nanoGPT in the same run.

python bench/train_speed.py --seconds 10 --json bench/results/train_speed.json
python bench/train_speed.py --against ../nanoGPT --json bench/results/train_speed_against.json
python bench/train_speed.py --against ../nanoGPT --device cuda --shapes gpt2 --batch 32 --seq-len 1024

With --against both train nanoGPT's network from the same weights on the same rows, each in a process of its own and
in turn. A ratio above 1 says that SheepOp is faster; "ratios" are against nanoGPT's fastest setting that keeps
float32 weights. The exit code is 1 when the losses differ by more than 0.5 percent.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from measure import add_options, run
from record import write_record

PRESETS = ("llama-1m", "llama-4m", "sheepop-tiny")


def main() -> int:
    """Measures what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, PRESETS)
    against = parser.add_argument_group("beside nanoGPT")
    against.add_argument("--against", type=Path, metavar="PATH", help="a checkout of nanoGPT")
    against.add_argument("--shapes", nargs="+", choices=("small", "gpt2"), default=["small", "gpt2"])
    against.add_argument("--settings", nargs="+", help="of nanoGPT's, by name; fp32, the reference, is always run")
    against.add_argument("--batch", type=int, help="rows per step instead of the shape's own")
    against.add_argument("--seq-len", type=int, help="tokens per row instead of the shape's own")
    against.add_argument("--rounds", type=int, default=5, help="turns of each")
    against.add_argument("--warmup", type=int, default=5, help="steps before, whose losses are compared")
    beside = {name: parser.get_default(name) for name in ("shapes", "settings", "batch", "seq_len", "rounds", "warmup")}
    options = parser.parse_args()
    if options.against is None:
        if ignored := [f"--{name.replace('_', '-')}" for name in beside if getattr(options, name) != beside[name]]:
            parser.error(f"{', '.join(ignored)} is for --against")
        run("train", options)
        return 0
    if not (options.against / "model.py").is_file():
        parser.error(f"{options.against} holds no model.py; --against takes a checkout of nanoGPT")
    return compare(options)


def compare(options: argparse.Namespace) -> int:
    """Runs the races, prints the table, writes the JSON."""
    import training_race
    from sheepop.core.device import resolve_device

    device = resolve_device(options.device)
    pace = training_race.Pace(options.warmup, options.rounds, options.seconds)
    unknown = set(options.settings or ()) - training_race.SETTINGS.keys()
    if unknown:
        sys.exit(f"unknown settings {sorted(unknown)}; known: {', '.join(training_race.SETTINGS)}")
    changes = {"batch": options.batch, "seq_len": options.seq_len}
    results = {}
    for name in options.shapes:
        shape = replace(
            training_race.SHAPES[name], **{key: value for key, value in changes.items() if value is not None}
        )
        results[name] = training_race.race(name, shape, str(options.against.resolve()), device, pace, options.settings)
    print("\n".join(training_race.table(results)))
    report = training_race.report(results, device)
    write_record(options.json, report)
    return 0 if report["equal_work"] else 1


if __name__ == "__main__":
    sys.exit(main())
