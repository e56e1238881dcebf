"""What a bfloat16 training step takes beside its products of matrices: SheepOp's and nanoGPT's, in turn.

python bench/step_overhead.py --against ../nanoGPT --json bench/results/step_overhead.json

Products and the attention kernel are the same for both. Here they are left out, so that the rest, which is what a
training loop can be better at, is compared on any CPU, also on one that only emulates bfloat16. Networks, rows and
optimizer are those of `train_speed.py --against`; the losses mean nothing. A ratio above 1 says that SheepOp's rest is
shorter. Memory is the peak of the whole process.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from contestants import Contestant
from record import add_json_option, write_record
from training_race import SETTINGS, SHAPES, Pace, duel

COMPARED = [name for name, (precision, _) in SETTINGS.items() if "bf16" in precision]


def main() -> None:
    """Runs the comparisons, prints the table and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, metavar="PATH", help="a checkout of nanoGPT")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--settings", nargs="+", choices=COMPARED, default=COMPARED, help="of nanoGPT's")
    parser.add_argument("--eager", action="store_true", help="do not compile SheepOp's network")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each")
    parser.add_argument("--seconds", type=float, default=3.0, help="of work in a turn")
    add_json_option(parser)
    options = parser.parse_args()
    if not (options.against / "model.py").is_file():
        parser.error(f"{options.against} holds no model.py; --against takes a checkout of nanoGPT")
    pace = Pace(warmup_steps=2, rounds=options.rounds, seconds=options.seconds)
    print(f"{'shape':<6} {'nanoGPT':<23} {'rest':>9} {'SheepOp':>9} {'ratio':>6} {'peak MB':>8} {'SheepOp':>8}")
    results: dict[str, dict[str, Any]] = {}
    for name in options.shapes:
        shape = SHAPES[name]
        own = Contestant(shape, "cpu", "bf16", compiled=not options.eager, products=False)
        results[name] = {}
        for setting in options.settings:
            precision, compiled = SETTINGS[setting]
            other = replace(own, precision=precision, compiled=compiled, nanogpt=str(options.against.resolve()))
            found = duel(own, other, pace)
            results[name][setting] = {key: value for key, value in found.items() if key != "losses"}
            own_rest, rest = (f"{shape.tokens / rate * 1e3:,.0f} ms" for rate in found["tokens_per_second"])
            own_memory, memory = (f"{size / 1e6:,.0f}" for size in found["peak_memory"])
            print(
                f"{name:<6} {setting:<23} {rest:>9} {own_rest:>9} {found['ratio']:>6.2f} {memory:>8} {own_memory:>8}",
                flush=True,
            )
    write_record(options.json, {"compiled": not options.eager, "shapes": results})


if __name__ == "__main__":
    main()
