"""Attention to the blocks of the paged cache on a CPU, beside PyTorch's attention to whole tensors.

python bench/paged_attention.py --json bench/results/paged_attention.json

A chunk is the tokens of one prompt, perhaps behind others. Single tokens belong to texts of equal length, whose blocks
lie in memory as they came. Each layer has a cache of its own, so that those of many texts come from memory as in a step
of a network. Figures are milliseconds of processor time for one layer, medians of several rounds, and the bytes of keys
and values that are read per second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from record import add_json_option, write_record
from sheepop.generate.paged_kernels import AttentionMetadata, KVBlocks, attend_natively
from sheepop.model.attention.kernel import PLAIN

SIZE, TILE, LAYERS = 16, 64, 12  # tokens of a block and of a tile, and caches
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Heads:
    """The heads of queries, those of keys, and the numbers of each."""

    queries: int
    keys: int
    width: int


SHAPES = {"wide": Heads(10, 5, 64), "gpt2": Heads(12, 12, 64), "gemma": Heads(4, 1, 256)}
CHUNKS = ((64, 0), (512, 0), (1000, 0), (4000, 0), (20, 2000))  # tokens, and those before
TEXTS = ((1, 1000), (8, 1000), (32, 16), (32, 128), (32, 1000))  # texts, and their tokens


def metadata(starts: list[int], count: int) -> AttentionMetadata:
    """The metadata of `count` tokens of each text, behind its first `start`, in blocks at random places."""
    width = -(-(max(starts) + count) // SIZE)
    table = torch.randperm(len(starts) * width).view(len(starts), width)
    positions = torch.cat([torch.arange(start, start + count) for start in starts])
    texts = torch.arange(len(starts)).repeat_interleave(count)
    tiles = [
        (text * count + first, min(TILE, count - first), start + first, text)
        for text, start in enumerate(starts)
        for first in range(0, count, TILE)
    ]
    slots = table[texts, positions // SIZE], positions % SIZE
    return AttentionMetadata(torch.arange(len(positions)), table, positions, slots, None, torch.tensor(tiles))


def median_time(work: Callable[[int], Any], rounds: int) -> float:
    """The median processor time of the work for a layer, in seconds, over rounds through all layers."""
    found = []
    for _ in range(rounds + 1):
        begin = time.process_time()
        for layer in range(LAYERS):
            work(layer)
        found.append((time.process_time() - begin) / LAYERS)
    return statistics.median(found[1:])


def measure(heads: Heads, starts: list[int], count: int, rounds: int) -> dict[str, float]:
    """Times attention of `count` tokens behind the first ones of each text."""
    about, total = metadata(starts, count), max(starts) + count
    shape = (about.block_table.numel() + 1, heads.keys, SIZE, heads.width)
    caches: list[tuple[KVBlocks, KVBlocks]] = []
    for _ in range(LAYERS):
        keys, values = (KVBlocks(shape, torch.float32, CPU, torch.float32) for _ in range(2))
        for blocks in (keys, values):
            blocks.numbers.normal_()
        caches.append((keys, values))
    q_RHC = torch.randn(len(about.rows), heads.queries, heads.width)
    seconds = median_time(lambda layer: attend_natively(q_RHC, *caches[layer], about, PLAIN, None), rounds)
    whole = [torch.randn(LAYERS, len(starts), heads.keys, total, heads.width) for _ in range(2)]
    q_BHTC = q_RHC.view(len(starts), count, heads.queries, heads.width).transpose(1, 2)
    places, is_causal = torch.arange(total), 1 < count == total
    mask = None if is_causal or count == 1 else places <= places[-count:, None]

    def by_torch(layer: int) -> Tensor:
        keys, values = (part[layer] for part in whole)
        is_shared = heads.queries > heads.keys
        return F.scaled_dot_product_attention(q_BHTC, keys, values, mask, is_causal=is_causal, enable_gqa=is_shared)

    read = 2 * len(starts) * total * heads.keys * heads.width * torch.float32.itemsize
    return {
        "milliseconds": seconds * 1e3,
        "gigabytes_per_second": read / seconds / 1e9,
        "torch_milliseconds": median_time(by_torch, rounds) * 1e3,
    }


def main() -> None:
    """Measures, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    works = {f"{count} tokens after {start}": ([start], count) for count, start in CHUNKS}
    works |= {f"{texts} texts of {length}": ([length - 1] * texts, 1) for texts, length in TEXTS}
    rows = []
    print(f"{'work':<24} {'shape':<6} {'ms':>8} {'GB/s':>6} {'PyTorch, ms':>12}")
    for name, (starts, count) in works.items():
        for shape, heads in SHAPES.items():
            found = measure(heads, starts, count, options.rounds)
            rows.append({"work": name, "shape": shape, **found})
            speed = f"{found['gigabytes_per_second']:>6.1f}" if count == 1 else f"{'':>6}"
            print(f"{name:<24} {shape:<6} {found['milliseconds']:>8.3f} {speed} {found['torch_milliseconds']:>12.3f}")
    write_record(options.json, {"threads": options.threads, "rounds": options.rounds, "results": rows})


if __name__ == "__main__":
    main()
