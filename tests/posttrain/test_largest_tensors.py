"""No objective or score holds the logits of all positions at once, nor LoRA on integers a large matrix of floats."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sheepop.adapt.lora import add_lora
from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.quantization import quantize
from sheepop.adapt.scalar_head import REWARD_HEAD, VALUE_HEAD, add_scalar_head
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.model import ModelConfig, Transformer, build_model, logits
from sheepop.posttrain.example_batches import GroupBatch, batch_of
from sheepop.posttrain.example_store import Learnt
from sheepop.posttrain.policy import AnswerBatch, PolicyObjective, no_numbers
from sheepop.posttrain.preference import (
    JudgedAnswers,
    PairwisePreference,
    PairwiseReward,
    PreferenceLoss,
    answer_log_probabilities,
)
from sheepop.posttrain.supervised import Distillation
from sheepop.train import TrainingConfig, build_optimizers
from sheepop.train.evaluation_weights import TrainedWeights
from sheepop.train.objective import NextToken, Objective
from sheepop.train.placement import OneDevice
from sheepop.train.source import PreparedStep
from sheepop.train.step import StepRunner
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import FinishedNetwork

V, T, ROWS = 2048, 96, 20  # ROWS of logits at a time, more than a hidden state has numbers
NETWORK = ModelConfig(vocab_size=V, d_model=16, num_layers=1, num_heads=2, d_ff=32, max_seq_len=T, dropout=0.0)


class Largest(TorchDispatchMode):
    """The most numbers of a floating tensor that an operation makes, and the shapes of all."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.shapes = 0, set[tuple[int, ...]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        before = {each.data_ptr() for each in tree_leaves((args, kwargs)) if _is_dense(each)}
        for tensor in tree_leaves(made):
            if _is_dense(tensor) and tensor.data_ptr() not in before and tensor.is_floating_point():
                self.most = max(self.most, tensor.numel())
                self.shapes.add(tuple(tensor.shape))
        return made


def _is_dense(each: Any) -> bool:
    return type(each) is Tensor and each.layout == torch.strided


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logits._CHUNK_BYTES, "cpu", ROWS * V * 4)
    monkeypatch.setitem(logits._PART, "cpu", V)


def learnt(draws: np.random.Generator, length: int = T) -> Learnt:
    return Learnt(draws.integers(0, V - 1, length), np.arange(length) >= 8)


def examples(draws: np.random.Generator) -> Any:
    return batch_of([[learnt(draws)] for _ in range(2)], T, 0)


def pairs(draws: np.random.Generator) -> Any:
    made = batch_of([[learnt(draws)] for _ in range(2)], T, 0)
    arrays = [each.reshape(1, 2, T) for each in (made.input_ids, made.labels, made.positions, made.document_ids)]
    return GroupBatch(*arrays, False, np.full((1, 2), T), np.ones(1, np.float32), np.zeros((1, 2), np.float32))


def answers(draws: np.random.Generator) -> Any:
    made = batch_of([[learnt(draws)] for _ in range(2)], T, 0)
    return AnswerBatch.of(made.input_ids, made.labels, np.full(2, T), no_numbers(made.labels.shape))


def network() -> Transformer:
    return build_model(NETWORK, seed=1)


def adapted(model: Transformer, *targets: str) -> Transformer:
    add_lora(model, LoraConfig(rank=2, targets=targets))
    return model


def with_head(model: Transformer, name: str) -> Transformer:
    add_scalar_head(model, name)
    return model


