"""Training speed: tokens per second and share of the machine's matrix peak, for a few model sizes.

python bench/train_speed.py --seconds 10 --json bench/results/train_speed.json
"""

from __future__ import annotations

from measure import run

if __name__ == "__main__":
    run("train", __doc__, presets=("llama-1m", "llama-4m", "sheepop-tiny"))
