"""The cost formulas against torch's own counter of floating-point operations."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sheepop.model import ModelConfig, build_model, cross_entropy
from sheepop.model.cost import forward_flops_per_token, matrix_parameters, training_flops_per_token

BATCH, LENGTH = 2, 12
CONFIGS = [
    ModelConfig(vocab_size=50, d_model=32, num_layers=2, num_heads=4, max_seq_len=16),
    ModelConfig(
        vocab_size=50, d_model=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=12, max_seq_len=16,
        position_encoding="rope", activation="swiglu", norm="rmsnorm", bias=False, tie_weights=False,
    ),
    ModelConfig(preset="gpt2", vocab_size=60, d_model=48, num_layers=1, num_heads=3, max_seq_len=16),
]  # fmt: skip


def counted(config: ModelConfig) -> tuple[int, int]:
    """Operations of the matrix products of one forward, and of forward and backward together."""
    model = build_model(config, seed=0)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    # The plain backend multiplies whole T x T squares, which the counter sees as ordinary products.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = cross_entropy(model(ids), ids)
        forward = counter.get_total_flops()
        loss.backward()
        return forward, counter.get_total_flops()


@pytest.mark.parametrize("config", CONFIGS, ids=["sheepop", "llama", "gpt2"])
def test_flops_equal_those_counted(config):
    forward, training = counted(config)
    assert forward_flops_per_token(config, LENGTH) * BATCH * LENGTH == forward
    # A causal network needs the lower triangle of the square that was counted: T (T + 1) / 2 of T^2 pairs.
    unneeded_pairs = sum(1 for query in range(LENGTH) for key in range(LENGTH) if key > query)
    per_pair = 3 * 2 * 2 * config.num_layers * config.num_heads * config.head_size
    expected = training - BATCH * unneeded_pairs * per_pair
    assert training_flops_per_token(config, LENGTH) * BATCH * LENGTH == expected


@pytest.mark.parametrize("config", CONFIGS, ids=["sheepop", "llama", "gpt2"])
def test_matrix_parameters_are_the_matrices_of_the_network(config):
    model = build_model(config, seed=0)
    matrices = {name: p.numel() for name, p in model.named_parameters() if name.endswith("proj.weight")}
    assert matrix_parameters(config) == sum(matrices.values()) + model.lm_head.weight.numel()


def test_gpt2_small_by_hand():
    # 12 layers of 12 * 768^2 weights and the head of 50257 * 768.
    assert matrix_parameters(ModelConfig(preset="gpt2")) == 12 * 12 * 768**2 + 50257 * 768
