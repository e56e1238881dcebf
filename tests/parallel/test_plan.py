"""What ranks send, counted as they send it, against the least that each strategy needs; up to a thousand of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from sheepop.model import ModelConfig, build_model
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.plan import Plan
from sheepop.parallel.ranks import Ranks
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken
from sheepop.train.sharded import ShardedModel
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch

# Every first dimension is a multiple of all numbers of ranks below, so that nothing is padded.
_NETWORK = ModelConfig(
    vocab_size=1000, d_model=1000, num_layers=2, num_heads=8, head_dim=250, max_seq_len=64, dropout=0.0, d_ff=2000,
    norm="rmsnorm", position_encoding="rope", bias=False, activation="swiglu", tie_weights=False,
)  # fmt: skip
_ROWS, _TOKENS = 2, 64


class Counting(TorchDispatchMode):
    """Adds up what this rank sends, by the kind of the collective: see `Plan`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

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
            flat = [each for arg in args for each in (arg if isinstance(arg, list) else [arg])]
            tensors = [each for each in flat if torch.is_tensor(each)]
            largest = max(tensor.nbytes for tensor in tensors)
            self.sent[name] += (2 if name.startswith("allreduce") else 1) * largest * (size - 1) / size
        return function(*args, **(kwargs or {}))


def _taken(layout: Layout, micro_batches: int) -> tuple[Counter[str], ShardedModel]:
    """What is sent in the second step; the first makes what lasts."""
    model = build_model(_NETWORK, seed=1)
    optimizers = build_optimizers(model, TrainingConfig(optimizer="adamw", schedule="constant"))
    placement = ShardedModel(model, layout, precision="fp32", device="cpu", compiled=False)
    runner = StepRunner(placement, NextToken(), optimizers, TrainedWeights(), 1.0)
    ids = torch.randint(0, 1000, (_ROWS, _TOKENS + 1), generator=torch.Generator().manual_seed(1))
    batch = TensorBatch({"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous(), slice(None))
    if placement.context is not None:
        batch = batch.columns(placement.context.columns(_TOKENS))
    count = micro_batches * _ROWS * _TOKENS
    step = PreparedStep([batch] * micro_batches, num_tokens=count, num_reported=count, num_computed=count)
    runner.take(step, number=0)
    with Counting() as counting:
        runner.take(step, number=1)
    return counting.sent, placement


@pytest.mark.parametrize(
    ("size", "settings", "micro_batches"),
    [
        (8, {"zero": 0}, 2),
        (8, {"zero": 1}, 2),
        (8, {"zero": 2}, 2),
        (8, {"zero": 3}, 2),
        (8, {"zero": 3, "shard": 4}, 1),
        (2, {"tensor": 2}, 2),
        (4, {"context": 4}, 1),
        (4, {"context": 4, "context_method": "ring"}, 1),
        (8, {"tensor": 4, "zero": 3}, 1),
        (1000, {"zero": 3}, 1),
        (1000, {"tensor": 4, "context": 2, "zero": 1, "shard": 125}, 1),
    ],
    ids=str,
)
def test_a_rank_sends_and_holds_what_its_strategy_needs_and_little_more(
    size: int, settings: dict[str, Any], micro_batches: int
) -> None:
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        layout = Layout(Ranks(0, size), ParallelConfig(**settings))
        sent, placement = _taken(layout, micro_batches)
        plan = Plan.of(
            build_model(_NETWORK, seed=1), layout, rows=_ROWS, num_tokens=_TOKENS, micro_batches=micro_batches
        )
        assert sum(sent.values()) == pytest.approx(sum(plan.sent.values()), rel=0.05), (sent, plan.sent)
        pieces = sum(spread.to_local().nbytes for spread in placement.pieces.parameters.values())
        assert pieces == pytest.approx(plan.held["optimizer"] / 2, rel=0.05)
        assert str(plan).startswith(f"{size:,} ranks: ")
    finally:
        dist.destroy_process_group()
