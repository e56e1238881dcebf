"""Steps of post-training that ranks of every kind take together, against the same steps on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from sheepop.adapt.lora import add_lora
from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.quantization import quantize
from sheepop.adapt.scalar_head import REWARD_HEAD, VALUE_HEAD, VALUE_MODEL, add_scalar_head
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.core.errors import ConfigError
from sheepop.data import Batch
from sheepop.jobs.config import SheepOpConfig
from sheepop.jobs.run.resolve import check_layout, shared_steps
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.parallel.config import ParallelConfig
from sheepop.parallel.layout import Layout
from sheepop.parallel.ranks import Ranks
from sheepop.posttrain.example_batches import GroupBatch, batch_of
from sheepop.posttrain.example_store import Learnt
from sheepop.posttrain.policy import AnswerBatch, PolicyObjective, no_numbers
from sheepop.posttrain.preference import JudgedAnswers, PairwisePreference, PairwiseReward, PreferenceLoss
from sheepop.posttrain.supervised import Distillation
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken, Objective
from sheepop.train.pipelined import PipelinedModel
from sheepop.train.placement import OneDevice
from sheepop.train.sharded import ShardedModel
from sheepop.train.source import PreparedStep, SharedSource, StepSource
from sheepop.train.step import StepRunner

from .conftest import Together

_NETWORK = ModelConfig(
    vocab_size=67, d_model=16, num_layers=4, num_heads=4, d_ff=24, max_seq_len=12, dropout=0.0,
    position_encoding="rope", activation="swiglu", tie_weights=False,
)  # fmt: skip
_LENGTHS = ((5, 7), (3, 6), (11, 2), (4, 4))  # of the rows of each micro-batch


def _ids(draws: np.random.Generator, length: int) -> NDArray[np.int64]:
    return draws.integers(0, 67, length)


def _learnt(draws: np.random.Generator, length: int) -> Learnt:
    return Learnt(_ids(draws, length), np.arange(length) >= length // 2)


def _examples(draws: np.random.Generator, lengths: tuple[int, ...]) -> Batch:
    """A row with two examples in it, and one with one."""
    rows = [[_learnt(draws, length) for length in (lengths[0], 1)], [_learnt(draws, lengths[1])]]
    return batch_of(rows, max(lengths[0] + 1, lengths[1]), 0)


def _pairs(draws: np.random.Generator, lengths: tuple[int, ...]) -> Batch:
    each = np.array([[length, length // 2 + 1] for length in lengths])
    made = batch_of([[_learnt(draws, length)] for length in each.flatten().tolist()], int(each.max()), 0)
    shape = (*each.shape, int(each.max()))
    arrays = [array.reshape(shape) for array in (made.input_ids, made.labels, made.positions, made.document_ids)]
    numbers = draws.normal(size=each.shape).astype(np.float32)
    return GroupBatch(*arrays, False, each, numbers[:, 0], numbers)


def _judged(draws: np.random.Generator, lengths: tuple[int, ...]) -> Batch:
    """With a reference far enough below the policy for a divergence above 0."""
    pairs = _pairs(draws, lengths)
    assert isinstance(pairs, GroupBatch) and pairs.reference is not None
    return replace(pairs, reference=pairs.reference - 60)


def _answers(draws: np.random.Generator, lengths: tuple[int, ...]) -> Batch:
    made = batch_of([[_learnt(draws, length)] for length in lengths], max(lengths), 0)
    shape = made.labels.shape
    numbers = {name: draws.normal(size=shape).astype(np.float32) for name in no_numbers(shape)}
    return AnswerBatch.of(made.input_ids, made.labels, np.array(lengths), numbers)


def _step(made: Callable[..., Batch], objective: Objective) -> PreparedStep:
    draws = np.random.default_rng(4)
    steps = [PreparedStep.of(made(draws, lengths), 2, objective, device="cpu") for lengths in _LENGTHS]
    count = sum(step.num_tokens for step in steps)
    return PreparedStep([batch for step in steps for batch in step.micro_batches], count, count, count)


@dataclass(frozen=True)
class _Given(StepSource):
    step: PreparedStep
    ahead: int = 0

    def prepare(self, number: int) -> PreparedStep:
        return self.step

    def describe(self, number: int) -> list[str]:
        return []


def _with_values(model: Transformer) -> None:
    values = build_model(_NETWORK, seed=3)
    values.lm_head.requires_grad_(False)
    add_scalar_head(values, VALUE_HEAD)
    model.add_module(VALUE_MODEL, values)


def _with_rewards(model: Transformer) -> None:
    """Beside an output projection that is the embedding, and that nothing asks."""
    model.config = model.config.replace(tie_weights=True)
    model.tie()
    add_scalar_head(model, REWARD_HEAD)


def _with_latents(model: Transformer) -> Transformer:
    """Another network, with adapters of all layers of its attention."""
    latent = {"kv_rank": 6, "q_rank": 10, "rope_head_dim": 2}
    found = build_model(model.config.replace(head_dim=4, value_head_dim=5, latent_attention=latent, bias=True), seed=1)
    add_lora(found, _LORA)
    return found


def _on_integers(model: Transformer) -> Transformer:
    """Integers with adapters, of which the embedding and the output projection share one matrix."""
    model.config = model.config.replace(tie_weights=True)
    model.tie()
    found = quantize(model, "int8")
    add_lora(found, _LORA)
    return found


def _as_it_is(model: Transformer) -> None:
    return


_POLICY = PolicyObjective(vf_coef=0.5, kl_coef=0.1)
_DPO = PairwisePreference([(1.0, PreferenceLoss("sigmoid", 0.3))], supervised_weight=0.1)
_LORA = LoraConfig(rank=2, targets=("*_proj",))
_LORA_OF_VOCABULARY = LoraConfig(rank=2, targets=("embedding", "lm_head"))
_KINDS: Mapping[str, tuple[Callable[[], Objective], Callable[..., Batch], Callable[[Transformer], object]]] = {
    "sft": (NextToken, _examples, _as_it_is),
    "lora": (NextToken, _examples, lambda model: add_lora(model, _LORA)),
    "integers": (NextToken, _examples, _on_integers),
    "vocabulary": (
        NextToken,
        _examples,
        lambda model: add_lora(model, _LORA.replace(targets=("embedding", "lm_head"))),
    ),
    "latent lora": (NextToken, _examples, _with_latents),
    "teacher": (lambda: Distillation(build_model(_NETWORK, seed=7).eval(), 0.5, 2.0), _examples, _as_it_is),
    "dpo": (lambda: _DPO, _pairs, _as_it_is),
    "kto": (lambda: JudgedAnswers(0.1, (1.0, 1.5)), _judged, _as_it_is),
    "reward": (lambda: PairwiseReward(0.1, True), _pairs, _with_rewards),
    "shared values": (lambda: _POLICY, _answers, lambda model: add_scalar_head(model, VALUE_HEAD)),
    "values apart": (lambda: _POLICY, _answers, _with_values),
}
_TENSOR: dict[str, Any] = {"tensor": 2}
_CONTEXT: dict[str, Any] = {"context": 2, "zero": 3}
_PIPELINES: list[dict[str, Any]] = [
    {"pipeline": 2, "schedule": schedule} for schedule in ("1f1b", "interleaved", "zero_bubble")
]
_TWO: list[tuple[str, dict[str, Any]]] = [
    *((kind, _TENSOR) for kind in _KINDS),
    ("kto", {"zero": 2}),
    *(("integers", {"zero": zero}) for zero in (0, 3)),
    *((kind, _CONTEXT) for kind in ("sft", "lora", "integers")),
    *((kind, _PIPELINES[0]) for kind in ("sft", "lora", "integers", "teacher", "dpo", "reward")),
    *((kind, schedule) for kind in ("lora", "reward") for schedule in _PIPELINES[1:]),
]
_FOUR: list[tuple[str, dict[str, Any]]] = [
    *((kind, {"tensor": 2, "zero": 3}) for kind in ("lora", "integers")),
    ("lora", {"tensor": 2, "pipeline": 2}),
    ("reward", {"tensor": 2, "pipeline": 2, "schedule": "interleaved"}),
    ("sft", {"context": 2, "pipeline": 2}),
    ("sft", {"context": 2, "tensor": 2}),
    ("values apart", {"tensor": 2, "zero": 3}),
]


def _network(change: Callable[[Transformer], object]) -> Transformer:
    """With other numbers than 0 in everything that begins there."""
    model = build_model(_NETWORK, seed=1)
    if isinstance(other := change(model), Transformer):
        model = other
    draws = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        if not isinstance(parameter, StoredWeight):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draws)
    return model


def _gradients(runner: StepRunner, step: PreparedStep) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, norm, and what else was measured; and gradients by name."""
    found = runner.gradients(step)
    measured = [value for name, value in sorted(found.losses.measured.items())]
    numbers = torch.cat([found.losses.sums, found.norm[None], *(value.flatten() for value in measured)])
    parameters = runner.placement.model.named_parameters()
    return numbers.tolist(), {name: each.grad for name, each in parameters if each.grad is not None}


