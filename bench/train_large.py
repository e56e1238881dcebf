"""Training of a Llama of 1.2 billion parameters: tokens per second, and the share of the processor's peak.

Whole optimizer steps by the functions that the training loop calls: forward, loss, backward, clipping, AdamW. The share
counts the network's own operations, half of the keys for causal attention and nothing that is computed again, against
`--peak`, the rate that the maker of the processor names for dense products (989 TFLOP/s of an H100 or H200 in
bfloat16), or against the fastest product that is measured here.

python bench/train_large.py --device cuda --peak 989 --json bench/results/train_large.json
python bench/train_large.py --device cuda --peak 989 --rows 16 --activation-checkpointing selective
python bench/train_large.py --layers 1 --width 128 --heads 4 --vocabulary 512 --length 256 --rows 2 --steps 3
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from contestants import peak_memory
from record import add_json_option, write_record
from sheepop.core.device import resolve_device
from sheepop.core.freed_memory import keep_freed_memory
from sheepop.jobs.bench import RandomBatches
from sheepop.model import ModelConfig, build_model
from sheepop.model.cost import num_parameters, training_flops_per_token
from sheepop.model.speed import matrix_peak, synchronize
from sheepop.train import TrainingConfig, build_optimizers, clip_gradients
from sheepop.train.activation_checkpointing import apply_activation_checkpointing
from sheepop.train.network import Network
from sheepop.train.objective import NextToken
from sheepop.train.precision import apply_precision, check_precision, choose_matrix_arithmetic, torch_dtype
from sheepop.train.step import PreparedStep, accumulate_gradients, apply_gradients

WARMUP = 3  # steps, the first of which compiles


def shape(options: argparse.Namespace) -> ModelConfig:
    """Llama 3.2 1B's, unless the options change it: a key head for four heads, a feed-forward four times as wide."""
    return ModelConfig(
        d_model=options.width,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.heads // 4,
        d_ff=4 * options.width,
        vocab_size=options.vocabulary,
        max_seq_len=options.length,
        position_encoding="rope",
        position_base=500000.0,
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        dropout=0.0,
        tie_weights=True,
    )


def seconds_of_steps(config: ModelConfig, options: argparse.Namespace, device: str) -> list[float]:
    """The time of every step after the warm-up."""
    model = build_model(config, 0, device).train()
    apply_precision(model, options.precision)
    apply_activation_checkpointing(model, options.activation_checkpointing)
    training = TrainingConfig(global_batch_size=options.rows, precision=options.precision)
    optimizers = build_optimizers(model, training)
    network = Network(model, precision=options.precision, device=device, compiled=options.compile)
    batches, seconds = RandomBatches(config.vocabulary, options.length), []
    for number in range(-WARMUP, options.steps):
        rows = batches.batch(np.arange(options.rows) + (number + WARMUP) * options.rows)
        prepared = PreparedStep.of(rows, options.rows, NextToken(), device=device)
        synchronize(device)
        started = time.perf_counter()
        losses = accumulate_gradients(network, NextToken(), prepared)
        clip_gradients(model.parameters(), training.max_grad_norm)
        apply_gradients(optimizers)
        synchronize(device)
        if number >= 0:
            seconds.append(time.perf_counter() - started)
    if not np.isfinite(losses.means()[1]):
        raise SystemExit(f"the loss is {losses.means()[1]}: these steps are no work that counts")
    return seconds


def main() -> None:
    """Measures, prints the figures, and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "fp8"))
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--activation-checkpointing", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--peak", type=float, help="TFLOP/s to compare with; measured here when left out")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128256)
    add_json_option(parser)
    options = parser.parse_args()
    device = resolve_device(options.device)
    check_precision(options.precision, device)
    choose_matrix_arithmetic(device)
    keep_freed_memory(device)
    config = shape(options)
    peak = options.peak * 1e12 if options.peak else matrix_peak(torch_dtype(options.precision), device)
    seconds = statistics.median(seconds_of_steps(config, options, device))
    rate = options.rows * options.length / seconds
    flops = rate * training_flops_per_token(config, options.length)
    parameters = num_parameters(config)
    result: dict[str, Any] = {
        "device": device,
        "parameters": parameters,
        "rows": options.rows,
        "length": options.length,
        "precision": options.precision,
        "compiled": options.compile,
        "activation_checkpointing": options.activation_checkpointing,
        "seconds_per_step": seconds,
        "tokens_per_second": rate,
        "flops_per_second": flops,
        "peak_flops_per_second": peak,
        "share_of_peak": flops / peak,
        "peak_memory": peak_memory(device),
    }
    print(
        f"{parameters:,} parameters, {options.rows} x {options.length} tokens, {options.precision}"
        f"{' compiled' if options.compile else ''}, checkpointing {options.activation_checkpointing}: "
        f"{rate:,.0f} tokens/s, {flops / 1e12:,.3g} TFLOP/s, {flops / peak:.1%} of {peak / 1e12:,.3g}, "
        f"{result['peak_memory'] / 1e9:.1f} GB"
    )
    write_record(options.json, result)


if __name__ == "__main__":
    main()
