"""Shows the ten tokens that a model finds likeliest after a prompt.

Example:  python examples/next_token.py runs/quickstart "def main("
"""

from __future__ import annotations

import argparse

import torch

import sheepop

COLUMNS = 40


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Show the tokens that a model finds likeliest after a prompt.")
    parser.add_argument("model", help="a run, checkpoint or model directory")
    parser.add_argument("prompt", help="the text before the token")
    parser.add_argument("--count", type=int, default=10, help="tokens to show")
    arguments = parser.parse_args()

    lm = sheepop.load(arguments.model)
    prompt_ids = [*lm.tokenizer.prefix_ids, *lm.tokenizer.encode(arguments.prompt)]
    input_ids = torch.tensor([prompt_ids], device=lm.model.embedding.weight.device)
    with torch.inference_mode():
        logits = lm.model(input_ids, logits_to_keep=1)  # (1, 1, V): only the last position is needed
    probabilities = logits[0, -1].softmax(dim=-1)

    count = min(arguments.count, len(probabilities))
    for probability, token_id in zip(*(column.tolist() for column in probabilities.topk(count)), strict=True):
        token = lm.tokenizer.decode([token_id], skip_special=False)
        bar = "#" * round(probability * COLUMNS)
        print(f"{probability:7.2%}  {bar:<{COLUMNS}}  {token_id:>6}  {token!r}")


if __name__ == "__main__":
    main()