def _is_matrix_of_floats(name: str, weight: Tensor) -> bool:
    return weight.ndim > 1 and ".changes." not in name and not isinstance(weight, StoredWeight)


def _compare() -> None:
    torch.set_num_threads(1)
    expected: dict[str, tuple[list[float], dict[str, Tensor]]] = {}
    with Ranks.joined() as ranks:
        ranks.connect("cpu")
        for kind, settings in _TWO if ranks.size == 2 else _FOUR:
            make, batches, change = _KINDS[kind]
            objective, layout = make(), Layout(ranks, ParallelConfig(**settings))
            step = _step(batches, objective)
            if kind not in expected:
                alone = OneDevice(_network(change), precision="fp32", device="cpu")
                expected[kind] = _gradients(_runner(alone, objective), step)
            spreads = PipelinedModel if layout.config.pipeline > 1 else ShardedModel
            placement = spreads(_network(change), layout, precision="fp32", device="cpu", compiled=False)
            part = SharedSource(_Given(step), layout, placement.context).prepare(0)
            numbers, here = _gradients(_runner(placement, objective), part)
            stored = [weight for each in (placement.model, placement.modules) for weight in each.parameters()]
            assert (kind == "integers") == any(isinstance(weight, StoredWeight) for weight in stored)
            assert kind != "integers" or not any(
                _is_matrix_of_floats(name, w) for name, w in placement.modules.named_parameters()
            )
            assert numbers == pytest.approx(expected[kind][0], rel=1e-4, abs=1e-5), (
                kind,
                settings,
                numbers,
                expected[kind][0],
            )
            found = dict(placement.pieces.wholes(here))
            assert found.keys() == expected[kind][1].keys(), (kind, settings)
            for name, gradient in expected[kind][1].items():
                torch.testing.assert_close(
                    found[name], gradient.to_dense(), rtol=1e-3, atol=1e-6, msg=f"{kind}, {settings}: {name}"
                )


