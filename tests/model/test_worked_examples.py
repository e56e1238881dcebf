"""The worked examples of the mathematics that concern the network, each through SheepOp's own code."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sheepop.model import IGNORE_INDEX, ModelConfig, build_model
from sheepop.model.attention.choose import prepare_attention
from sheepop.model.attention.kernel import Attending, AttentionKind
from sheepop.model.attention.layer import Attention
from sheepop.model.feedforward import FeedForward
from sheepop.model.loss import cross_entropy, cross_entropy_sum
from sheepop.model.norms import build_norm
from sheepop.model.positions import sinusoidal_table

# The example of "004": logits (2, 3, 4) and targets (2, 3).
LOGITS = torch.tensor(
    [
        [[1.0, 2.0, 0.1, 0.3], [0.5, 1.2, 2.1, 0.7], [0.3, 0.6, 1.8, 2.4]],
        [[0.2, 1.5, 2.2, 0.8], [0.6, 0.9, 1.0, 2.0], [0.5, 1.0, 2.3, 1.7]],
    ]
)
TARGETS = torch.tensor([[1, 2, 3], [2, 1, 0]])
PER_TOKEN = [0.5307, 0.6179, 0.6079, 0.6305, 1.7665, 2.4864]

HELLO_SCORES = [
    [0.50, -0.10, 0.20, 0.15, 0.30],
    [-0.05, 0.45, 0.10, 0.08, 0.25],
    [0.15, 0.05, 0.40, 0.30, 0.20],
    [0.12, 0.08, 0.28, 0.35, 0.18],
    [0.25, 0.15, 0.22, 0.20, 0.42],
]


def plain(num_queries: int, num_keys: int | None = None) -> Attending:
    kind = AttentionKind()
    return prepare_attention(kind, kind.sight(num_queries, num_keys))


def weights_of(scores: Tensor) -> Tensor:
    """The attention weights (T, T) that `attend` gives to scores: unit keys hand them through, unit values out."""
    size = scores.shape[0]
    unit = torch.eye(size, dtype=scores.dtype)[None, None]
    queries = (scores * math.sqrt(size))[None, None]
    return plain(size).attend(queries, unit, unit)[0, 0]


def test_sinusoidal_values_at_width_512():
    table = sinusoidal_table(3, 512)
    torch.testing.assert_close(table[1, :4], torch.tensor([0.8415, 0.5403, 0.8219, 0.5697]), atol=5e-5, rtol=0)
    torch.testing.assert_close(table[2, :4], torch.tensor([0.9093, -0.4161, 0.9364, -0.3509]), atol=5e-5, rtol=0)
    assert table[1:, -1] == pytest.approx(1.0, abs=1e-6)


def test_sinusoidal_column_c_has_exponent_2_floor_half_c_over_d():
    table = sinusoidal_table(40, 10)
    for position in range(40):
        for column in range(10):
            angle = position / 10000.0 ** (2 * (column // 2) / 10)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            assert table[position, column].item() == pytest.approx(expected, abs=1e-7)


def test_projection():
    # One token attends to itself with weight 1, so the layer gives x W_V W_O; W_O hands both columns on.
    config = ModelConfig(d_model=4, num_heads=1, head_dim=2, bias=False, dropout=0.0)
    attention = Attention(config, layer=0)
    with torch.no_grad():
        attention.v_proj.weight.copy_(torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6], [0.7, 0.8]]).T)
        attention.o_proj.weight.copy_(torch.eye(4)[:, :2])
    result = attention(torch.tensor([[[0.1, 0.2, 0.3, 0.4]]]), plain(1))
    torch.testing.assert_close(result[0, 0], torch.tensor([0.50, 0.60, 0.0, 0.0]))


def test_self_attention_of_the_numpy_example():
    # The example has no mask. A query that stands last sees every key, so each row is run as the newest query.
    state = np.random.RandomState(42)
    x, w_q, w_k, w_v = (torch.from_numpy(state.rand(rows, 4)) for rows in (3, 4, 4, 4))
    keys, values = (x @ w_k)[None, None], (x @ w_v)[None, None]
    unit = torch.eye(3, dtype=torch.float64)[None, None]
    queries = [(row @ w_q)[None, None, None] for row in x]
    weights = torch.cat([plain(1, 3).attend(query, keys, unit)[0, 0] for query in queries])
    expected = [[0.527359, 0.115108, 0.357533], [0.435244, 0.199714, 0.365042], [0.506094, 0.129237, 0.364669]]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), atol=5e-7, rtol=0)
    output = plain(1, 3).attend(queries[0], keys, values)[0, 0, 0]
    first = torch.tensor([0.977014, 0.935311, 1.156819, 1.439387], dtype=torch.float64)
    torch.testing.assert_close(output, first, atol=5e-7, rtol=0)


def test_causal_attention_of_three_tokens():
    weights = weights_of(torch.tensor([[0.2, 0.1, 0.3], [0.1, 0.4, 0.2], [0.3, 0.2, 0.5]]))
    expected = torch.tensor([[1, 0, 0], [0.4256, 0.5744, 0], [0.3199, 0.2894, 0.3907]])
    torch.testing.assert_close(weights, expected, atol=5e-5, rtol=0)


def test_causal_attention_of_hello():
    rows = [
        [1],
        [0.3775, 0.6225],
        [0.3136, 0.2837, 0.4027],
        [0.2276, 0.2187, 0.2671, 0.2865],
        [0.1995, 0.1805, 0.1936, 0.1898, 0.2365],
    ]
    expected = torch.tensor([row + [0] * (5 - len(row)) for row in rows])
    torch.testing.assert_close(weights_of(torch.tensor(HELLO_SCORES)), expected, atol=6e-5, rtol=0)


def test_gelu_is_the_exact_one():
    feed_forward = FeedForward(ModelConfig(d_model=1, num_heads=1, d_ff=1, bias=False, dropout=0.0))
    with torch.no_grad():
        feed_forward.up_proj.weight.fill_(1.0)
        feed_forward.down_proj.weight.fill_(1.0)
    assert feed_forward(torch.tensor([[[0.021]]])).item() == pytest.approx(0.0106759, abs=5e-8)


def test_layer_norm():
    norm = build_norm(ModelConfig(d_model=4, num_heads=1))
    expected = torch.tensor([-1.3416, -0.4472, 0.4472, 1.3416])
    torch.testing.assert_close(norm(torch.tensor([1.0, 2.0, 3.0, 4.0])), expected, atol=5e-5, rtol=0)
    # eps stands inside the root: with one as large as the variance, the deviations shrink by sqrt(2).
    wide = build_norm(ModelConfig(d_model=4, num_heads=1, norm_eps=1.25))
    torch.testing.assert_close(wide(torch.tensor([1.0, 2.0, 3.0, 4.0])), expected / 2**0.5, atol=5e-5, rtol=0)


def test_cross_entropy_of_every_token_and_their_mean():
    for index, expected in enumerate(PER_TOKEN):
        only = torch.full((6,), IGNORE_INDEX)
        only[index] = TARGETS.flatten()[index]
        assert cross_entropy_sum(LOGITS, only.view(2, 3)).item() == pytest.approx(expected, abs=6e-5)
    assert cross_entropy(LOGITS, TARGETS).item() == pytest.approx(1.1067, abs=5e-5)
    assert cross_entropy_sum(LOGITS, TARGETS).item() == pytest.approx(6 * 1.1067, abs=3e-4)


def test_softmax_of_the_first_row():
    losses = [cross_entropy(LOGITS[:1, :1], torch.tensor([[label]])).item() for label in range(4)]
    assert [math.exp(-loss) for loss in losses] == pytest.approx([0.2164, 0.5882, 0.0880, 0.1075], abs=6e-5)


def test_ignored_labels_count_in_neither_sum_nor_divisor():
    labels = TARGETS.clone()
    labels[0, 1] = labels[1, 2] = IGNORE_INDEX
    kept = [PER_TOKEN[index] for index in (0, 2, 3, 4)]
    assert cross_entropy_sum(LOGITS, labels).item() == pytest.approx(sum(kept), abs=3e-4)
    assert cross_entropy(LOGITS, labels).item() == pytest.approx(sum(kept) / 4, abs=1e-4)


def test_a_batch_without_labels_has_loss_zero_and_gradient_zero():
    logits = LOGITS.clone().requires_grad_()
    loss = cross_entropy(logits, torch.full((2, 3), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_loss_at_initialisation_of_gpt2():
    config = ModelConfig(preset="gpt2")
    model = build_model(config, seed=0).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        logits = model(torch.randint(0, 50257, (1, 64), generator=generator))
        # The labels are redrawn because those of one batch alone move its mean by 0.07.
        draws = torch.randint(0, 50257, (24, 1, 64), generator=generator)
        loss = sum(cross_entropy(logits, labels).item() for labels in draws) / len(draws)
    # ln V, and half the variance of a logit: the tied head's 768 columns of variance 0.02^2.
    assert math.log(50257) == pytest.approx(10.8249, abs=5e-5)
    assert loss == pytest.approx(10.8249 + 0.1536, abs=0.05)


def test_attention_gradients_follow_the_hand_formulas():
    state = np.random.RandomState(0)
    q, k, v, d_out = (state.randn(5, 3) for _ in range(4))
    scores = q @ k.T / np.sqrt(3)
    exponentials = np.exp(scores) * np.tril(np.ones((5, 5)))
    weights = exponentials / exponentials.sum(1, keepdims=True)
    d_weights = d_out @ v.T
    d_scores = weights * (d_weights - (d_weights * weights).sum(1, keepdims=True))
    expected = (d_scores @ k / np.sqrt(3), d_scores.T @ q / np.sqrt(3), weights.T @ d_out)

    tensors = [torch.from_numpy(array)[None, None].requires_grad_() for array in (q, k, v)]
    out = plain(5).attend(*tensors)
    gradients = torch.autograd.grad(out, tensors, torch.from_numpy(d_out)[None, None])
    np.testing.assert_allclose(out[0, 0].detach(), weights @ v, atol=1e-12)
    for gradient, by_hand in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient[0, 0], by_hand, atol=1e-12)
