"""Steps that ranks take together, against the same steps on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sheepop.checkpoint.training_state import optimizer_state
from sheepop.core.errors import ConfigError
from sheepop.model import IGNORE_INDEX, LossTerms, ModelConfig, build_model
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout, check_context, check_experts, check_ring, check_ring_here, check_split
from sheepop.parallel.ranks import Ranks
from sheepop.parallel.sharding import Pieces
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken, with_experts
from sheepop.train.optimizers.build import optimizer_slots
from sheepop.train.pipelined import PipelinedModel
from sheepop.train.placement import OneDevice
from sheepop.train.sharded import ShardedModel
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch

from .conftest import Together

_NETWORK = ModelConfig(vocab_size=67, d_model=32, num_layers=2, num_heads=4, max_seq_len=16, dropout=0.0)
_RICH = _NETWORK.replace(
    num_kv_heads=2,
    position_encoding="alibi",
    norm="layernorm",
    activation="gelu",
    bias=True,
    qk_norm="head",
    attention_sinks=True,
    short_convolution=3,
    tie_weights=True,
    parallel_residual=True,
    shared_norm=True,
    residual_scale=0.7,
    logit_scale=0.8,
    head_bias=True,
)
_SPLIT = _RICH.replace(
    vocab_size=68, position_encoding="learned", tie_weights=False, ngrams={"rows": 64}, embedding_norm=True,
    norm_position="sandwich", logit_soft_cap=3.0, qk_norm=None, parallel_residual=False, shared_norm=False,
)  # fmt: skip
_STEPS, _FEWER, _ROWS, _LENGTH = 20, 4, 8, 16
_TERMS = LossTerms(z_loss=0.01, label_smoothing=0.1)


def _steps(rows_at_once: int, *, has_documents: bool) -> list[PreparedStep]:
    """Steps in micro-batches; every second one has places that do not count, and may have documents in its rows."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(_STEPS):
        ids = torch.randint(0, 67, (_ROWS, _LENGTH + 1), generator=generator)
        labels, documents = ids[:, 1:].clone(), torch.zeros(_ROWS, _LENGTH, dtype=torch.long)
        if number % 2 == 0:
            documents[:, 5:] = 1
            labels[:3, 4:9] = IGNORE_INDEX
        batches = []
        for rows in (slice(start, start + rows_at_once) for start in range(0, _ROWS, rows_at_once)):
            inputs = {"input_ids": ids[rows, :-1].contiguous()}
            if number % 2 == 0 and has_documents:
                inputs["document_ids"] = documents[rows]
            batches.append(TensorBatch(inputs, labels[rows], (labels[rows].flatten() != IGNORE_INDEX).nonzero()[:, 0]))
        count = int((labels != IGNORE_INDEX).sum())
        found.append(PreparedStep(batches, num_tokens=count, num_reported=count, num_computed=count))
    return found


@dataclass
class _Alone:
    """What one device makes of the steps: the gradients of the first, loss and norm of each, states and weights."""

    gradients: dict[str, Tensor]
    outcomes: list[tuple[float, float]]
    states: dict[str, Tensor]
    weights: list[Tensor]


def _runner(placement: Any, optimizers: list[torch.optim.Optimizer]) -> StepRunner:
    objective = with_experts(NextToken(_TERMS), placement.model.config)
    return StepRunner(placement, objective, optimizers, TrainedWeights(), 0.5)


