"""Generation speed of one sequence with the key-value cache, for a few model sizes.

python bench/generate_speed.py --seconds 10 --json bench/results/generate_speed.json
"""

from __future__ import annotations

import argparse

from measure import add_options, run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, ("llama-1m", "llama-4m", "sheepop-tiny"))
    run("generate", parser.parse_args())
