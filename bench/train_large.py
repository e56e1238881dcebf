"""Training of a Llama of 1.2 billion parameters: tokens per second, and the share of the processor's peak.

Whole optimizer steps by the functions that the training loop calls: forward, loss, backward, clipping, AdamW. The share
counts the network's own operations, half of the keys for causal attention and nothing that is computed again, against
`--peak`, the rate that the maker of the processor names for dense products (989 TFLOP/s of an H100 or H200 in
bfloat16), or against the fastest product that is measured here.

python bench/train_large.py --device cuda --peak 989 --json bench/results/train_large.json
python bench/train_large.py --device cuda --peak 989 --rows 16 --activation-checkpointing selective
python bench/train_large.py --layers 1 --width 128 --heads 4 --vocabulary 512 --length 256 --rows 2 --seconds 2
"""

from __future__ import annotations

import argparse

from contestants import peak_memory
from record import add_json_option, write_record
from sheepop.core.device import resolve_device
from sheepop.jobs.bench import measure_training
from sheepop.model import ModelConfig
from sheepop.model.accounting.cost import num_parameters
from sheepop.train.config import TrainingConfig
from sheepop.train.precision import check_precision, choose_matrix_arithmetic


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
    parser.add_argument("--seconds", type=float, default=30.0, help="time for the measurement")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128256)
    add_json_option(parser)
    options = parser.parse_args()
    device = resolve_device(options.device)
    check_precision(options.precision, device)
    choose_matrix_arithmetic(device)
    config = shape(options)
    row = measure_training(
        config,
        device,
        options.precision,
        options.seconds,
        training=TrainingConfig(global_batch_size=options.rows),
        longest=options.length,
        compiled=options.compile,
        activation_checkpointing=options.activation_checkpointing,
    )
    if options.peak is not None:
        row["share_of_peak"] = row["flops_per_second"] / (options.peak * 1e12)
    result = {
        **row,
        "device": device,
        "parameters": num_parameters(config),
        "compiled": options.compile,
        "activation_checkpointing": options.activation_checkpointing,
        "peak_memory": peak_memory(device),
    }
    print(
        f"{result['parameters']:,} parameters, {row['shape']} tokens, {options.precision}"
        f"{' compiled' if options.compile else ''}, checkpointing {options.activation_checkpointing}: "
        f"{row['tokens_per_second']:,.0f} tokens/s, {row['flops_per_second'] / 1e12:,.3g} TFLOP/s, "
        f"{row['share_of_peak']:.1%} of the peak, {result['peak_memory'] / 1e9:.1f} GB"
    )
    write_record(options.json, result)


if __name__ == "__main__":
    main()
