"""Generation speed of one sequence with the key-value cache, for a few model sizes.

python bench/generate_speed.py --seconds 10 --json bench/results/generate_speed.json
"""

from __future__ import annotations

from measure import run

if __name__ == "__main__":
    run("generate", __doc__, presets=("llama-1m", "llama-4m", "sheepop-tiny"))
