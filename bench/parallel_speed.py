"""Steps over ranks beside steps on one device: the cost of the wrapping, weak scaling, and what exchange is hidden.

    torchrun --standalone --nproc-per-node 1 bench/parallel_speed.py    # overhead on one process
    torchrun --standalone --nproc-per-node 8 bench/parallel_speed.py --device cuda --precision bf16 \\
        --width 2048 --layers 16 --rows 8 --tokens 2048 --json bench/results/parallel_speed.json

Each rank has the same work however many there are, so all ratios are 1 at best. One device and every layout take turns,
and the median of the ratios of neighbouring steps is printed, so that noise of the machine falls on both. The exchange
of data ranks is timed alone too: `hidden` is the share of it that a step does not wait for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from record import add_json_option, write_record
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.ranks import Ranks
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken, with_experts
from sheepop.train.pipelined import PipelinedModel
from sheepop.train.placement import OneDevice, Placement
from sheepop.train.sharded import ShardedModel
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch

VOCABULARY = 4096
Work = tuple[StepRunner, PreparedStep]


def layouts(size: int) -> Iterator[tuple[dict[str, Any], bool]]:
    """What is measured with so many ranks, and whether it is a network with experts."""
    yield {"zero": 0}, False
    yield {"zero": 1}, False
    yield {"zero": 3}, False
    if size > 1:
        yield {"tensor": size}, False
        yield {"context": size}, False
        yield {"context": size, "context_method": "ring"}, False
        yield {"pipeline": size}, False
        yield {"pipeline": size, "schedule": "zero_bubble"}, False
        yield {"expert": size}, True


def step_of(rows: int, tokens: int, count: int) -> PreparedStep:
    """The same `count` micro-batches of random rows on every rank."""
    ids = torch.randint(0, VOCABULARY, (rows, tokens + 1), generator=torch.Generator().manual_seed(1))
    batch = TensorBatch({"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous(), slice(None))
    total = rows * tokens * count
    return PreparedStep([batch] * count, num_tokens=total, num_reported=total, num_computed=total)


def exchange_of(model: Transformer, zero: int, device: str) -> Callable[[], None]:
    """What data ranks exchange in a step, at once and with nothing beside it."""
    count = sum(parameter.numel() for parameter in model.parameters())
    size = dist.get_world_size()
    whole = torch.zeros(count + -count % size, device=device)
    piece = torch.zeros(len(whole) // size, device=device)

    def exchange() -> None:
        if zero == 0:
            dist.all_reduce(whole)
            return
        for _ in range(2 if zero == 3 else 1):
            dist.all_gather_into_tensor(whole, piece)
        dist.reduce_scatter_tensor(piece, whole)

    return exchange


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
    add_json_option(parser)
    options = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    if options.device == "cuda":
        torch.cuda.set_device(ranks.rank % torch.cuda.device_count())
    plain = ModelConfig(
        vocab_size=VOCABULARY, d_model=options.width, num_layers=options.layers, num_heads=8,
        max_seq_len=options.tokens, dropout=0.0, norm="rmsnorm", position_encoding="rope", activation="swiglu",
        bias=False,
    )  # fmt: skip
    mixed = plain.replace(experts={"count": 8, "per_token": 2})

    def work(config: ModelConfig, settings: dict[str, Any] | None) -> Work:
        model = build_model(config, seed=1, device=options.device)
        optimizers = build_optimizers(model, TrainingConfig(optimizer="adamw", schedule="constant"))
        how: dict[str, Any] = {"precision": options.precision, "device": options.device, "compiled": False}
        placement: Placement
        if settings is None:
            placement, step = OneDevice(model, **how), step_of(options.rows, options.tokens, 1)
        else:
            layout = Layout(ranks, ParallelConfig(**settings))
            kind = PipelinedModel if layout.config.pipeline > 1 else ShardedModel
            placement = kind(model, layout, **how)
            # A rank of a pipeline has a part of the layers, and micro-batches of all: so many rows are as much work.
            count, rows = (4 * ranks.size, options.rows // 4) if layout.config.pipeline > 1 else (1, options.rows)
            step = step_of(rows, options.tokens, count)
            if placement.context is not None:
                step = step.columns(placement.context)
        runner = StepRunner(placement, with_experts(NextToken(), config), optimizers, TrainedWeights(), 1.0)
        return runner, step

    def seconds(action: Callable[[], Any]) -> float:
        dist.barrier()
        started = time.perf_counter()
        action()
        if options.device == "cuda":
            torch.cuda.synchronize()
        return ranks.greatest(time.perf_counter() - started)

    found = []
    for settings, has_experts in layouts(ranks.size):
        config = mixed if has_experts else plain
        (alone, whole), (spread, part) = work(config, None), work(config, settings)
        layout = spread.placement.layout
        is_data = "zero" in settings and ranks.size > 1
        exchange = exchange_of(alone.placement.model, settings.get("zero", 0), options.device)
        ratios, ones, others, exchanges = [], [], [], []
        for number in range(options.rounds + 2):
            one = seconds(partial(alone.take, whole, number=number))
            other = seconds(partial(spread.take, part, number=number))
            if number < 2:
                continue
            # Ranks that split rows or matrices do the work of one device together, and all others as much each.
            ratios.append(other / one * layout.parts_of_rows)
            ones.append(one)
            others.append(other)
            exchanges.append(seconds(exchange) if is_data else 0.0)
        row: dict[str, Any] = {
            "layout": settings,
            "tokens_per_second": part.num_computed * layout.num_data / statistics.median(others),
            "ratio": statistics.median(ratios),
        }
        if is_data:
            waits = [max(0.0, other - one) for one, other in zip(ones, others, strict=True)]
            row["hidden"] = max(0.0, 1 - statistics.median(waits) / statistics.median(exchanges))
        found.append(row)
        if ranks.is_first:
            name = " ".join(f"{key}={value}" for key, value in settings.items())
            hidden = f"  {row['hidden']:.0%} of the exchange hidden" if is_data else ""
            print(f"{ranks.size} ranks  {name:32} {row['tokens_per_second']:12,.0f} tokens/s  "
                  f"{row['ratio']:.3f} times the seconds of one device for as much{hidden}", flush=True)  # fmt: skip
    if ranks.is_first:
        write_record(options.json, {**vars(options), "json": None, "ranks": ranks.size, "layouts": found})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