def _runner(placement: Any, objective: Objective) -> StepRunner:
    optimizers = build_optimizers(placement.model, TrainingConfig())
    return StepRunner(placement, objective, optimizers, TrainedWeights(), None)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_ranks_that_split_layers_or_rows_learn_from_examples_pairs_and_rewards(together: Together, world: int) -> None:
    together.call(world, _compare)


@pytest.mark.parametrize(
    ("tuning", "parallel", "words"),
    [
        (
            {"method": "dpo"},
            {"context": 2},
            r"dpo does not go with parallel\.context = 2: each answer is weighted as a whole",
        ),
        ({"method": "reward"}, {"context": 2}, r"reward does not go with parallel\.context = 2"),
        (
            {"method": "grpo"},
            {"pipeline": 2},
            r"grpo does not go with parallel\.pipeline = 2: answers are read again",
        ),
        (
            {"method": "dpo", "dpo": {"loss_type": "kto"}},
            {"pipeline": 2},
            r"kto does not go with parallel\.pipeline = 2: answers are read again",
        ),
        ({"method": "ppo"}, {"tensor": 2, "context": 2}, r"ppo .* Use parallel\.context=1\."),
        (
            {"method": "sft", "neftune_noise_alpha": 5},
            {"pipeline": 2},
            r"neftune_noise_alpha draws .* or use parallel\.pipeline=1",
        ),
        ({"method": "sft", "lora": {"dropout": 0.1}}, {"tensor": 2}, r"tuning\.lora\.dropout draws numbers"),
        ({"method": "sft", "teacher": {"model": "m"}}, {"context": 2}, r"teacher reads whole rows"),
        ({"method": "distill", "distill": {"teacher": "m"}}, {"context": 2}, r"teacher reads whole rows"),
        ({"method": "distill", "distill": {"teacher": "m"}}, {"pipeline": 2}, r"answers are sampled during training"),
    ],
)
def test_what_these_ranks_cannot_share_is_refused_in_words(
    tuning: dict[str, Any], parallel: dict[str, int], words: str
) -> None:
    world = int(np.prod(list(parallel.values())))
    shared: dict[str, Any] = {"output_dir": "run", "parallel": parallel}
    with pytest.raises(ConfigError, match=words):
        check_layout(SheepOpConfig(**shared, tuning=tuning), Ranks(0, world))
    lora = {"method": tuning["method"], "lora": {}}
    if tuning["method"] == "sft":
        check_layout(SheepOpConfig(**shared, tuning=lora), Ranks(0, world))
    check_layout(SheepOpConfig(output_dir="run", parallel={"tensor": 2}, tuning=lora), Ranks(0, 2))


def test_parts_of_layers_are_not_multiplied_in_float8() -> None:
    shared: dict[str, Any] = {"output_dir": "run", "training": {"precision": "fp8"}}
    with pytest.raises(ConfigError, match=r"fp8 does not go with parallel\.tensor"):
        shared_steps(SheepOpConfig(**shared, parallel={"tensor": 2}), Ranks(0, 2), is_open=True)
    shared_steps(SheepOpConfig(**shared), Ranks(0, 2), is_open=True)
