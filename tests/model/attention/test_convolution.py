"""Short convolutions of queries, keys and values, against torch's own convolution."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from sheepop.model.attention.convolution import ShortConvolution


def drawn(width: int, channels: int) -> ShortConvolution:
    convolution = ShortConvolution(width, channels)
    torch.nn.init.normal_(convolution.taps, generator=torch.Generator().manual_seed(width))
    return convolution


def expected(convolution: ShortConvolution, x_BTE: torch.Tensor) -> torch.Tensor:
    """torch's kernels lie in order of time: the last weight, here 1, is that of the token itself."""
    taps = convolution.taps.detach().double()
    kernel = torch.cat((taps.flip(0), torch.ones(1, taps.shape[1]).double())).T[:, None]
    padded = functional.pad(x_BTE.double().transpose(1, 2), (len(taps), 0))
    return functional.conv1d(padded, kernel, groups=taps.shape[1]).transpose(1, 2)


@pytest.mark.parametrize("width", [2, 3, 7])
@pytest.mark.parametrize("num_tokens", [1, 5, 20])
def test_it_is_a_causal_convolution_of_each_channel(width: int, num_tokens: int) -> None:
    convolution = drawn(width, 6)
    x_BTE = torch.randn(2, num_tokens, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(convolution(x_BTE).double(), expected(convolution, x_BTE), atol=1e-5, rtol=1e-5)


def test_nothing_comes_from_another_document() -> None:
    convolution = drawn(4, 6)
    x_BTE = torch.randn(1, 14, 6, generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 2 + [1] * 3 + [2] * 9])
    parts = [expected(convolution, part) for part in x_BTE.split([2, 3, 9], dim=1)]
    found = convolution(x_BTE, documents)
    torch.testing.assert_close(found.double(), torch.cat(parts, dim=1), atol=1e-5, rtol=1e-5)
