"""Which model makes the most of a quickstart's minutes: trains the sizes asked for on the same text, one by one.

    python bench/quickstart_sizes.py --minutes 5 --sizes 128x4x128 160x4x128 128x4x256 --json sizes.json

A size is width x layers x row length. Each run has its own directory below --output, and its report.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from record import add_json_option, write_record
from sheepop.jobs.config import load_config
from sheepop.jobs.quickstart_recipe import SIZES, Size, library_paths, recipe
from sheepop.jobs.train import train

_TOKENS_PER_STEP = 2048


def parse_size(text: str, vocab_size: int, learning_rate: float) -> Size:
    """``128x4x256``: width 128, 4 layers, rows of 256 tokens; heads are 32 wide."""
    d_model, num_layers, max_seq_len = map(int, text.split("x"))
    return replace(
        SIZES[0],
        d_model=d_model,
        num_layers=num_layers,
        num_heads=max(1, d_model // 32),
        max_seq_len=max_seq_len,
        vocab_size=vocab_size,
        learning_rate=learning_rate,
        batch_size=_TOKENS_PER_STEP // max_seq_len,
    )


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
        size = parse_size(text, options.vocab_size, options.learning_rate)
        tree = recipe(size, {"vocab_size": options.vocab_size}, paths=paths, ignore=ignore, minutes=options.minutes)
        outcome = train(load_config(base=tree, options={"output_dir": str(options.output / text)}))
        assert outcome.scores is not None
        rows.append({"size": text, "steps": outcome.steps, "tokens": outcome.tokens, **outcome.scores.to_dict()})
        print(f"{text:<14} {outcome.tokens:>12,} tokens  {outcome.scores.bits_per_byte:.4f} bits per byte", flush=True)
    write_record(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
