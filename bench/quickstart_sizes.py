"""Which model makes the most of a quickstart's minutes: trains the sizes asked for on the same text, one by one.

    python bench/quickstart_sizes.py --minutes 5 --sizes 128x4x128 160x4x128 128x4x256 --json sizes.json

A size is width x layers x row length. Each run has its own directory below --output, and its report.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from record import add_json_option, write_record
from sheepop.core.console import Console
from sheepop.jobs.bench import training_speed
from sheepop.jobs.quickstart import library_paths
from sheepop.jobs.recipe import complete, draft
from sheepop.jobs.run.request import RunRequest
from sheepop.jobs.run.train import train

_TOKENS_PER_STEP = 2048


def parse_size(text: str) -> dict[str, Any]:
    """``128x4x256``: width 128, 4 layers, rows of 256 tokens."""
    d_model, num_layers, max_seq_len = map(int, text.split("x"))
    return {"d_model": d_model, "num_layers": num_layers, "max_seq_len": max_seq_len}


def main() -> None:
    """Trains every size and prints one row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["128x4x128", "128x4x256", "160x4x128"])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=8e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/sizes"))
    add_json_option(parser)
    options = parser.parse_args()
    paths, ignore = library_paths()
    rows = []
    for text in options.sizes:
        model = parse_size(text)
        training = {
            "max_minutes": options.minutes,
            "learning_rate": options.learning_rate,
            "global_batch_size": _TOKENS_PER_STEP // model["max_seq_len"],
        }
        given = {
            "model": model,
            "tokenizer": {"vocab_size": options.vocab_size},
            "data": {"paths": paths, "ignore": ignore},
            "training": training,
            "output_dir": str(options.output / text),
        }
        outcome = train(RunRequest.exactly(complete(draft(given), training_speed, Console()).config))
        assert outcome.scores is not None
        rows.append({"size": text, "steps": outcome.steps, "tokens": outcome.tokens, **outcome.scores.to_dict()})
        print(f"{text:<14} {outcome.tokens:>12,} tokens  {outcome.scores.bits_per_byte:.4f} bits per byte", flush=True)
    write_record(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
