"""Document masks: the time of training steps with and without them, and attention's memory against T.

Rows are filled with documents of realistic length: log-normal, with the given median and a deviation of 1 in the
logarithm. Whole optimizer steps are timed, in turn, on the same tokens; medians are shown. Memory is the peak over
what the process held before, forward and backward of one attention layer, each in a process of its own.

python bench/attention.py --json bench/results/attention.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from processes import answer, forget_peak, measured_apart, peak_bytes
from record import add_json_option, write_record
from sheepop.core.device import keep_freed_memory, resolve_device
from sheepop.core.speed import synchronize
from sheepop.model import ModelConfig, build_model
from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.fused import Fused
from sheepop.model.attention.kernel import Attending, AttentionKind
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken
from sheepop.train.placement import OneDevice
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch

# Layers, width, heads, T, rows, vocabulary, median document length.
SHAPES = {
    "small": (6, 384, 6, 256, 12, 65, 100),
    "medium": (4, 512, 8, 1024, 4, 4096, 300),
}
LENGTHS = (256, 512, 1024, 2048, 4096)
HEADS, HEAD_DIM = 6, 64
KINDS = ("plain", "documents", "dense")


def documents(rows: int, length: int, median: int, seed: int = 0) -> torch.Tensor:
    """Document ids (rows, length) of rows cut from a stream of documents of random length."""
    generator = np.random.default_rng(seed)
    begins = np.zeros(rows * length, dtype=bool)
    place = 0
    while place < begins.size:
        begins[place] = True
        place += max(2, int(generator.lognormal(np.log(median), 1.0)))
    return torch.from_numpy(begins.reshape(rows, length).cumsum(1))


def time_steps(shape: str, device: str, precision: str, compiled: bool, rounds: int) -> dict[str, Any]:
    """Median seconds of a step without and with document masks, in turn."""
    layers, width, heads, length, rows, vocabulary, median = SHAPES[shape]
    config = ModelConfig(
        d_model=width, num_layers=layers, num_heads=heads, max_seq_len=length, vocab_size=vocabulary, dropout=0.0
    )
    model = build_model(config, 0, device)
    optimizers = build_optimizers(model, TrainingConfig())
    placement = OneDevice(model, precision=precision, device=device, compiled=compiled)
    runner = StepRunner(placement, NextToken(), optimizers, TrainedWeights(), max_grad_norm=None)
    keep_freed_memory(device)
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=torch.Generator().manual_seed(0)).to(device)

    def step(document_ids: torch.Tensor | None) -> None:
        inputs = {"input_ids": tokens[:, :-1]} | ({} if document_ids is None else {"document_ids": document_ids})
        batch = TensorBatch(inputs, tokens[:, 1:], slice(None))
        count = batch.labels.numel()
        runner.take(PreparedStep([batch], count, count, count), number=0)

    # Of the processor where it is what computes: other programs then weigh less.
    clock = time.process_time if device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {"plain": [], "documents": []}
    for number in range(-2, rounds):
        packed = documents(rows, length, median, seed=number + 2).to(device)
        for name, ids in (("plain", None), ("documents", packed)):
            synchronize(device)
            started = clock()
            step(ids)
            synchronize(device)
            if number >= 0:
                seconds[name].append(clock() - started)
    plain, masked = (statistics.median(times) for times in seconds.values())
    return {
        "shape": shape,
        "precision": precision,
        "compiled": compiled,
        "plain_seconds": plain,
        "document_seconds": masked,
        "ratio": masked / plain,
    }


def prepared(document_ids: torch.Tensor, kind: str) -> Attending:
    """Attention of rows: `plain`, by the kernel that is chosen for documents, or `dense`, with a mask of T x T."""
    asked = AttentionKind(head_dim=HEAD_DIM, value_dim=HEAD_DIM, device=document_ids.device)
    sight = asked.sight(document_ids.shape[1], document_ids=None if kind == "plain" else document_ids)
    return Fused().prepare(asked, sight) if kind == "dense" else prepare_attention(asked, sight)


def attention_memory(kind: str, length: int, rows: int, device: str) -> dict[str, Any]:
    """Peak bytes of one layer's attention, forward and backward, over its inputs."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ids = documents(rows, length, 300).to(device)

    def heads() -> torch.Tensor:
        return torch.randn(rows, HEADS, length, HEAD_DIM, generator=generator).to(device).requires_grad_()

    q, k, v = heads(), heads(), heads()
    warm_q, warm_k, warm_v = (tensor[:, :, :32].detach().requires_grad_() for tensor in (q, k, v))
    torch.autograd.backward(prepared(ids[:, :32], kind).attend(warm_q, warm_k, warm_v).sum())
    forget_peak(device)
    before = peak_bytes(device)
    torch.autograd.backward(prepared(ids, kind).attend(q, k, v).sum())
    return {"kind": kind, "length": length, "rows": rows, "bytes": peak_bytes(device) - before}


def main() -> None:
    """Measures, prints two tables and writes the JSON that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16")
    parser.add_argument("--compile", action="store_true", help="compile the network as well")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each kind")
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS), help="T of the memory table")
    parser.add_argument("--rows", type=int, default=4, help="rows of the memory table")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    add_json_option(parser)
    options = parser.parse_args()
    device = resolve_device(options.device)

    print(f"{'step of':<10} {'precision':<10} {'compiled':<9} {'plain':>9} {'documents':>10} {'ratio':>7}")
    times = []
    for shape in options.shapes:
        for compiled in (False, True) if options.compile else (False,):
            times.append(time_steps(shape, device, options.precision, compiled, options.rounds))
            row = times[-1]
            print(
                f"{shape:<10} {row['precision']:<10} {row['compiled']!s:<9} {row['plain_seconds'] * 1e3:>6,.0f} ms "
                f"{row['document_seconds'] * 1e3:>7,.0f} ms {row['ratio']:>7.3f}"
            )
    print(f"\n{'T':>6}" + "".join(f"{kind + ' MiB':>16}" for kind in KINDS))
    memory = []
    for length in options.lengths:
        found = [
            measured_apart(__file__, {"kind": kind, "length": length, "rows": options.rows, "device": device})
            for kind in KINDS
        ]
        memory += found
        print(f"{length:>6}" + "".join(f"{row['bytes'] / 2**20:>16,.1f}" for row in found))
    write_record(options.json, {"steps": times, "memory": memory})


if __name__ == "__main__" and not answer(attention_memory):
    main()
