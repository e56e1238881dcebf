"""The whole network against a second one, written in slow float64 NumPy from the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sheepop.model import ModelConfig, build_model, cross_entropy

Weights = dict[str, np.ndarray]


def layer_norm(x: np.ndarray, weights: Weights, name: str, eps: float) -> np.ndarray:
    rows = []
    for row in x:
        mean = sum(row) / len(row)
        variance = sum((value - mean) ** 2 for value in row) / len(row)
        rows.append((row - mean) / math.sqrt(variance + eps) * weights[f"{name}.weight"] + weights[f"{name}.bias"])
    return np.array(rows)


def linear(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def attention(x: np.ndarray, weights: Weights, name: str, heads: int) -> np.ndarray:
    q, k, v = (linear(x, weights, f"{name}.{letter}_proj") for letter in "qkv")
    width = q.shape[1] // heads
    out = np.zeros_like(q)
    for head in range(heads):
        columns = slice(head * width, (head + 1) * width)
        for t in range(len(x)):
            scores = np.array([q[t, columns] @ k[s, columns] / math.sqrt(width) for s in range(t + 1)])
            exponentials = np.exp(scores)
            for s in range(t + 1):
                out[t, columns] += exponentials[s] / exponentials.sum() * v[s, columns]
    return linear(out, weights, f"{name}.o_proj")


def feed_forward(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    hidden = linear(x, weights, f"{name}.up_proj")
    gelu = np.vectorize(lambda value: value * 0.5 * (1 + math.erf(value / math.sqrt(2))))
    return linear(gelu(hidden), weights, f"{name}.down_proj")


def network(ids: list[int], weights: Weights, config: ModelConfig) -> np.ndarray:
    """Logits (T, V) of the architecture of the documents: sinusoids, LayerNorm before, GELU, biases, tied head."""
    x = np.array([weights["embedding.weight"][token] * math.sqrt(config.d_model) for token in ids])
    for position in range(len(ids)):
        for column in range(config.d_model):
            angle = position / 10000 ** (2 * (column // 2) / config.d_model)
            x[position, column] += math.cos(angle) if column % 2 else math.sin(angle)
    for layer in range(config.num_layers):
        block = f"blocks.{layer}"
        normed = layer_norm(x, weights, f"{block}.attention_norm", config.norm_eps)
        x = x + attention(normed, weights, f"{block}.attention", config.num_heads)
        normed = layer_norm(x, weights, f"{block}.feed_forward_norm", config.norm_eps)
        x = x + feed_forward(normed, weights, f"{block}.feed_forward")
    return layer_norm(x, weights, "final_norm", config.norm_eps) @ weights["embedding.weight"].T


@pytest.mark.parametrize("scale", [1.0, 8.0], ids=["initial", "large-weights"])
def test_logits_and_loss_equal_the_slow_network(scale):
    config = ModelConfig(preset="sheepop-tiny", vocab_size=40, d_model=32, num_layers=3, max_seq_len=16)
    model = build_model(config, seed=2).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.weight"):
                parameter *= scale
            elif parameter.ndim == 1:  # norms and biases too, which start at 1 and 0
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    ids = torch.randint(0, 40, (2, 9), generator=generator)
    labels = torch.randint(0, 40, (2, 9), generator=generator)
    weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}

    expected = np.stack([network(row.tolist(), weights, config) for row in ids])
    logits = model(ids).detach()
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    losses = [
        math.log(sum(math.exp(value) for value in row)) - row[label]
        for row, label in zip(expected.reshape(-1, 40), labels.flatten().tolist(), strict=True)
    ]
    assert cross_entropy(logits, labels).item() == pytest.approx(sum(losses) / len(losses), abs=1e-5)
