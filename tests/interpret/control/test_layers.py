"""The health of layers, on networks with planted faults."""

from __future__ import annotations

import pytest
import torch

from sheepop.interpret.control.layers import beside_others, layer_health, update_ratios
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.train.tensor_batch import TensorBatch

SIZES = {"vocab_size": 7, "d_model": 8, "num_layers": 2, "num_heads": 4, "max_seq_len": 8, "activation": "relu"}


@pytest.fixture
def model() -> Transformer:
    return build_model(ModelConfig(**SIZES), 0).eval()


@pytest.fixture(scope="module")
def batch() -> TensorBatch:
    ids = torch.randint(7, (3, 8), generator=torch.Generator().manual_seed(0))
    return TensorBatch({"input_ids": ids}, ids, slice(None))


@torch.no_grad()
def test_a_healthy_network_has_no_dead_parts(model: Transformer, batch: TensorBatch) -> None:
    found = layer_health(model, batch)
    assert found.dead_heads == () and not any(share > 0.3 for share in found.dead_units.values())
    x, _ = model.embed(batch.inputs["input_ids"], None), None
    attention = model.layers[0].attention
    assert attention is not None
    normed = model.layers[0].attention_norm(x)
    q, k = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in (attention.q_proj(normed), attention.k_proj(normed)))
    scores = (q @ k.mT / 2**0.5).masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    assert found.attention_logits["blocks.0.attention"] == pytest.approx(float(scores.max()), rel=1e-5)


@torch.no_grad()
def test_planted_dead_heads_and_units_are_named(model: Transformer, batch: TensorBatch) -> None:
    attention, network = model.layers[1].attention, model.layers[0].feed_forward
    assert attention is not None and attention.v_proj is not None
    attention.o_proj.weight[:, 4:6] = 0  # what head 2 writes
    attention.v_proj.weight[0:2], attention.v_proj.bias[0:2] = 0, 0  # what head 0 reads
    network.up_proj.bias[:8] = -100.0  # type: ignore[union-attr, index]
    found = layer_health(model, batch)
    assert found.dead_heads == ("blocks.1.attention head 0", "blocks.1.attention head 2")
    assert found.dead_units["blocks.0.feed_forward"] == pytest.approx(8 / 32, abs=2 / 32)


def test_ratios_are_lengths_over_lengths() -> None:
    before = {"a": torch.full((2, 2), 2.0), "b": torch.ones(3, 3), "zero": torch.zeros(2, 2), "bias": torch.ones(3)}
    update = {
        "a": torch.full((2, 2), 0.5),
        "b": torch.full((3, 3), 0.5),
        "zero": torch.ones(2, 2),
        "bias": torch.ones(3),
    }
    assert update_ratios(before, update) == {"b": pytest.approx(0.5), "a": pytest.approx(0.25)}


def test_a_matrix_stands_beside_the_same_one_of_the_other_blocks() -> None:
    ups = {f"blocks.{layer}.up.weight": size for layer, size in enumerate([2.0, 12.0, 3.0, 5.0])}
    downs = {"encoder.blocks.0.down.weight": 4.0, "encoder.blocks.1.down.weight": 1.0, "blocks.0.down.weight": 9.0}
    found = beside_others({"embedding.weight": 7.0, **ups, **downs, "blocks.0.zero": 1.0, "blocks.1.zero": 0.0})
    # The medians of the others are 5, 3, 5 and 3.
    expected = {"blocks.0.up.weight": 0.4, "blocks.1.up.weight": 4.0, "blocks.2.up.weight": 0.6}
    expected |= {"blocks.3.up.weight": 5 / 3, "encoder.blocks.0.down.weight": 4.0}
    assert found == pytest.approx({**expected, "encoder.blocks.1.down.weight": 0.25, "blocks.1.zero": 0.0})