KINDS: dict[str, tuple[Callable[[], Objective], Callable[..., Any], Callable[[Transformer], Transformer]]] = {
    "sft": (NextToken, examples, lambda model: model),
    "lora": (NextToken, examples, lambda model: adapted(model, "blocks.*")),
    "lora of the vocabulary": (NextToken, examples, lambda model: adapted(model, "embedding", "lm_head")),
    "integers": (NextToken, examples, lambda model: adapted(quantize(model, "int8"), "blocks.*")),
    "teacher": (lambda: Distillation(network().eval(), 0.5, 2.0), examples, lambda model: model),
    "dpo": (lambda: PairwisePreference([(1.0, PreferenceLoss("sigmoid", 0.3))], 0.1), pairs, lambda model: model),
    "kto": (lambda: JudgedAnswers(0.1, (1.0, 1.5)), pairs, lambda model: model),
    "reward": (lambda: PairwiseReward(0.1, False), pairs, lambda model: with_head(model, REWARD_HEAD)),
    "ppo": (lambda: PolicyObjective(vf_coef=0.5, kl_coef=0.1), answers, lambda model: with_head(model, VALUE_HEAD)),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_holds_a_few_rows_of_logits(kind: str, precision: str) -> None:
    make, batches, change = KINDS[kind]
    objective, model = make(), change(network())
    placement = OneDevice(model, precision=precision, device="cpu")
    runner = StepRunner(placement, objective, build_optimizers(model, TrainingConfig()), TrainedWeights(), 1.0)
    step = PreparedStep.of(batches(np.random.default_rng(0)), 2, objective, device="cpu")
    with Largest() as largest:
        runner.gradients(step)
    # In bfloat16 twice as many rows are as many bytes.
    assert largest.most <= (ROWS if precision == "fp32" else 2 * ROWS) * V
    if kind == "integers":
        assert isinstance(placement.modules.lm_head.weight, StoredWeight)
        assert not {(V, NETWORK.d_model), (NETWORK.d_model, V)} & largest.shapes


def test_scores_and_log_probabilities_hold_a_few_rows_of_logits() -> None:
    draws = np.random.default_rng(0)
    for model in (network(), adapted(quantize(network(), "int8"), "lm_head")):
        batch = TensorBatch.from_numpy(examples(draws), "cpu")
        model.eval()
        with Largest() as largest, torch.no_grad():
            hidden = model.hidden_states(**batch.inputs)
            model.lm_head.score(hidden, batch.labels)
            model.lm_head.judge(hidden.flatten(0, 1), batch.labels.flatten().clamp(min=0))
            answer_log_probabilities(FinishedNetwork(model), TensorBatch.from_numpy(pairs(draws), "cpu"))
        assert 0 < largest.most <= ROWS * V
        assert (V, NETWORK.d_model) not in largest.shapes or not isinstance(model.lm_head.weight, StoredWeight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_beside_integers_is_the_same_after_twenty_steps_as_after_three(precision: str) -> None:
    others = _storages()  # of other tests, which may be freed at any time
    config = NETWORK.replace(vocab_size=512, d_model=32, d_ff=64)
    model = adapted(quantize(build_model(config, seed=1), "int8"), "blocks.*")
    placement = OneDevice(model, precision=precision, device="cpu")
    optimizers = build_optimizers(model, TrainingConfig())
    runner, draws = StepRunner(placement, NextToken(), optimizers, TrainedWeights(), 1.0), np.random.default_rng(0)
    alive = {}
    for number in range(20):
        lengths = [T, 20 + number % 3 * 30]
        rows = [[Learnt(draws.integers(0, 511, n), np.arange(n) >= 8)] for n in lengths]
        step = PreparedStep.of(batch_of(rows, max(lengths), 0), 2, NextToken(), device="cpu")
        runner.take(step, number=number, rate=1e-3, before_forward=lambda _: None)
        with placement.evaluating():
            pass
        del step
        if number in (2, 19):  # looking through all objects takes longer than a step
            alive[number] = sum(each.nbytes() for key, each in _storages().items() if key not in others)
    assert alive[19] == alive[2]
    weights = [weight for weight in placement.modules.parameters() if isinstance(weight, StoredWeight)]
    assert weights
    # The memory of the integers is shared with the model, in which nothing became floats.
    ours = {id(tensor) for weight in model.parameters() if isinstance(weight, StoredWeight) for tensor in weight.memory}
    assert all(id(tensor) in ours for weight in weights for tensor in weight.memory)
    stored = [weight for weight in model.parameters() if isinstance(weight, StoredWeight)]
    assert all(weight.data.dtype == torch.float32 for weight in stored)


def _storages() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors that Python can reach, by an address that stays taken while the result lives."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
    return {storage._cdata: storage for storage in (each.untyped_storage() for each in tensors)}
