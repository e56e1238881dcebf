"""Compares character and byte-pair tokenizers by the bytes of text that one token holds.

Example:  python examples/compare_tokenizers.py book.txt --sizes 512 1024 4096
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sheepop.core.console import Console
from sheepop.tokenizer import TokenizerConfig, train_tokenizer


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="Compare tokenizers by the bytes of text that one token holds.")
    parser.add_argument("file", type=Path, help="UTF-8 text; the first 90 percent train, the rest is measured")
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1024], help="sizes of BPE vocabularies")
    arguments = parser.parse_args()

    text = arguments.file.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    training, measured = text[:cut], text[cut:]
    num_bytes = len(measured.encode("utf-8"))

    configs = [TokenizerConfig(algorithm="char", vocab_size=2**20)]
    configs += [TokenizerConfig(algorithm="bpe", vocab_size=size) for size in arguments.sizes]
    print(f"{'algorithm':<10} {'vocabulary':>10} {'tokens':>10} {'bytes per token':>16}")
    for config in configs:
        tokenizer = train_tokenizer(config, [training], console=Console.silent())
        num_tokens = len(tokenizer.encode(measured))
        print(f"{config.algorithm:<10} {tokenizer.vocab_size:>10,} {num_tokens:>10,} {num_bytes / num_tokens:>16.3f}")


if __name__ == "__main__":
    main()
