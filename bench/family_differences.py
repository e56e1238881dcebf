"""How near the networks of other programs are: the largest difference from transformers and from llama.cpp's package.

Each toy family of the tests (`tests/parity/conftest.py`), with drawn weights and its switches away from their defaults,
is written by transformers, imported, and reads the same drawn tokens in both programs, in float32. Of each quantised
type of GGUF ten drawn rows are decoded by SheepOp and by the package `gguf`.

python bench/family_differences.py --json bench/results/family_differences.json
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import torch

from record import add_json_option, write_record
from sheepop.checkpoint import load_model
from sheepop.checkpoint.gguf.quantized_types import TYPES
from sheepop.jobs.exchange import import_model
from sheepop.tokenizer import CharTokenizer

TESTS = Path(__file__).parents[1] / "tests"
TOKENS = 128  # the toys have a few more rows
_PER_LINE = 4  # families of the table


def tests_file(path: str) -> ModuleType:
    """A file of the tests as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, TESTS / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def of_family(theirs: Any) -> tuple[float, float]:
    """The largest difference of the logits (3, 40, V) of a network of transformers, and the largest logit."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder) / "theirs")
        CharTokenizer().save(Path(folder) / "theirs")
        import_model(Path(folder) / "theirs", Path(folder) / "ours")
        ours = load_model(Path(folder) / "ours").model
    ids = torch.randint(4, TOKENS, (3, 40), generator=torch.Generator().manual_seed(0))
    logits = theirs(ids).logits
    return float((ours(ids) - logits).abs().max()), float(logits.abs().max())


def of_type(name: str, random_blocks: Any) -> float:
    """The largest difference between the numbers of ten rows of a type."""
    rows = random_blocks(name, 30).reshape(10, -1)
    theirs = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name.upper()])
    return float(np.abs(TYPES[name].decode(torch.from_numpy(rows), theirs.shape[1]).numpy() - theirs).max())


def main() -> None:
    """Prints both tables and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json_option(parser)
    options = parser.parse_args()
    toys, blocks = tests_file("parity/conftest.py"), tests_file("checkpoint/gguf/test_quantized_types.py")
    families: dict[str, tuple[float, float]] = {}
    for toy in toys.TOYS:
        network = toys.build(toy)
        kind = network.config.model_type
        families[kind] = max(families.get(kind, (0.0, 0.0)), of_family(network))
    cells = [f"`{kind}` | {difference:.1e}" for kind, (difference, _) in sorted(families.items())]
    for begin in range(0, len(cells), _PER_LINE):
        print(f"| {' | '.join(cells[begin : begin + _PER_LINE])} |")
    types = {name: of_type(name, blocks.random_blocks) for name in blocks.BLOCK_TYPES}
    for name, difference in types.items():
        print(f"{name}: {difference:g}")
    write_record(options.json, {"families": families, "types": types})


if __name__ == "__main__":
    main()
