"""What ranks send and hold, counted as they do so, against what a plan says of it; up to a thousand of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sheepop.model import ModelConfig, build_model
from sheepop.model.accounting.live_bytes import LiveBytes, tensors_of
from sheepop.model.initialization import blank_model
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.plan import Plan
from sheepop.parallel.ranks import Ranks
from sheepop.parallel.stage_memory import StepShape, stages_of
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.activation_checkpointing import apply_activation_checkpointing
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken, with_experts
from sheepop.train.pipelined import PipelinedModel
from sheepop.train.sharded import ShardedModel
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch

_SMALL = ModelConfig(
    vocab_size=512, d_model=128, num_layers=3, num_heads=8, num_kv_heads=4, max_seq_len=128, dropout=0.0, d_ff=512,
    norm="rmsnorm", position_encoding="rope", bias=False, activation="swiglu", tie_weights=False,
)  # fmt: skip
_DEEP = _SMALL.replace(num_layers=8, tie_weights=True, norm="layernorm", activation="gelu", bias=True)
_MIXED = _SMALL.replace(num_layers=4, experts={"count": 8, "per_token": 2, "d_ff": 256})
_WIDE = _SMALL.replace(vocab_size=1000, d_model=1000, num_layers=2, num_kv_heads=8, head_dim=250, d_ff=2000)


class Counting(LiveBytes):  # type: ignore[no-untyped-call]
    """Adds up what this rank sends, by the kind of the collective, and the bytes that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "_c10d_functional" and function._schema.name.endswith("all_to_all_single"):
            splits = list(args[2])
            splits[0] = 0  # this is rank 0, which sends nothing to itself
            self.sent["alltoall"] += sum(splits) * args[0].itemsize
        if function.namespace == "c10d":
            name = function._schema.name.partition("::")[2].strip("_")
            boxes = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
            group = next(box for box in boxes if "ProcessGroup" in str(box._type()))
            size = dist.ProcessGroup.unbox(group).size()
            tensors = list(tensors_of(args))
            largest = max(tensor.nbytes for tensor in tensors)
            if name == "recv":
                tensors[0].fill_(1)  # what comes from nowhere; stages ask each other whether they know all shapes
            else:
                part = 1 if name == "send" else (2 if name.startswith("allreduce") else 1) * (size - 1) / size
                self.sent[name] += largest * part
        return super().__torch_dispatch__(function, types, args, kwargs)


