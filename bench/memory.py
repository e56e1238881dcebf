"""Activation checkpointing: the time and the peak memory of a training step in each mode.

Every mode runs in a process of its own: the peak of a process never falls. Time is the median of whole optimizer
steps, memory the most that was in use during them, over what was in use before the network was built. Beside it
stands the estimate by which `auto` chooses.

python bench/memory.py --preset gpt2 --length 512 --rows 4 --json bench/results/memory.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from processes import answer, forget_peak, measured_apart, peak_bytes
from record import add_json_option, write_record
from sheepop.core.config import validate
from sheepop.core.device import resolve_device
from sheepop.core.speed import synchronize
from sheepop.model import ModelConfig, build_model
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.activation_checkpointing import apply_activation_checkpointing, step_bytes
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken
from sheepop.train.placement import OneDevice
from sheepop.train.precision import apply_precision
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch

MEBIBYTE = 2**20


def measure_mode(
    mode: str, blocks: int | None, preset: str, length: int, rows: int, precision: str, device: str, steps: int
) -> dict[str, Any]:
    """Median seconds, peak and estimate of one mode, and the loss of the first step."""
    config = validate(ModelConfig, {"preset": preset, "dropout": 0.0, "max_seq_len": length})
    if config.vocab_size is None:
        config = config.replace(vocab_size=4096)
    tokens = torch.randint(config.vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(0)).to(device)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch = TensorBatch({"input_ids": inputs}, labels, slice(None))
    prepared = PreparedStep([batch], labels.numel(), labels.numel(), labels.numel())
    _load_libraries(device, precision)
    forget_peak(device)
    before = peak_bytes(device)
    model = build_model(config, 0, device).train()
    apply_precision(model, precision)
    estimate = step_bytes(config, TrainingConfig(), precision, rows, length, device)
    apply_activation_checkpointing(model, mode, blocks)  # type: ignore[arg-type]
    optimizers = build_optimizers(model, TrainingConfig())
    placement = OneDevice(model, precision=precision, device=device)
    runner = StepRunner(placement, NextToken(), optimizers, TrainedWeights(), max_grad_norm=None)
    forget_peak(device)
    seconds, losses = [], []
    clock = time.process_time if device == "cpu" else time.perf_counter
    for _ in range(steps + 1):
        synchronize(device)
        started = clock()
        losses.append(runner.take(prepared, number=0).loss)
        synchronize(device)
        seconds.append(clock() - started)
    return {
        "mode": mode,
        "blocks": blocks,
        "seconds": statistics.median(seconds[1:]),
        "peak_bytes": peak_bytes(device) - before,
        "estimated_bytes": estimate.peak(mode, blocks or config.num_layers),  # type: ignore[arg-type]
        "losses": losses,
    }


def _load_libraries(device: str, precision: str) -> None:
    """One step of a toy network: the pages of the libraries that it touches are no memory of a step."""
    model = build_model(ModelConfig(vocab_size=64, d_model=64, num_layers=1, num_heads=2, max_seq_len=64), 0, device)
    tokens = torch.zeros(1, 64, dtype=torch.long, device=device)
    optimizers = build_optimizers(model, TrainingConfig())
    batch = TensorBatch({"input_ids": tokens}, tokens, slice(None))
    placement, count = OneDevice(model, precision=precision, device=device), tokens.numel()
    runner = StepRunner(placement, NextToken(), optimizers, TrainedWeights(), max_grad_norm=None)
    runner.take(PreparedStep([batch], count, count, count), number=0)


def main() -> None:
    """Measures every mode, prints the table and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-15m", help="model preset")
    parser.add_argument("--length", type=int, default=256, help="T")
    parser.add_argument("--rows", type=int, default=16, help="rows of the micro-batch")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16, fp16 or fp8")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each mode")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    add_json_option(parser)
    options = parser.parse_args()
    shape = {name: vars(options)[name] for name in ("preset", "length", "rows", "precision", "steps")}
    shape["device"] = resolve_device(options.device)
    half = validate(ModelConfig, {"preset": options.preset}).num_layers // 2
    print(f"{'mode':<10} {'blocks':>6} {'step':>10} {'time':>6} {'peak MiB':>9} {'of none':>8} {'estimated':>10}")
    rows: list[dict[str, Any]] = []
    for mode, blocks in [("none", None), ("selective", None), ("full", half), ("full", None)]:
        row = measured_apart(__file__, {"mode": mode, "blocks": blocks, **shape})
        rows.append(row)
        if row["losses"] != rows[0]["losses"]:
            raise SystemExit(f"{mode} computed other losses than {rows[0]['mode']}: it is not the same work")
        time_ratio = row["seconds"] / rows[0]["seconds"]
        memory_ratio = row["peak_bytes"] / rows[0]["peak_bytes"]
        shown = "all" if blocks is None else str(blocks)
        print(
            f"{mode:<10} {shown:>6} {row['seconds'] * 1e3:>7,.0f} ms {time_ratio:>6.2f} "
            f"{row['peak_bytes'] / MEBIBYTE:>9,.0f} {memory_ratio:>8.2f} {row['estimated_bytes'] / MEBIBYTE:>10,.0f}"
        )
    write_record(options.json, {**shape, "modes": rows})


if __name__ == "__main__" and not answer(measure_mode):
    main()
