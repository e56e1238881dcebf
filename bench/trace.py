"""Traces: seconds until every number of a short prompt is there, and the memory that a long one takes.

A network of GPT-2's shape with 124M weights traces 64 tokens: the pass, all tensors of all blocks, the invariants, the
lens, the attribution. With rotary positions it then traces 4,096 tokens in a process of its own, whose peak memory is
taken after the pass, the attention of one head of every layer, the predictions and the lens.

python bench/trace.py --json bench/results/trace.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from processes import answer, forget_peak, measured_apart, peak_bytes
from record import add_json_option, write_record
from sheepop.core.config import validate
from sheepop.core.speed import synchronize
from sheepop.interpret.checks import check_trace
from sheepop.interpret.lens import logit_lens
from sheepop.interpret.parts import direct_attribution
from sheepop.interpret.trace import Trace
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.tokenizer import CharTokenizer


def network(length: int, device: str) -> Transformer:
    """124M weights in float32; long ones with rotary positions."""
    more = {"position_encoding": "rope"} if length > 1024 else {}
    config = validate(ModelConfig, {"preset": "gpt2", "dropout": 0.0, "max_seq_len": max(length, 1024), **more})
    return build_model(config, 0, device).eval().requires_grad_(False)


def measure(length: int, device: str) -> dict[str, Any]:
    """Seconds and peak memory of the parts of a trace."""
    model = network(length, device)
    ids = torch.randint(128, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    Trace.of(model, CharTokenizer(), ids[:8])
    forget_peak(device)
    found: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any], rounds: int = 1) -> Any:
        seconds = []
        for _ in range(rounds):
            synchronize(device)
            started = time.perf_counter()
            result = work()
            synchronize(device)
            seconds.append(time.perf_counter() - started)
        found[name] = statistics.median(seconds)
        return result

    rounds = 5 if length <= 1024 else 1
    trace = timed("pass", lambda: Trace.of(model, CharTokenizer(), ids), rounds)
    if length <= 1024:
        timed("all tensors", lambda: trace.collect(["blocks.*"]), rounds)
        timed("invariants", lambda: check_trace(trace), rounds)
        timed("attribution", lambda: direct_attribution(trace, -1, 5), rounds)
    else:
        timed("one head of every layer", lambda: trace.collect(["blocks.*.attention.weights"], lambda w: w[0]))
    timed("predictions", lambda: trace.predictions)
    timed("lens", lambda: logit_lens(trace))
    return {"length": length, "seconds": found, "peak_bytes": peak_bytes(device)}


def main() -> None:
    """Runs the benchmark."""
    if answer(measure):
        return
    parser = argparse.ArgumentParser(description="Time and memory of traces.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 4096])
    parser.add_argument("--device", default="cpu")
    add_json_option(parser)
    asked = parser.parse_args()
    results = [measured_apart(__file__, {"length": length, "device": asked.device}) for length in asked.lengths]
    for row in results:
        print(f"{row['length']:,} tokens, peak {row['peak_bytes'] / 1e9:.2f} GB")
        for name, seconds in row["seconds"].items():
            print(f"  {seconds:8.2f} s  {name}")
    write_record(asked.json, {"device": asked.device, "results": results})


if __name__ == "__main__":
    main()