def _taken(network: ModelConfig, layout: Layout, step: StepShape, counting: Counting) -> ShardedModel:
    """Counts the second step; the first makes what lasts."""
    model = build_model(network, seed=1)
    apply_activation_checkpointing(model, step.recomputed, step.recomputed_blocks)
    optimizers = build_optimizers(model, TrainingConfig(optimizer="adamw", schedule="constant"))
    kind = PipelinedModel if layout.config.pipeline > 1 else ShardedModel
    placement = kind(model, layout, precision=step.precision, device="cpu", compiled=False)
    runner = StepRunner(placement, with_experts(NextToken(), network), optimizers, TrainedWeights(), 1.0)
    ids = torch.randint(0, 500, (step.rows, step.num_tokens + 1), generator=torch.Generator().manual_seed(1))
    batch = TensorBatch({"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous(), slice(None))
    if placement.context is not None:
        batch = batch.columns(placement.context.columns(step.num_tokens))
    count = step.micro_batches * step.rows * step.num_tokens
    prepared = PreparedStep([batch] * step.micro_batches, num_tokens=count, num_reported=count, num_computed=count)
    shorter = prepared if layout.config.pipeline > 1 else replace(prepared, micro_batches=[batch])
    runner.take(shorter, number=0)
    counting.forget_peak()
    counting.sent.clear()
    runner.take(prepared, number=1)
    return placement


@pytest.mark.parametrize(
    ("size", "rank", "settings", "micro_batches", "other"),
    [
        (8, 0, {"zero": 0}, 1, {}),
        (8, 0, {"zero": 0}, 2, {}),
        (8, 0, {"zero": 1}, 1, {"rows": 1}),
        (8, 0, {"zero": 1}, 2, {}),
        (8, 0, {"zero": 2}, 2, {"rows": 1}),
        (8, 0, {"zero": 3}, 2, {}),
        (8, 0, {"zero": 3}, 2, {"recomputed": "full"}),
        (8, 0, {"zero": 3}, 1, {"precision": "bf16"}),
        (8, 0, {"zero": 3, "shard": 4}, 1, {"rows": 1}),
        (8, 0, {"zero": 0}, 2, {"rows": 1, "recomputed": "full"}),
        (2, 0, {"tensor": 2}, 2, {"rows": 1}),
        (2, 0, {"tensor": 2}, 1, {"recomputed": "selective"}),
        (4, 0, {"context": 4}, 1, {}),
        (4, 0, {"context": 4, "context_method": "ring"}, 1, {}),
        (8, 0, {"tensor": 4, "zero": 3}, 1, {}),
        (2, 1, {"pipeline": 2, "schedule": "gpipe"}, 4, {}),
        (4, 0, {"pipeline": 2, "schedule": "1f1b", "zero": 1}, 4, {"rows": 1}),
        (4, 2, {"pipeline": 4, "schedule": "1f1b"}, 8, {}),
        (4, 0, {"pipeline": 4, "schedule": "interleaved"}, 8, {}),
        (2, 0, {"pipeline": 2, "schedule": "zero_bubble"}, 4, {}),
        (4, 3, {"pipeline": 4, "schedule": "zero_bubble"}, 8, {}),
        (4, 0, {"pipeline": 2, "tensor": 2}, 2, {"recomputed": "full"}),
        (4, 0, {"expert": 4}, 2, {}),
        (8, 0, {"expert": 2, "zero": 3}, 2, {"recomputed": "full"}),
        (8, 0, {"expert": 4, "tensor": 2, "zero": 2}, 1, {}),
        (1000, 0, {"zero": 3}, 1, {}),
        (1000, 0, {"expert": 8, "zero": 1, "context": 2}, 1, {}),
        (1000, 0, {"tensor": 4, "context": 2, "zero": 1, "shard": 125}, 1, {}),
        (1000, 0, {"pipeline": 2, "tensor": 4, "zero": 1}, 2, {}),
    ],
    ids=str,
)
def test_a_rank_sends_and_holds_what_is_planned(
    size: int, rank: int, settings: dict[str, Any], micro_batches: int, other: dict[str, Any]
) -> None:
    """With `pytest -s` it prints ranks, which one, megabytes sent, planned and counted, and at the peak the same."""
    network = _MIXED if "expert" in settings else _WIDE if size == 1000 else _DEEP if "pipeline" in settings else _SMALL
    step = StepShape(**{"rows": 4, "num_tokens": 128, "micro_batches": micro_batches, **other})
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        layout = Layout(Ranks(rank, size), ParallelConfig(**settings))
        with Counting() as counting:
            placement = _taken(network, layout, step, counting)
    finally:
        dist.destroy_process_group()
    with torch.device("meta"):
        plan = Plan.of(network, layout, step, stages_of(blank_model(network), layout, step))
    planned, counted = sum(plan.sent.values()), sum(counting.sent.values())
    names = " ".join(f"{name}={value}" for name, value in {**settings, **other}.items())
    numbers = " | ".join(f"{value / 1e6:.2f}" for value in (planned, counted, plan.peak, counting.peak))
    print(f"\n{size} | {rank} | {names} | {micro_batches} | {numbers}", flush=True)
    assert counted == pytest.approx(planned, rel=0.05), (counting.sent, plan.sent)
    assert plan.peak == pytest.approx(counting.peak, rel=0.1)
    pieces = sum(spread.to_local().nbytes for spread in placement.pieces.parameters.values())
    assert pieces == pytest.approx(plan.held["optimizer"] / 2, rel=0.05)
    assert str(plan).startswith(f"{size:,} ranks: ")
