"""What objectives read of a network that tensor ranks split, against the whole one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from sheepop.adapt.lora import add_lora
from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.quantization import quantize
from sheepop.adapt.scalar_head import REWARD_HEAD, VALUE_HEAD, VALUE_MODEL, add_scalar_head, scalar_head
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.model import IGNORE_INDEX, ModelConfig, Transformer, build_model
from sheepop.parallel.parts import SharingRanks
from sheepop.parallel.ranks import Ranks
from sheepop.parallel.tensor import split, split_to_write

from .conftest import Together

_NETWORK = ModelConfig(
    vocab_size=68, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=24, max_seq_len=8, dropout=0.0,
    bias=True, activation="swiglu", logit_soft_cap=3.0, tie_weights=False,
)  # fmt: skip
_UNEVEN = _NETWORK.replace(vocab_size=67, head_bias=True)
_THIRDS = _UNEVEN.replace(vocab_size=101, d_model=24, num_heads=6, num_kv_heads=3)
_GENERATOR = torch.Generator().manual_seed(5)
_IDS = torch.randint(0, 67, (3, 6), generator=_GENERATOR)
_LABELS = torch.randint(0, 67, (3, 6), generator=_GENERATOR)
_LABELS[0, :3] = _LABELS[1] = IGNORE_INDEX
_WEIGHTS = torch.randn(3, 6, generator=_GENERATOR, dtype=torch.float64)


def _log_probabilities(model: Transformer) -> Tensor:
    hidden = model.hidden_states(_IDS)
    return model.lm_head.log_probabilities(hidden, _LABELS) * _WEIGHTS


def _logits(model: Transformer) -> Tensor:
    return torch.log_softmax(model(_IDS) / 2, -1).square() * _WEIGHTS[..., None]


def _rewards(model: Transformer) -> Tensor:
    return scalar_head(model, REWARD_HEAD)(model.hidden_states(_IDS)[:, 5])


def _policy_and_values(model: Transformer) -> Tensor:
    hidden = model.hidden_states(_IDS)
    values = scalar_head(model, VALUE_HEAD)(hidden)
    return values.square() + model.lm_head.log_probabilities(hidden, _LABELS) * _WEIGHTS * values


def _values_apart(model: Transformer) -> Tensor:
    own = model.get_submodule(VALUE_MODEL)
    assert isinstance(own, Transformer)
    return scalar_head(own, VALUE_HEAD)(own.hidden_states(_IDS)).square() + _log_probabilities(model)


def _network(config: ModelConfig, change: Callable[[Transformer], object] = lambda model: None) -> Transformer:
    """In float64, with other numbers than 0 in everything that begins there."""
    model = build_model(config, seed=1)
    change(model)
    model = model.double()
    draws = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draws)
    return model


def _with_head(name: str) -> Callable[[Transformer], object]:
    return lambda model: add_scalar_head(model, name)


def _with_values(model: Transformer) -> None:
    values = build_model(_NETWORK, seed=3)
    add_scalar_head(values, VALUE_HEAD)
    model.add_module(VALUE_MODEL, values)


def _with_lora(**settings: object) -> Callable[[Transformer], object]:
    return lambda model: add_lora(model, LoraConfig.model_validate({"rank": 2, **settings}))


_EVERY_LAYER = ["*_proj"]
_CASES: dict[str, tuple[ModelConfig, Callable[[Transformer], object], Callable[[Transformer], Tensor]]] = {
    "log-probabilities": (_NETWORK, lambda model: None, _log_probabilities),
    "tied log-probabilities": (_UNEVEN.replace(tie_weights=True), lambda model: None, _log_probabilities),
    "log-probabilities of uneven parts": (_UNEVEN, lambda model: None, _log_probabilities),
    "logits": (_NETWORK, lambda model: None, _logits),
    "rewards": (_NETWORK, _with_head(REWARD_HEAD), _rewards),
    "rewards beside uneven parts": (_UNEVEN, _with_head(REWARD_HEAD), _rewards),
    "policy and values": (_NETWORK, _with_head(VALUE_HEAD), _policy_and_values),
    "values apart": (_NETWORK, _with_values, _values_apart),
    "lora": (_NETWORK, _with_lora(targets=[*_EVERY_LAYER, "embedding"]), _log_probabilities),
    "lora in uneven parts": (_UNEVEN, _with_lora(targets=[*_EVERY_LAYER, "embedding", "lm_head"]), _logits),
    "dora": (_NETWORK, _with_lora(targets=_EVERY_LAYER, dora=True), _log_probabilities),
}


_OF_THREE = {
    "logits": (_THIRDS, lambda model: None, _logits),
    "tied log-probabilities": (_THIRDS.replace(tie_weights=True), lambda model: None, _log_probabilities),
}


def _compare() -> None:
    torch.set_num_threads(1)
    with Ranks.joined() as ranks:
        ranks.connect("cpu")
        mesh = init_device_mesh("cpu", (ranks.size,), mesh_dim_names=("tensor",))
        for case, (config, change, objective) in (_CASES if ranks.size == 2 else _OF_THREE).items():
            whole, parts = _network(config, change), _network(config, change)
            split(parts, SharingRanks.of(mesh))
            expected, found = objective(whole), objective(parts)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=case)
            expected.sum().backward()
            found.sum().backward()
            gradients = {name: parameter.grad for name, parameter in parts.named_parameters()}
            for name, parameter in whole.named_parameters():
                gradient = gradients.pop(name)
                if isinstance(gradient, DTensor):
                    gradient = gradient.full_tensor()
                assert (gradient is None) == (parameter.grad is None), (case, name)
                if gradient is not None:
                    torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-9, msg=f"{case}: {name}")
            assert not gradients, case
        if ranks.size == 3:
            _compare_writing(ranks)


def _compare_writing(ranks: Ranks) -> None:
    group = torch.distributed.group.WORLD
    assert group is not None
    for tied, stored in product((False, True), (None, "int8")):
        model = _network(_THIRDS.replace(tie_weights=tied)).float()
        whole = model if stored is None else quantize(model, "int8")
        parts = whole.sharing_copy()
        split_to_write(parts, SharingRanks(group, ranks.rank, ranks.size))
        for matrix in (parts.embedding.weight, parts.lm_head.weight):
            assert matrix.shape == ((34, 34, 33)[ranks.rank], 24)
            assert isinstance(matrix, StoredWeight) == (stored is not None)
            for memory in matrix.memory if isinstance(matrix, StoredWeight) else [matrix]:
                assert memory.untyped_storage().nbytes() == memory.nbytes
        assert (parts.embedding.weight is parts.lm_head.weight) == tied
        with torch.inference_mode():
            torch.testing.assert_close(parts(_IDS), whole(_IDS), rtol=1e-5, atol=1e-5)


def test_objectives_on_a_split_network_have_the_values_and_gradients_of_the_whole_one(together: Together) -> None:
    together.call(2, _compare)


def test_three_ranks_have_unequal_parts_of_a_vocabulary_to_learn_and_to_write(together: Together) -> None:
    together.call(3, _compare)
