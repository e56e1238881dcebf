"""How many tokens a second the engine writes for many requests that arrive together, in the shape of Qwen3 0.6B.

python bench/throughput.py --device cuda --json bench/results/throughput.json
python bench/throughput.py --device cuda --cache-dtypes auto int8 fp8
python bench/throughput.py --requests 4 --most 64

The weights are drawn. Prompts have 100 to 1,024 tokens and as many are written, drawn anew for each request, which is
what nano-vllm measures itself with.
"""

from __future__ import annotations

import argparse
import time
from typing import get_args

import numpy as np
import torch

from record import add_json_option, write_record
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.config import CacheDtype
from sheepop.model import ModelConfig, build_model
from sheepop.tokenizer import CharTokenizer

SHAPE = {
    "vocab_size": 151936,
    "d_model": 1024,
    "num_layers": 28,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "d_ff": 3072,
    "max_seq_len": 4096,
    "position_encoding": "rope",
    "position_base": 1e6,
    "qk_norm": "head",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tie_weights": True,
}
LEAST = 100


def main() -> None:
    """Runs all requests, after two short ones to warm up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--most", type=int, default=1024, help="tokens of the longest prompt and text")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--cache-dtypes", nargs="+", choices=get_args(CacheDtype), default=["auto"])
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    options = parser.parse_args()
    model = build_model(ModelConfig(**SHAPE), options.seed).to(getattr(torch, options.dtype)).to(options.device).eval()
    generator = Generator(model, CharTokenizer(), max_batch_size=options.requests)
    drawn = np.random.default_rng(options.seed)
    least = min(LEAST, options.most)
    prompts = [
        drawn.integers(4, 128, drawn.integers(least, options.most + 1)).tolist() for _ in range(options.requests)
    ]
    counts = [int(count) for count in drawn.integers(least, options.most + 1, options.requests)]
    read, written = sum(map(len, prompts)), sum(counts)
    print(f"{options.requests} requests, {options.dtype}, {options.device}: {read:,} tokens read, {written:,} written")
    taken: dict[str, float] = {}
    for cache_dtype in options.cache_dtypes:
        config = GenerationConfig(temperature=0.6, seed=1, cache_dtype=cache_dtype)
        configs = [config.replace(max_new_tokens=n, min_new_tokens=n) for n in counts]
        generator.generate(prompts[:2], config.replace(max_new_tokens=8, min_new_tokens=8))
        begin = time.perf_counter()
        generator.generate(prompts, configs)
        seconds = taken[cache_dtype] = time.perf_counter() - begin
        print(f"cache {cache_dtype}: {seconds:,.1f} s, {written / seconds:,.0f} tokens a second", flush=True)
    numbers = {"requests": options.requests, "read": read, "written": written, "seconds": taken}
    write_record(options.json, {**numbers, "device": options.device, "dtype": options.dtype})


if __name__ == "__main__":
    main()
