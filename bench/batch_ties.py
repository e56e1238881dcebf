"""How often a text is another one because of what is written beside it.

In float32 the products of many rows are rounded in another order than those of one, so two tokens that are nearly tied
may change places. Prompts of a few random tokens are continued one after the other and all at once, with the likeliest
token every time and drawn at temperature 1. A batch-invariant engine must not tell them apart.

python bench/batch_ties.py runs/quickstart --json bench/results/batch_ties.json
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from record import add_json_option, write_record
from sheepop.checkpoint import load_model
from sheepop.generate import GenerationConfig, Generator

TEXTS, TOKENS = 256, 64


def measure(generator: Generator, config: GenerationConfig) -> dict[str, Any]:
    """Texts that differ, and the tokens of all texts up to where they do."""
    drawn = torch.Generator().manual_seed(0)
    prompts = torch.randint(generator.model.config.vocabulary, (TEXTS, 4), generator=drawn).tolist()
    ways = [generator.generate(prompts, config, batched=batched) for batched in (True, False)]
    differ, tokens = 0, 0
    for together, alone in zip(*ways, strict=True):
        same = [one == other for one, other in zip(together.token_ids, alone.token_ids, strict=True)]
        differ += not all(same)
        tokens += TOKENS if all(same) else same.index(False)
    return {"texts": TEXTS, "differ": differ, "tokens": tokens}


def main() -> None:
    """Measures, prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run, checkpoint or model directory")
    add_json_option(parser)
    given = parser.parse_args()
    loaded = load_model(given.model)
    generator = Generator(loaded.model, loaded.tokenizer)
    found = []
    for is_invariant in (False, True):
        for temperature in (0.0, 1.0):
            config = GenerationConfig(
                max_new_tokens=TOKENS, min_new_tokens=TOKENS, temperature=temperature, top_p=1.0, seed=1,
                batch_invariant=is_invariant,
            )  # fmt: skip
            row = {"temperature": temperature, "batch_invariant": is_invariant, **measure(generator, config)}
            kind = "batch-invariant" if is_invariant else "as usual"
            print(
                f"temperature {temperature}, {kind:<15}: {row['differ']} of {row['texts']} texts differ, after "
                f"{row['tokens']:,} tokens in common"
            )
            found.append(row)
    write_record(given.json, {"results": found})


if __name__ == "__main__":
    main()
