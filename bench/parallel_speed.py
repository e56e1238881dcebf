"""Steps over ranks beside steps on one device: the cost of the wrapping, and weak scaling.

    torchrun --standalone --nproc-per-node 1 bench/parallel_speed.py          # overhead on one process
    torchrun --standalone --nproc-per-node 8 bench/parallel_speed.py --device cuda --precision bf16

Each rank has the same number of rows however many there are. One device and every layout take turns, and the median of
the ratios of neighbouring steps is printed, so that noise of the machine falls on both.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from sheepop.model import ModelConfig, build_model
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.ranks import Ranks
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken
from sheepop.train.placement import OneDevice
from sheepop.train.sharded import ShardedModel
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch


def layouts(size: int) -> Iterator[dict[str, int]]:
    """What is measured with so many ranks."""
    yield {"zero": 0}
    yield {"zero": 1}
    yield {"zero": 3}
    if size > 1:
        yield {"tensor": size}
        yield {"context": size}


def main() -> None:
    """Prints a table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    if options.device == "cuda":
        torch.cuda.set_device(ranks.rank % torch.cuda.device_count())
    config = ModelConfig(
        vocab_size=4096, d_model=options.width, num_layers=options.layers, num_heads=8, max_seq_len=options.tokens,
        dropout=0.0, norm="rmsnorm", position_encoding="rope", activation="swiglu", bias=False,
    )  # fmt: skip
    ids = torch.randint(0, 4096, (options.rows, options.tokens + 1))
    batch = TensorBatch({"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous(), slice(None))
    count = options.rows * options.tokens
    step = PreparedStep([batch], num_tokens=count, num_reported=count, num_computed=count)

    def runner(settings: dict[str, int] | None) -> tuple[StepRunner, PreparedStep]:
        model = build_model(config, seed=1, device=options.device)
        optimizers = build_optimizers(model, TrainingConfig(optimizer="adamw", schedule="constant"))
        if settings is None:
            placement: OneDevice | ShardedModel = OneDevice(model, precision=options.precision, device=options.device)
            return StepRunner(placement, NextToken(), optimizers, TrainedWeights(), 1.0), step
        layout = Layout(ranks, ParallelConfig(**settings))
        placement = ShardedModel(model, layout, precision=options.precision, device=options.device, compiled=False)
        mine = step if placement.context is None else step.columns(placement.context)
        return StepRunner(placement, NextToken(), optimizers, TrainedWeights(), 1.0), mine

    def seconds(taker: StepRunner, work: PreparedStep, number: int) -> float:
        dist.barrier()
        started = time.perf_counter()
        taker.take(work, number=number)
        if options.device == "cuda":
            torch.cuda.synchronize()
        return ranks.greatest(time.perf_counter() - started)

    alone = runner(None)
    for settings in layouts(ranks.size):
        spread, ratios, speeds = runner(settings), [], []
        # Ranks that split rows or matrices do the work of one device together, and all others as much each.
        work = 1 if settings.get("tensor", 1) * settings.get("context", 1) > 1 else ranks.size
        for number in range(options.rounds + 2):
            one, other = seconds(*alone, number), seconds(*spread, number)
            if number >= 2:
                ratios.append(other / one)
                speeds.append(work * count / other)
        if ranks.is_first:
            name = " ".join(f"{key}={value}" for key, value in settings.items())
            print(f"{ranks.size} ranks  {name:12}  {statistics.median(speeds):12,.0f} tokens/s  "
                  f"{statistics.median(ratios):.3f} times the seconds of one device", flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
