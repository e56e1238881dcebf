"""Trains a tiny model on a folder of text and lets it write.

Example:  python examples/train_and_write.py notes/ --steps 200 --prompt "The "
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sheepop.jobs.train import train

import sheepop
from sheepop.core.console import Console
from sheepop.jobs.config import load_config


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Train a tiny model on a folder of text and let it write.")
    parser.add_argument("folder", type=Path, help="files to learn from")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/example"), help="run directory; a run there is replaced"
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--width", type=int, default=128, help="d_model, the width of the network")
    parser.add_argument("--vocabulary", type=int, default=1024, help="tokens of the vocabulary")
    parser.add_argument("--prompt", default="The ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to write")
    arguments = parser.parse_args()

    # The same tree that a YAML file gives to `sheepop train --config`.
    settings = {
        "model": {"preset": "llama-1m", "d_model": arguments.width, "num_heads": 4, "max_seq_len": 128},
        "tokenizer": {"vocab_size": arguments.vocabulary},
        "data": {"paths": [str(arguments.folder)]},
        "training": {"max_steps": arguments.steps, "global_batch_size": 8, "optimizer": "muon", "learning_rate": 0.01},
        "output_dir": str(arguments.output),
    }
    outcome = train(load_config(base=settings), overwrite=True, console=Console())
    print(f"Held out: {outcome.scores}")

    lm = sheepop.load(outcome.run)
    completion = lm.generate(arguments.prompt, max_new_tokens=arguments.tokens, seed=1)
    print(arguments.prompt + completion.text)


if __name__ == "__main__":
    main()
