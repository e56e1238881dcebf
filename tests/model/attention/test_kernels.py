"""Attention's outputs and gradients, in each of its forms, against formulas derived by hand and written in NumPy.

With scores ``S0 = scale Q K^T``, capped ``S1 = c tanh(S0 / c)``, and ``S = S1 - slope |q - k|`` where a key is seen,
the weights are ``A = exp(S) / (sum exp(S) + exp(sink))`` and the output is ``O = A V``. Backwards ``dV = A^T dO``,
``dA = dO V^T``, ``dS = A (dA - r)`` with ``r`` the row sums of ``dA A``, ``dsink = -sum_q A_sink r``,
``dS0 = dS (1 - (S1 / c)^2)``, ``dQ = scale dS0 K`` and ``dK = scale dS0^T Q``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sheepop.model.attention.blocks import Blocks, BlocksAttention
from sheepop.model.attention.choose import choose_kernel
from sheepop.model.attention.fused import Fused
from sheepop.model.attention.kernel import Attending, AttentionKind, Kernel, Score
from sheepop.model.attention.products import Products
from sheepop.model.attention.segments import Segments
from sheepop.model.attention.stepwise import Stepwise

ROWS, HEADS, KV_HEADS, WIDTH, SCALE = 2, 4, 2, 5, 0.8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 2 + [2] * 6, [3] + [4] * 12])
LENGTH = DOCUMENTS.shape[1]


@dataclass(frozen=True)
class Case:
    """What attention is asked for."""

    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    window: int | None = None
    value_width: int = WIDTH

    @property
    def slopes(self) -> Tensor | None:
        return torch.tensor([0.7, 0.4, 0.2, 0.1], dtype=torch.float64) if self.alibi else None

    def kind(self, **settings: Any) -> AttentionKind:
        return AttentionKind(
            window=self.window,
            slopes=self.slopes,
            soft_cap=bool(self.soft_cap),
            sinks=self.sinks,
            head_dim=WIDTH,
            value_dim=self.value_width,
            **settings,
        )

    def prepare(self, kernel: Kernel, documents: Tensor | None = None, **settings: Any) -> Attending:
        kind = self.kind(**settings)
        return kernel.prepare(kind, kind.sight(LENGTH, document_ids=documents))


def inputs(case: Case) -> list[np.ndarray]:
    """Queries, keys, values, sinks, and the gradient of the output."""
    state = np.random.RandomState(0)
    q, k = state.randn(ROWS, HEADS, LENGTH, WIDTH), state.randn(ROWS, KV_HEADS, LENGTH, WIDTH)
    v, sinks = state.randn(ROWS, KV_HEADS, LENGTH, case.value_width), state.randn(HEADS)
    return [q, k, v, sinks, state.randn(ROWS, HEADS, LENGTH, case.value_width)]


def by_hand(case: Case, documents: Tensor | None) -> dict[str, np.ndarray]:
    """The output and the gradients of queries, keys, values and sinks."""
    q, k, v, sinks, d_out = inputs(case)
    out, found = np.zeros_like(d_out), [np.zeros_like(array) for array in (q, k, v, sinks)]
    d_q, d_k, d_v, d_sinks = found
    places = np.arange(LENGTH)
    for b, h in np.ndindex(ROWS, HEADS):
        g = h * KV_HEADS // HEADS
        raw = SCALE * q[b, h] @ k[b, g].T
        capped = raw if case.soft_cap is None else case.soft_cap * np.tanh(raw / case.soft_cap)
        distance = places[:, None] - places
        scores = capped - (0.0 if case.slopes is None else case.slopes[h].item() * distance)
        seen = distance >= 0
        if case.window is not None:
            seen &= distance < case.window
        if documents is not None:
            seen &= documents[b].numpy()[:, None] == documents[b].numpy()
        exponentials = np.where(seen, np.exp(scores), 0.0)
        sink = np.exp(sinks[h]) if case.sinks else 0.0
        total = exponentials.sum(1, keepdims=True) + sink
        weights = exponentials / total
        out[b, h] = weights @ v[b, g]
        d_weights = d_out[b, h] @ v[b, g].T
        row_sums = (d_weights * weights).sum(1, keepdims=True)
        d_scores = weights * (d_weights - row_sums)
        d_sinks[h] -= (sink / total * row_sums).sum()
        d_raw = d_scores if case.soft_cap is None else d_scores * (1 - (capped / case.soft_cap) ** 2)
        d_q[b, h] = SCALE * d_raw @ k[b, g]
        d_k[b, g] += SCALE * d_raw.T @ q[b, h]
        d_v[b, g] += weights.T @ d_out[b, h]
    return {"out": out, "q": d_q, "k": d_k, "v": d_v, **({"sinks": d_sinks} if case.sinks else {})}


def check(case: Case, attending: Attending, documents: Tensor | None) -> None:
    *arrays, d_out = (torch.from_numpy(array) for array in inputs(case))
    # FlexAttention has no backward pass on a CPU.
    has_gradients = not isinstance(attending, BlocksAttention)
    q, k, v, sinks = (array.requires_grad_(has_gradients) for array in arrays)
    out = attending.attend(q, k, v, Score(SCALE, case.soft_cap, sinks if case.sinks else None))
    expected = by_hand(case, documents)
    found = {"out": out.detach()}
    if has_gradients:
        of = {"q": q, "k": k, "v": v, **({"sinks": sinks} if case.sinks else {})}
        found |= dict(zip(of, torch.autograd.grad(out, list(of.values()), d_out), strict=True))
        assert found.keys() == expected.keys()
    for name, ours in found.items():
        np.testing.assert_allclose(ours, expected[name], atol=1e-10, err_msg=name)


CASES = {
    "plain": Case(),
    "soft cap": Case(soft_cap=0.9),
    "sinks": Case(sinks=True),
    "alibi": Case(alibi=True),
    "window": Case(window=3),
    "alibi and window": Case(alibi=True, window=4),
    "value heads": Case(value_width=3),
    "all": Case(soft_cap=1.5, sinks=True, alibi=True, window=3, value_width=3),
}


NO_CAP, NO_SINKS = {"soft cap", "all"}, {"sinks", "all"}
ALL_BUT_PLAIN = {*CASES} - {"plain", "value heads"}
# Kernels, how they are prepared, and the cases that they cannot do.
FORMS: dict[str, tuple[Kernel, dict[str, Any], set[str]]] = {
    "fused": (Fused(), {}, NO_CAP),
    "stepwise": (Stepwise(), {}, set()),
    "segments": (Segments(), {}, NO_CAP | NO_SINKS),
    "operator": (Segments(), {"compiled": True}, ALL_BUT_PLAIN | {"value heads"}),
    "products": (Products(), {}, ALL_BUT_PLAIN),
    "blocks": (Blocks(), {}, set()),
}
PAIRS = [(form, case) for form, case in itertools.product(FORMS, CASES) if case not in FORMS[form][2]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(("form", "case"), PAIRS)
def test_output_and_gradients_follow_the_hand_formulas(form: str, case: str, packed: bool) -> None:
    kernel, settings, _ = FORMS[form]
    documents = DOCUMENTS if packed else None
    if kernel.name == "segments" and not packed:
        documents = torch.zeros_like(DOCUMENTS)
    # Blocks are computed by the formula and not by a kernel where nothing may be compiled.
    with torch.compiler.set_stance("force_eager"):
        check(CASES[case], CASES[case].prepare(kernel, documents, **settings), documents)


@pytest.mark.parametrize(
    ("form", "case", "message"),
    [
        ("fused", "soft cap", "fused attention has no soft cap"),
        ("fused", "sinks", "prepared without sinks"),
        ("segments", "soft cap", "segments attention has no soft cap"),
        ("segments", "sinks", "segments attention has no sinks"),
        ("operator", "sinks", "segments attention has no sinks"),
        ("products", "sinks", "products attention has no sinks"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused(form: str, case: str, message: str) -> None:
    kernel, settings, _ = FORMS[form]
    # Prepared for a plain case, as if it had been chosen for another network.
    attending = CASES["plain"].prepare(kernel, DOCUMENTS if kernel.name == "segments" else None, **settings)
    with pytest.raises(ValueError, match=message):
        check(CASES[case], attending, None)


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_network_hands_documents_to_a_kernel_that_can_do_the_case(case: str) -> None:
    """Whatever is asked for, the kernel that is chosen there gives the right numbers."""
    chosen = CASES[case]
    kind = chosen.kind(compiled=True)
    kernel = choose_kernel(kind, kind.sight(LENGTH, document_ids=DOCUMENTS)).kernel
    assert (kernel.name == "segments") == (case == "plain")
    check(chosen, chosen.prepare(kernel, DOCUMENTS, compiled=True), DOCUMENTS)
