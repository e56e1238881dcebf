"""The coordinate check: a fit over the width, a layer whose growth is known by hand, and networks at other widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sheepop.core.errors import ConfigError, UsageError
from sheepop.interpret.control.coordinates import Coordinates, Growth, coordinates, named, usual_widths, widened
from sheepop.model import ModelConfig

WIDTHS = (8, 16, 32, 64)
SIZES: dict[str, Any] = {"vocab_size": 16, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 8}


@pytest.mark.parametrize("power", [-0.5, 0.0, 1.0])
def test_a_power_of_the_width_is_found_exactly(power: float) -> None:
    found = Growth.of(WIDTHS, [3 * width**power for width in WIDTHS])
    assert (found.factor, found.low, found.high) == pytest.approx((2**power,) * 3)
    assert found.direction == {-0.5: -1, 0.0: 0, 1.0: 1}[power]


def test_the_interval_is_that_of_a_regression() -> None:
    sizes = [0.5, 0.9, 2.3, 3.1]
    (slope, _), covariance = np.polyfit(np.log2(WIDTHS), np.log2(sizes), 1, cov=True)
    found = Growth.of(WIDTHS, sizes)
    error = 2 * covariance[0, 0] ** 0.5
    assert (found.factor, found.low, found.high) == pytest.approx(
        (2**slope, 2 ** (slope - error), 2 ** (slope + error))
    )


def test_what_does_not_change_does_not_grow_and_what_is_not_finite_does() -> None:
    assert Growth.of(WIDTHS, [0.0] * 4).direction == 0
    assert Growth.of(WIDTHS, [1.0, 1.0, float("inf"), 1.0]).direction == 1


def layer(rate: Callable[[int], float]) -> Callable[[int], Iterator[dict[str, Tensor]]]:
    """A linear layer on an input of ones and minus ones, which Adam moves so that its sum falls.

    The first step of Adam moves each weight by the rate against the sign of its gradient, which is that of the input.
    So each output changes by the rate times the width.
    """

    def trial(width: int) -> Iterator[dict[str, Tensor]]:
        x = torch.tensor([1.0, -1.0]).repeat(width // 2)
        weight = nn.Parameter(torch.zeros(3, width))
        optimizer = torch.optim.Adam([weight], lr=rate(width))
        yield {"blocks.0.feed_forward.pre_activation": (weight @ x).detach() + 1.0}
        for _ in range(2):
            optimizer.zero_grad()
            (weight @ x).sum().backward()
            optimizer.step()
            yield {"blocks.0.feed_forward.pre_activation": (weight @ x).detach() + 1.0}

    return trial


def checked(rate: Callable[[int], float], is_mup: bool) -> Coordinates:
    return coordinates(WIDTHS, layer(rate), rate=0.01, is_mup=is_mup)


def test_a_fixed_rate_of_adam_moves_pre_activations_by_the_rate_times_the_width() -> None:
    found = checked(lambda width: 0.01, is_mup=False)
    assert found.changes[0, 0].tolist() == pytest.approx([0.01 * width for width in WIDTHS], rel=1e-4)
    (start,), (after,) = found.at_start, found.after
    assert start.factor == pytest.approx(1.0) and after.factor == pytest.approx(2.0, rel=1e-3)
    said = found.sentences()
    assert "The change of the pre-activations of block 0 after 2 steps grows by a factor of 2.00" in said[0]
    assert "This parametrisation is not muP." in said[1] and "model.mup_base_d_model=8" in said[1]
    assert found.to_dict()["places"][0]["after"]["direction"] == 1


def test_a_rate_that_falls_with_the_width_moves_them_equally() -> None:
    found = checked(lambda width: 0.08 / width, is_mup=True)
    assert found.changes[0, 0].tolist() == pytest.approx([0.08] * 4, rel=1e-4)
    assert [growth.direction for growth in found.after] == [0]
    (said,) = found.sentences()
    assert "every activation has changed about equally at every width from d_model 8 to 64" in said


def test_a_rate_that_falls_too_fast_is_named_too() -> None:
    found = checked(lambda width: 1 / width**2, is_mup=True)
    assert "falls by a factor of 0.50" in found.sentences()[0]
    assert "does not train like muP, although its initialization is mup" in found.sentences()[1]


def test_scores_of_later_keys_are_left_out_and_what_diverges_is_said() -> None:
    def trial(width: int) -> Iterator[dict[str, Tensor]]:
        yield {"blocks.1.attention.scores": torch.tensor([3.0, -torch.inf, 4.0])}
        yield {"blocks.1.attention.scores": torch.tensor([4.0, -torch.inf, 4.0 if width < 64 else torch.nan])}

    found = coordinates(WIDTHS, trial, rate=0.01, is_mup=False)
    assert found.sizes[0].tolist() == pytest.approx([12.5**0.5] * 4)
    assert found.changes[0, 0, :3].tolist() == pytest.approx([0.5**0.5] * 3)
    assert (
        "Numbers of the attention scores of block 1 are not finite at d_model 64 after 1 step" in found.sentences()[0]
    )
    assert found.to_dict()["places"][0]["changes"][0][3] is None


def test_fewer_than_three_widths_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 3 widths, not 2"):
        coordinates((8, 16, 16), layer(lambda width: 0.01), rate=0.01, is_mup=False)


def test_another_width_has_as_many_times_the_heads_and_units() -> None:
    config = ModelConfig(**SIZES, num_kv_heads=2, d_ff=96, position_encoding="sinusoidal")
    wide = widened(config, 64)
    assert (wide.d_model, wide.num_heads, wide.num_kv_heads, wide.d_ff, wide.head_dim) == (64, 8, 4, 192, 8)
    assert wide.embedding_scale == pytest.approx(8.0) and widened(config, 32) == config
    assert usual_widths(config) == (16, 32, 64, 128)
    assert usual_widths(ModelConfig(**SIZES, d_ff=128)) == (8, 16, 32, 64)


def test_the_scale_of_a_mup_embedding_stays_that_of_its_base() -> None:
    config = ModelConfig(**SIZES, initialization="mup", mup_base_d_model=16)
    assert widened(config, 64).embedding_scale == config.embedding_scale == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, r"At the width 20 model.num_heads = 4 is no whole number times 20/32"),
        ({"experts": {"count": 2}}, "model.experts has widths of its own"),
    ],
)
def test_widths_that_a_network_cannot_have_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        widened(ModelConfig(**SIZES, **settings), 20)


def test_places_have_names() -> None:
    assert named("blocks.2.attention_output") == "attention output of block 2"
    assert named("logits") == "logits"
