"""The choice of a kernel, and what it says about it."""

from __future__ import annotations

import pytest
import torch

from sheepop.core.errors import ConfigError
from sheepop.model.attention import blocks, products
from sheepop.model.attention.choose import KERNELS, choose_kernel
from sheepop.model.attention.features import BACKEND_FEATURES, KERNEL_FEATURES
from sheepop.model.attention.kernel import AttentionKind

IDS = torch.arange(32)[None] // 9
CUDA = torch.device("cuda")
WIDTHS = {"head_dim": 64, "value_dim": 64}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has Triton, and a processor that does not multiply bfloat16, whatever is here."""
    monkeypatch.setattr(blocks, "_has_triton", lambda _: True)
    monkeypatch.setattr(products, "HAS_BFLOAT16_PRODUCTS", False)


@pytest.mark.parametrize(
    ("settings", "packed", "chosen"),
    [
        ({}, False, "fused"),
        ({"window": 4}, False, "strips"),
        ({}, True, "segments"),
        ({"sinks": True}, True, "fused"),
        ({"soft_cap": True}, True, "stepwise"),
        ({"watched": True}, False, "stepwise"),
        ({"backend": "eager", "window": 4}, False, "stepwise"),
        ({"device": CUDA}, False, "fused"),
        ({"device": CUDA}, True, "blocks"),
        ({"device": CUDA, "window": 4}, False, "blocks"),
        ({"device": CUDA, "sinks": True}, False, "blocks"),
        ({"device": CUDA, "soft_cap": True}, False, "blocks"),
        ({"device": CUDA, "dropout": 0.1}, True, "segments"),
        ({"device": CUDA, "dropout": 0.1, "compiled": True}, True, "segments"),
        ({"device": CUDA, "dropout": 0.1, "window": 4}, False, "strips"),
        ({"device": CUDA, "backend": "sdpa"}, True, "segments"),
        ({"device": CUDA, "backend": "flex"}, False, "blocks"),
        ({"device": CUDA, "cached": True, "window": 4}, False, "strips"),
        ({"device": CUDA, "head_dim": 8, "value_dim": 8}, True, "segments"),
    ],
)
def test_the_kernel_that_can_do_it_and_pays_is_taken(settings, packed, chosen) -> None:
    # Sight is asked of the CPU: where its tensors are is no matter to the choice.
    kind = AttentionKind(**{**WIDTHS, **settings})
    sight = AttentionKind(window=kind.window).sight(32, document_ids=IDS if packed else None)
    assert choose_kernel(kind, sight).kernel.name == chosen


def test_the_choice_is_explained_in_words() -> None:
    kind = AttentionKind(**WIDTHS, dropout=0.1)
    assert choose_kernel(kind, kind.sight(32, document_ids=IDS)).why == (
        "segments, since blocks needs an NVIDIA GPU from 2020 or later, Triton, a C compiler, and heads of at least "
        "16 columns (this is cpu, with heads of 64), and products needs a processor with bfloat16 products "
        "(AVX-512 or AMX), and strips has no documents"
    )


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 5), (3, 5)])
def test_blocks_are_refused_where_they_cannot_be_computed(queries, keys) -> None:
    kind = AttentionKind(**WIDTHS, backend="flex")
    with pytest.raises(
        ConfigError, match=r"flex needs an NVIDIA GPU from 2020.*this network runs on cpu with heads of 64"
    ):
        choose_kernel(kind, kind.sight(queries, keys))


def test_the_table_names_every_kernel_and_what_the_configuration_may_ask_of_each_backend() -> None:
    assert [kernel.name for kernel in KERNELS] == list(KERNEL_FEATURES)
    asked = {"dropout", "soft cap", "sinks", "bidirectional attention"}
    assert {name: features & asked for name, features in BACKEND_FEATURES.items()} == {
        "eager": asked,
        "sdpa": {"dropout", "sinks", "bidirectional attention"},
        "flex": {"soft cap", "sinks"},
    }
