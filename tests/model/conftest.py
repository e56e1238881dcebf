"""What the tests of the network share: one thread, and toy networks whose every part matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sheepop.model import ModelConfig, Transformer, build_model


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Toy operations are shorter than the hand-over to a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def toy_network() -> Callable[..., Transformer]:
    """Builds a small network in evaluation mode with weights ten times the initial ones.

    Initial weights of 0.02 at such widths would leave attention so weak that a wrong position or a wrong mask
    moved no logit by more than the tolerance of a comparison.
    """

    def build(**settings: Any) -> Transformer:
        sizes = {"vocab_size": 29, "d_model": 32, "num_layers": 2, "num_heads": 4, "max_seq_len": 24}
        model = build_model(ModelConfig(**{**sizes, "dropout": 0.0, **settings}), seed=5).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("proj.weight", "table")):
                    parameter *= 10
        return model

    return build
