"""Training steps on pairs: the loss and its gradients, however the step is computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sheepop.core.random import seed_torch
from sheepop.data import PairBatches, TokenSplit
from sheepop.model import EncoderDecoder, LossTerms, ModelConfig, blank_model, build_model
from sheepop.model.accounting.saved_activations import count_activations
from sheepop.train.activation_checkpointing import apply_activation_checkpointing
from sheepop.train.objective import NextToken
from sheepop.train.placement import OneDevice
from sheepop.train.source import PreparedStep
from sheepop.train.tensor_batch import TensorBatch
from sheepop.train.validation import validate

from .runs import gradients_of

PAD, BOS, EOS, V = 0, 2, 3, 23
LENGTHS = ((3, 5), (7, 2), (1, 1), (4, 6), (6, 3))


def documents() -> list[list[int]]:
    draw = np.random.default_rng(4)
    sides = [(draw.integers(4, V, source).tolist(), draw.integers(4, V, target).tolist()) for source, target in LENGTHS]
    return [[*source, EOS, BOS, *target, EOS] for source, target in sides]


def pairs() -> PairBatches:
    return PairBatches(TokenSplit.from_documents(documents()), max_length=9, pad_id=PAD, eos_id=EOS)


def network(dropout: float = 0.0, **settings: Any) -> EncoderDecoder:
    sizes = {"vocab_size": V, "d_model": 32, "num_layers": 2, "num_encoder_layers": 3, "num_heads": 4, "max_seq_len": 9}
    config = ModelConfig(architecture="encoder_decoder", dropout=dropout, **{**sizes, **settings})
    model = build_model(config, 0)
    assert isinstance(model, EncoderDecoder)
    return model


def step(model: EncoderDecoder, micro: int = 5, precision: str = "fp32", terms: LossTerms | None = None) -> Any:
    objective = NextToken(terms or LossTerms())
    prepared = PreparedStep.of(pairs().batch(np.arange(5)), micro, objective, device="cpu")
    return gradients_of(
        OneDevice(model, precision=precision, device="cpu"),
        objective,
        prepared,
        before_forward=lambda number: seed_torch(0, "dropout", 0, number),
    )


def slow_losses(model: EncoderDecoder, smoothing: float) -> tuple[Tensor, float]:
    """The mean smoothed and plain loss in float64, one pair at a time and without padding."""
    smoothed, plain, count = torch.zeros((), dtype=torch.float64), 0.0, 0
    for document in documents():
        cut = document.index(EOS) + 1
        source, target = torch.tensor([document[:cut]]), torch.tensor([document[cut:]])
        logs = model(source, target[:, :-1])[0].log_softmax(-1)
        for place, label in enumerate(target[0, 1:].tolist()):
            wanted = torch.full((V,), smoothing / V, dtype=torch.float64)
            wanted[label] += 1 - smoothing
            smoothed = smoothed - (wanted * logs[place]).sum()
            plain -= logs[place, label].item()
            count += 1
    return smoothed / count, plain / count


@pytest.mark.parametrize("micro", [5, 2, 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("bf16", 0.03)])
def test_a_step_is_the_mean_over_all_target_tokens(
    micro: int, smoothing: float, precision: str, tolerance: float
) -> None:
    model = network(norm_position="post", activation="relu")
    exact = blank_model(model.config).double()
    exact.load_state_dict(model.state_dict())
    smoothed, plain = slow_losses(exact, smoothing)  # type: ignore[arg-type]
    torch.autograd.backward(smoothed)
    losses = step(model, micro, precision, LossTerms(label_smoothing=smoothing))
    assert losses.num_tokens == sum(target + 1 for _, target in LENGTHS)
    assert losses.means() == pytest.approx((smoothed.item(), plain), rel=tolerance)
    gradients = {name: parameter.grad for name, parameter in exact.named_parameters()}
    total = torch.nn.utils.get_total_norm(gradients.values())  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        error = (parameter.grad.double() - gradients[name]).norm()  # type: ignore[union-attr, operator]
        assert error < tolerance * (gradients[name].norm() + 0.05 * total), name  # type: ignore[union-attr]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("mode", "num_blocks"), [("selective", None), ("full", None), ("full", 4)])
def test_activation_checkpointing_changes_no_bit(mode: Any, num_blocks: int | None, dropout: float) -> None:
    plain, checkpointed = network(dropout), network(dropout)
    apply_activation_checkpointing(checkpointed, mode, num_blocks)
    assert step(plain).means() == step(checkpointed).means()
    for (name, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]


def test_what_is_counted_of_the_longest_pairs_is_at_least_what_a_step_keeps() -> None:
    model = network()
    made = pairs()
    training = OneDevice(model, precision="fp32", device="cpu")
    found = count_activations(model.config, 5, made.max_length)
    kept: dict[int, int] = {}
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            alive.append(tensor)
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        training.hidden_states(TensorBatch.from_numpy(made.batch(np.arange(5)), "cpu").inputs)
    assert len(found.blocks) == 5
    assert sum(kept.values()) <= found.total()


def test_compiled_blocks_give_the_same_states_for_every_width() -> None:
    model, compiled = (network(num_layers=1, num_encoder_layers=1) for _ in range(2))
    for block in compiled.layers:
        block.forward = torch.compile(block.forward, backend="aot_eager")  # type: ignore[method-assign]
    for numbers in ([0, 1], [2, 3]):
        inputs = TensorBatch.from_numpy(pairs().batch(np.array(numbers)), "cpu").inputs
        torch.testing.assert_close(compiled.hidden_states(**inputs), model.hidden_states(**inputs))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_validation_scores_every_target_token_once(batch_size: int) -> None:
    model = network().eval()
    byte_lengths = np.array([0, 0, 0, 0, *range(1, V - 3)])
    scores = validate(model, pairs(), byte_lengths, batch_size=batch_size, precision="fp32", device="cpu")
    exact = blank_model(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        _, plain = slow_losses(exact, 0.0)  # type: ignore[arg-type]
    assert scores.loss == pytest.approx(plain, rel=1e-5)
    assert scores.tokens == sum(target + 1 for _, target in LENGTHS)
    targets = [document[document.index(EOS) + 2 : -1] for document in documents()]
    assert scores.bytes == sum(int(byte_lengths[token]) for target in targets for token in target)
    assert scores.bits_per_byte == pytest.approx(plain * scores.tokens / scores.bytes / math.log(2), rel=1e-5)
