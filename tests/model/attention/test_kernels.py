"""Attention's outputs and gradients, in each of its forms, against formulas derived by hand and written in NumPy.

With scores ``S0 = scale Q K^T``, capped ``S1 = c tanh(S0 / c)``, and ``S = S1 - slope |q - k|`` where a key is seen,
the weights are ``A = exp(S) / (sum exp(S) + exp(sink))`` and the output is ``O = A V``. Backwards ``dV = A^T dO``,
``dA = dO V^T``, ``dS = A (dA - r)`` with ``r`` the row sums of ``dA A``, ``dsink = -sum_q A_sink r``,
``dS0 = dS (1 - (S1 / c)^2)``, ``dQ = scale dS0 K`` and ``dK = scale dS0^T Q``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from sheepop.model.attention import attend
from sheepop.model.block_attention import block_mask
from sheepop.model.documents import Segments, number_documents
from sheepop.model.mask import AttentionKind, AttentionMask, attention_mask

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

    @property
    def kind(self) -> AttentionKind:
        return AttentionKind(window=self.window, slopes=self.slopes, soft_cap=bool(self.soft_cap), sinks=self.sinks)


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


def check(case: Case, mask: AttentionMask, documents: Tensor | None) -> None:
    *arrays, d_out = (torch.from_numpy(array) for array in inputs(case))
    # FlexAttention has no backward pass on a CPU.
    has_gradients = not isinstance(mask.documents, BlockMask)
    q, k, v, sinks = (array.requires_grad_(has_gradients) for array in arrays)
    out = attend(q, k, v, mask, scale=SCALE, soft_cap=case.soft_cap, sinks_H=sinks if case.sinks else None)
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


def whole(case: Case, backend: str) -> AttentionMask:
    kind = AttentionKind(**{**vars(case.kind), "backend": backend})
    return attention_mask(LENGTH, LENGTH, kind=kind)


def dense(case: Case, backend: str) -> AttentionMask:
    everything = torch.ones_like(DOCUMENTS, dtype=torch.bool)
    kind = AttentionKind(**{**vars(case.kind), "backend": backend})
    return attention_mask(LENGTH, LENGTH, document_ids=DOCUMENTS, key_mask=everything, kind=kind)


NUMBERS = number_documents(DOCUMENTS)
# The masks that each form reads, without documents or with them, and the cases that it cannot do.
FORMS: dict[str, tuple[Callable[[Case], AttentionMask], bool, set[str]]] = {
    "fused": (lambda case: whole(case, "sdpa"), False, {"soft cap", "all"}),
    "fused, packed": (lambda case: dense(case, "sdpa"), True, {"soft cap", "all"}),
    "stepwise": (lambda case: whole(case, "eager"), False, set()),
    "stepwise, packed": (lambda case: dense(case, "eager"), True, set()),
    "segments": (
        lambda case: AttentionMask(documents=Segments.of(NUMBERS, case.window, case.slopes)),
        True,
        {"soft cap", "sinks", "all"},
    ),
    "operator": (lambda case: AttentionMask(documents=NUMBERS), True, {*CASES} - {"plain"}),
    "blocks": (
        lambda case: AttentionMask(documents=block_mask(LENGTH, None, case.window), slopes=case.slopes),
        False,
        set(),
    ),
    "blocks, packed": (
        lambda case: AttentionMask(documents=block_mask(LENGTH, NUMBERS, case.window), slopes=case.slopes),
        True,
        set(),
    ),
}
PAIRS = [(form, case) for form, case in itertools.product(FORMS, CASES) if case not in FORMS[form][2]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("form", "case"), PAIRS)
def test_output_and_gradients_follow_the_hand_formulas(form: str, case: str) -> None:
    build, packed, _ = FORMS[form]
    # Blocks are computed by the formula and not by a kernel where nothing may be compiled.
    with torch.compiler.set_stance("force_eager"):
        check(CASES[case], build(CASES[case]), DOCUMENTS if packed else None)


@pytest.mark.parametrize(
    ("form", "case", "message"),
    [
        ("fused", "soft cap", "without a soft cap in fused attention"),
        ("segments", "soft cap", "without a soft cap in fused attention"),
        ("segments", "sinks", "without sinks among documents"),
        ("operator", "sinks", "without sinks among documents"),
    ],
)
def test_what_a_form_cannot_do_is_refused(form: str, case: str, message: str) -> None:
    # The mask of a plain case, as if it had been built for another network.
    with pytest.raises(ValueError, match=message):
        check(CASES[case], FORMS[form][0](CASES["plain"]), None)


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_network_hands_documents_to_a_form_that_can_do_the_case(case: str) -> None:
    """Whatever is asked for, the mask that is built for compiled attention among documents gives the right numbers."""
    chosen = CASES[case]
    widths = {"head_dim": WIDTH, "value_dim": chosen.value_width, "compiled": True}
    mask = attention_mask(LENGTH, LENGTH, document_ids=DOCUMENTS, kind=AttentionKind(**{**vars(chosen.kind), **widths}))
    assert not isinstance(mask.documents, Segments)
    assert isinstance(mask.documents, Tensor) == (case == "plain")
    check(chosen, mask, DOCUMENTS)