def _names(model: torch.nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _alone(network: ModelConfig, training: TrainingConfig, steps: list[PreparedStep]) -> _Alone:
    model = build_model(network, seed=1)
    optimizers = build_optimizers(model, training)
    runner = _runner(OneDevice(model, precision="fp32", device="cpu"), optimizers)
    runner.gradients(steps[0])
    gradients = {name: p.grad.to_dense().clone() for name, p in model.named_parameters() if p.grad is not None}
    taken = [runner.take(step, number=number) for number, step in enumerate(steps)]
    states = dict(optimizer_state(optimizers, _names(model)).tensors)
    weights = [parameter.detach() for parameter in model.parameters()]
    return _Alone(gradients, [(each.loss, each.norm) for each in taken], states, weights)


@pytest.fixture(params=[_FEWER, pytest.param(_STEPS, marks=pytest.mark.campaign)])
def in_first(request: pytest.FixtureRequest) -> int:
    """How many steps are taken in the first layout of a test: enough every day, all of them in a campaign."""
    return int(request.param)


def _compare(layouts: list[Any], network: ModelConfig, in_first: int = _STEPS) -> None:
    """Trains in every layout, with an optimizer and perhaps another network; the first rank does so on one device too.

    It takes `in_first` steps in the first layout, and a few in the others; ``bench/parallel_proof.py`` takes all.
    """
    torch.set_num_threads(1)
    with Ranks.joined() as ranks:
        ranks.connect("cpu")
        rank = ranks.rank
        assert ranks.told({"from": rank}) == {"from": 0}
        assert ranks.greatest(rank) == ranks.size - 1
        for place, (settings, optimizer, *other) in enumerate(layouts):
            layout = Layout(ranks, ParallelConfig(**settings))
            training = TrainingConfig(optimizer=optimizer, learning_rate=1e-3, schedule="constant")
            chosen = other[0] if other else network
            # Two micro-batches are enough to add gradients up; every data rank and every stage of a pipeline needs one.
            rows_at_once = 2 if layout.config.pipeline > 1 or len(layout.share(4)) < 4 else 4
            steps = _steps(rows_at_once, has_documents=layout.config.context_method != "ring")
            steps = steps[: _FEWER if place else in_first]
            given = [_alone(chosen, training, steps) if rank == 0 else None]
            torch.distributed.broadcast_object_list(given)
            (alone,) = given
            assert alone is not None
            model = build_model(chosen, seed=2 if rank else 1)
            optimizers = build_optimizers(model, training)
            kind = PipelinedModel if layout.config.pipeline > 1 else ShardedModel
            placement = kind(model, layout, optimizers, precision="fp32", device="cpu", compiled=False)
            spread = _runner(placement, optimizers)
            names = _names(placement.model)
            for number, step in enumerate(steps):
                part = step.part(layout.share(len(step.micro_batches)))
                if placement.context is not None:
                    part = part.columns(placement.context)
                if number == 0:
                    spread.gradients(part, verified=True)
                    here = {name: p.grad for name, p in placement.model.named_parameters() if p.grad is not None}
                    found = dict(placement.pieces.wholes(here))
                    assert found.keys() == alone.gradients.keys()
                    for name, gradient in alone.gradients.items():
                        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
                ours, (loss, norm) = spread.take(part, number=number), alone.outcomes[number]
                assert abs(ours.loss - loss) < 2e-4, (settings, optimizer, number, ours.loss, loss)
                assert abs(ours.norm - norm) < 2e-3 * norm
            _compare_states(placement.pieces, dict(optimizer_state(optimizers, names).tensors), alone.states)
            _compare_slots(placement.pieces, optimizers, names, alone.states)
            if settings == {"zero": 0}:
                assert placement.differences([]) == []
                if rank == 1:
                    placement.model.final_norm.weight.data[3] += 1e-7
                assert placement.differences(["here"] if rank else []) == [
                    "rank 1: here",
                    "the weights of rank 1 are not those of rank 0",
                ]
                continue
            with placement.evaluating():
                for one, whole in zip(placement.model.parameters(), alone.weights, strict=True):
                    torch.testing.assert_close(one.detach(), whole, rtol=0, atol=4.1e-3)  # two steps of Lion's


def _compare_states(pieces: Pieces, here: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """The state of optimizers is made whole of pieces, and cut into the same ones again."""
    found = dict(pieces.wholes(here))
    assert found.keys() == theirs.keys()
    for name, whole in found.items():
        assert whole.shape == theirs[name].shape
        if "k_proj.bias" not in name:  # whose gradients are rounding errors: they move all scores of a query alike
            assert (whole - theirs[name]).norm() <= 0.02 * theirs[name].norm(), name
    for name, piece in here.items():
        assert torch.equal(pieces.piece(name, found[name]), piece), name


def _compare_slots(
    pieces: Pieces, optimizers: list[torch.optim.Optimizer], names: dict[Tensor, str], wholes: dict[str, Tensor]
) -> None:
    """What a checkpoint is cut into are the slots that the optimizers say they have here."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for slot, shape in optimizer_slots(optimizer, group, parameter).items():
                    name = f"{names[parameter]}/{slot}"
                    assert shape is None or pieces.piece(name, wholes[name]).shape == shape, name


def test_two_ranks_learn_what_one_device_learns_with_every_zero_stage(together: Together) -> None:
    layouts = [({"zero": 0}, "adamw"), ({"zero": 1}, "lion"), ({"zero": 2}, "adamw"), ({"zero": 3}, "muon")]
    together.call(2, _compare, layouts, _NETWORK)


def test_replicas_of_sharded_copies_learn_the_same(together: Together, in_first: int) -> None:
    one_key = _NETWORK.replace(num_kv_heads=1, head_dim=1, position_encoding="learned")  # of which one rank has nothing
    together.call(4, _compare, [({"zero": 3, "shard": 2}, "adafactor")], one_key, in_first)


def test_tensor_ranks_learn_the_same_beside_data_ranks(together: Together, in_first: int) -> None:
    layouts: list[Any] = [
        ({"tensor": 2}, "adafactor"),  # the second has a row of the vocabulary less
        ({"tensor": 2}, "adamw", _RICH.replace(vocab_size=68)),
        ({"tensor": 2, "zero": 0}, "adamw", _SPLIT),
    ]
    together.call(2, _compare, layouts, _RICH, in_first)
    pieces_of_parts: list[Any] = [
        ({"tensor": 2, "zero": 3}, "muon", _NETWORK.replace(vocab_size=68)),
        ({"tensor": 2, "zero": 3}, "adafactor"),
    ]
    together.call(4, _compare, pieces_of_parts, _NETWORK, in_first)


def test_context_ranks_learn_the_same_from_parts_of_rows(together: Together, in_first: int) -> None:
    two, four = {"context": 2}, {"context": 2, "tensor": 2}
    together.call(2, _compare, [(two, "adamw")], _RICH.replace(ngrams={"rows": 64}, position_encoding="rope"), in_first)
    together.call(4, _compare, [(four, "adamw")], _RICH.replace(sliding_window=6, num_kv_heads=4), in_first)


_DELTA = {"layers": (0, 2), "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 5}
_HYBRID = _NETWORK.replace(num_layers=4, gated_convolution={"layers": (1,)}, position_encoding="rope")


def test_layers_without_attention_learn_the_same_where_ranks_do_not_split_them(
    together: Together, in_first: int
) -> None:
    both = _HYBRID.replace(gated_delta_net=_DELTA, attention_output_gate=True)
    layouts: list[Any] = [
        ({"zero": 3}, "adamw", both),
        ({"pipeline": 2}, "muon", both),
        ({"context": 2}, "adamw", _HYBRID),
        ({"tensor": 2}, "adamw", _RICH.replace(attention_output_gate=True)),
    ]
    together.call(2, _compare, layouts, both, in_first)


def test_layers_that_ranks_cannot_split_are_refused() -> None:
    shared = {"count": 4, "shared": 1, "shared_gate": True}
    for network in (_HYBRID, _NETWORK.replace(gated_delta_net={**_DELTA, "layers": (0,)})):
        with pytest.raises(ConfigError, match="not for one with layers without attention"):
            check_split(network, 2)
    with pytest.raises(ConfigError, match=r"not for one with model\.experts\.shared_gate"):
        check_split(_NETWORK.replace(experts=shared), 2)
    with pytest.raises(ConfigError, match="vocabulary of 9 tokens cannot be split over 4 ranks: with 3 each the last"):
        check_split(_NETWORK.replace(vocab_size=9), 4)
    check_context(_HYBRID, ParallelConfig(context=2))
    with pytest.raises(ConfigError, match="needs the state of all tokens before a rank's own"):
        check_context(_HYBRID.replace(gated_delta_net=_DELTA), ParallelConfig(context=2))


_MIXED = _NETWORK.replace(
    vocab_size=68,
    position_encoding="rope",
    activation="swiglu_clamped",
    bias=True,
    experts={"count": 4, "per_token": 2, "shared": 1, "d_ff": 16, "bias_update_rate": 0.01, "router_bias": True},
)


def test_ranks_that_share_experts_learn_the_same_beside_all_others(together: Together, in_first: int) -> None:
    together.call(2, _compare, [({"expert": 2, "zero": 2}, "adamw")], _MIXED, in_first)
    four: list[Any] = [
        ({"expert": 4, "context": 2, "tensor": 2, "zero": 3}, "muon"),
        ({"pipeline": 2, "expert": 2}, "adamw", _MIXED.replace(num_layers=4)),
    ]
    together.call(4, _compare, four, _MIXED, in_first)


_LATENT = _MIXED.replace(
    head_dim=8, value_head_dim=8, latent_attention={"kv_rank": 12, "q_rank": 16, "rope_head_dim": 4},
    experts={"count": 4, "d_ff": 16, "groups": 2, "scale": 1.5}, activation="swiglu",
)  # fmt: skip


def test_ranks_that_split_latent_attention_learn_the_same(together: Together, in_first: int) -> None:
    latent = {"kv_rank": 12, "rope_head_dim": 2}
    without = _LATENT.replace(latent_attention=latent, value_head_dim=5, attention_sinks=True)
    two: list[Any] = [
        ({"tensor": 2, "zero": 1}, "muon"),
        ({"context": 2}, "adamw", without),
        ({"context": 2, "context_method": "ring"}, "adamw"),
    ]
    together.call(2, _compare, two, _LATENT, in_first)


def test_a_ring_of_context_ranks_learns_the_same(together: Together, in_first: int) -> None:
    network = _RICH.replace(position_encoding="rope", attention_sinks=False, num_heads=3, head_dim=8, num_kv_heads=1)
    ring = {"context": 2, "context_method": "ring"}
    together.call(2, _compare, [(ring, "adamw")], network.replace(ngrams={"rows": 64}), in_first)
    four: list[Any] = [
        ({**ring, "context": 4, "zero": 3}, "adamw"),
        ({**ring, "tensor": 2}, "adamw", network.replace(num_heads=4, num_kv_heads=2)),
    ]
    together.call(4, _compare, four, network, in_first)


def test_a_ring_refuses_what_it_does_not_compute() -> None:
    ring = ParallelConfig(context=2, context_method="ring")
    check_ring(_NETWORK, ring)
    changes: list[dict[str, Any]] = [
        {"position_encoding": "alibi"}, {"sliding_window": 4}, {"attention_soft_cap": 5.0}, {"attention_sinks": True},
        {"value_head_dim": 4}, {"attention_backend": "eager"},
    ]  # fmt: skip
    for change in changes:
        (name,) = change
        check_ring(_NETWORK.replace(**change), ParallelConfig(context=2))
        with pytest.raises(ConfigError, match=f"ring is for plain causal attention, and not for .*{name}"):
            check_ring(_NETWORK.replace(**change), ring)
    check_ring_here(_NETWORK, ring, "cpu", "fp32")
    for device, precision, width, name in (
        ("mps", "bf16", 8, "mps"),
        ("cuda", "fp32", 8, "fp32"),
        ("cuda", "bf16", 12, "12"),
    ):
        with pytest.raises(ConfigError, match=f"has nothing for .* = {name}"):
            check_ring_here(_NETWORK.replace(head_dim=width), ring, device, precision)
    with pytest.raises(ConfigError, match="context_method = ring is for context of 2 ranks or more"):
        ParallelConfig(context_method="ring")


_DEEP = _NETWORK.replace(num_layers=5, position_encoding="learned")


def test_the_stages_of_a_pipeline_learn_the_same_in_every_order(together: Together, in_first: int) -> None:
    orders = [
        ({"pipeline": 2, "schedule": "gpipe", "zero": 1}, "adamw"),
        ({"pipeline": 2, "schedule": "1f1b", "zero": 1}, "muon"),
        ({"pipeline": 2, "schedule": "interleaved", "zero": 1}, "adamw"),
        ({"pipeline": 2, "schedule": "zero_bubble", "zero": 1}, "adamw"),
    ]
    together.call(2, _compare, orders, _DEEP, in_first)


def test_pipelines_learn_the_same_beside_other_ranks(together: Together, in_first: int) -> None:
    rich = _RICH.replace(num_layers=4)
    together.call(2, _compare, [({"pipeline": 2, "schedule": "zero_bubble"}, "adamw")], rich, in_first)
    four: list[Any] = [
        ({"pipeline": 2, "tensor": 2}, "adafactor", rich.replace(vocab_size=68)),
        ({"pipeline": 4, "schedule": "gpipe"}, "adamw", rich.replace(ngrams={"rows": 64}, embedding_norm=True)),
        ({"pipeline": 2, "zero": 1, "schedule": "interleaved"}, "muon", rich.replace(tie_weights=False)),
    ]
    together.call(4, _compare, four, rich, in_first)


@pytest.mark.campaign
def test_ranks_that_share_experts_go_with_everything(together: Together) -> None:
    # Without rotation, gradients of the biases of keys are rounding errors.
    deep = _MIXED.replace(num_layers=4, rotary_layers=(1, 2), attention_bias=False)
    layouts: list[Any] = [
        ({"expert": 2, "zero": 2, "shard": 2}, "adamw"),
        ({"expert": 4, "zero": 3, "shard": 2}, "adafactor"),
        ({"context": 2, "zero": 3}, "adamw"),
        ({"tensor": 2, "zero": 1}, "lion"),
        ({"pipeline": 2, "tensor": 2, "expert": 2, "schedule": "zero_bubble"}, "adamw", deep),
        ({"pipeline": 2, "context": 2, "expert": 2, "schedule": "gpipe"}, "adamw", deep),
    ]
    together.call(4, _compare, layouts, _MIXED)


@pytest.mark.campaign
def test_four_kinds_of_ranks_learn_the_same_together(together: Together) -> None:
    network = _RICH.replace(num_layers=4, num_kv_heads=4)
    for schedule in ("1f1b", "interleaved", "zero_bubble"):
        settings = {"pipeline": 2, "context": 2, "tensor": 2, "schedule": schedule}
        together.call(8, _compare, [(settings, "adamw")], network)


def test_a_rank_has_its_share_of_micro_batches_and_an_uneven_share_is_refused() -> None:
    assert [list(Layout(Ranks(rank, 3), ParallelConfig()).share(6)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="5 micro-batches cannot be shared evenly by 2 data ranks"):
        Layout(Ranks(0, 2), ParallelConfig()).share(5)


def test_layouts_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.data = 4"):
        Layout(Ranks(0, 2), ParallelConfig(data=4))
    with pytest.raises(ConfigError, match="shard = 3 does not divide 4"):
        Layout(Ranks(0, 4), ParallelConfig(zero=2, shard=3))
    with pytest.raises(ConfigError, match="expert = 3 does not divide 4, the ranks of a stage"):
        Layout(Ranks(0, 4), ParallelConfig(expert=3))
    with pytest.raises(ConfigError, match="does not go with 6, those that share a copy"):
        Layout(Ranks(0, 12), ParallelConfig(zero=3, shard=6, expert=4))
    with pytest.raises(ConfigError, match=r"expert = 4 does not divide model\.experts\.count = 6"):
        check_experts(_MIXED.replace(experts={"count": 6, "per_token": 2}), 4)
    with pytest.raises(ConfigError, match="the network has none"):
        check_experts(_NETWORK, 2)
    with pytest.raises(ConfigError, match="shard is for"):
        ParallelConfig(shard=2)
