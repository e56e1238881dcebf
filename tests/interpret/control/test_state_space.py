"""A linear recurrent network whose system, reach and observability are known by hand, and real passes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from sheepop.core.errors import UsageError
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.interpret.control.state_space import state_space
from sheepop.model import ModelConfig, build_model
from sheepop.model.block import BlockInputs, BlockOutputs
from sheepop.model.probe import Probe

from .conftest import SMALL, last_stream, matrix, point_of


class Recurrence(nn.Module):
    """``x_(t+1) = A x_t + B u_t`` and ``y_t = C x_t + D u_t`` with A = 1/2, B and C of two channels, and D = 3."""

    attention = cross_attention = mixer = None
    watched = False

    def __init__(self) -> None:
        super().__init__()
        self.output = Probe()

    def forward(self, x_BTD: Tensor, inputs: BlockInputs, cache: None = None) -> BlockOutputs:
        state, found = torch.zeros_like(x_BTD[:, 0]), []
        seen = torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 0], dtype=x_BTD.dtype)
        for u in x_BTD.unbind(1):
            found.append(state + 3 * u)
            state = 0.5 * state + seen * u
        return BlockOutputs(self.output(torch.stack(found, 1)))


@pytest.fixture(scope="module")
def recurrent() -> OperatingPoint:
    """Reads four tokens by the recurrence, then passes through a block that adds nothing, and a linear output."""
    config = ModelConfig(**{**SMALL, "num_layers": 2, "final_norm": False, "tie_weights": False, "bias": False})
    model = build_model(config, seed=0).double()
    model.blocks[0] = Recurrence()
    model.blocks[1].attention.o_proj.weight.data.zero_()
    model.blocks[1].feed_forward.down_proj.weight.data.zero_()
    model.lm_head.weight.data = torch.randn(128, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return point_of(model, "ewes")


def test_the_system_of_a_recurrence_has_the_gains_of_its_matrices(recurrent: OperatingPoint) -> None:
    found = state_space(recurrent, 1, steps=20).blocks
    assert found[0].b is None and found[0].c is None
    assert found[0].d.largest == pytest.approx(3) and found[0].d.typical.value == pytest.approx(3)
    # The output at token 3 depends on those before by C A^k B for k = 0, 1, 2.
    assert found[0].memory is not None
    assert found[0].memory.largest == pytest.approx(math.sqrt(1 + 0.25 + 0.0625))
    assert found[1].d.largest == pytest.approx(1) and found[1].memory is not None
    assert found[1].memory.largest == 0.0


def test_reach_and_observability_of_a_recurrence_are_those_of_its_matrices(recurrent: OperatingPoint) -> None:
    """Token 1 reaches the output through C A B: half of two of its eight numbers."""
    found = state_space(recurrent, 1, steps=20)
    path = torch.diag(torch.tensor([0.5, 0.5, 0, 0, 0, 0, 0, 0], dtype=torch.float64))
    weight = recurrent.model.lm_head.weight @ path
    logits = recurrent.trace.logits_behind(-1)
    best = int(logits.argmax())
    for reach in found.reaches:
        steepness = float((weight[reach.token_id] - weight[best]).norm())
        assert reach.linear == pytest.approx(float(logits[best] - logits[reach.token_id]) / steepness)
        assert reach.real is None or reach.linear * 0.999 <= reach.real
    real = [reach.real / reach.linear for reach in found.reaches if reach.real is not None]
    assert min(real) == pytest.approx(1, abs=0.03)  # the network is linear
    p = logits.softmax(-1)
    metric = (torch.diag(p) - p[:, None] * p) @ weight
    exact = torch.linalg.eigvalsh(weight.T @ metric).clamp(min=0).sqrt().flip(0)
    assert [value.value for value in found.observed.spectrum.largest] == pytest.approx(exact.tolist(), abs=1e-9)
    assert found.distinct == int((0.5 * (0.1 * found.length * exact).square() >= 1e-3).sum()) <= 2
    squares = exact.square()
    assert found.effective_rank == pytest.approx(float(squares.sum() ** 2 / squares.square().sum()))


def test_a_block_of_attention_is_the_cache_and_the_direct_path(point: OperatingPoint) -> None:
    """J at the last token is D for itself, and C times what earlier tokens wrote for the others."""
    found = state_space(point, steps=40)
    for layer, own in enumerate(found.blocks):
        full = matrix(lambda x, layer=layer: point.run(layer, layer + 1, x[None])[0][0], point.states[layer])[-8:]
        direct, memory = full[:, -8:], full[:, :-8]
        assert own.d.largest == pytest.approx(float(torch.linalg.svdvals(direct)[0]), rel=1e-3)
        assert own.memory is not None and own.b is not None and own.c is not None
        assert own.memory.largest == pytest.approx(float(torch.linalg.svdvals(memory)[0]), rel=1e-3)
        block = point.model.blocks[layer]
        both = torch.cat([block.attention.k_proj.weight, block.attention.v_proj.weight])
        written = both @ matrix(block.attention_norm, point.states[layer][-1:])
        assert own.b.largest == pytest.approx(float(torch.linalg.svdvals(written)[0]), rel=1e-3)
        assert own.memory.largest <= own.c.largest * _written(point, layer) * 1.001


def _written(point: OperatingPoint, layer: int) -> float:
    """The largest gain from the streams of tokens to their keys and values."""
    block = point.model.blocks[layer]
    both = torch.cat([block.attention.k_proj.weight, block.attention.v_proj.weight])
    gains = [torch.linalg.svdvals(both @ matrix(block.attention_norm, x_D[None]))[0] for x_D in point.states[layer]]
    return float(max(gains))


def test_what_is_said_to_be_reached_is_reached_by_a_real_pass(point: OperatingPoint) -> None:
    found = state_space(point, 3, candidates=5)
    reached = next(reach for reach in found.reaches if reach.real is not None)
    pass_ = last_stream(point.model, point.trace.token_ids)

    def logits(vector: Tensor) -> Tensor:
        changed = point.states[0].clone()
        changed[3] = vector
        return point.model.read_out(point.model.finish(pass_(changed)[None]))[0, -1]

    vector = point.states[0][3].clone().requires_grad_()
    before = logits(vector)
    best = int(before.argmax())
    (slope,) = torch.autograd.grad(before[reached.token_id] - before[best], vector)
    assert reached.linear == pytest.approx(float((before[best] - before[reached.token_id]).detach() / slope.norm()))
    at = [logits(vector + factor * (reached.real or 0) * slope / slope.norm()) for factor in (0.8, 1.0)]
    assert int(at[0].argmax()) != reached.token_id and int(at[1].argmax()) == reached.token_id


def test_the_seed_changes_draws_and_no_pass(point: OperatingPoint) -> None:
    found = state_space(point, candidates=1, probes=4)
    assert found.passes_equal and len(found.drawn) == 16 and len(set(found.drawn)) > 1
    assert found.drawn == state_space(point, candidates=1, probes=4).drawn
    assert "The seed does not change the forward pass." in found.sentences()[-1]
    assert found.dimensions["numbers in the cache for each token"] == 3 * 2 * 8
    assert found.dimensions["parameters"] == sum(weight.numel() for weight in point.model.parameters())


def test_one_token_has_no_memory_and_no_place_beside_it() -> None:
    lone = point_of(build_model(ModelConfig(**SMALL), seed=0).double(), "s")
    found = state_space(lone, probes=4, candidates=2)
    assert all(own.memory is None and own.c is None and own.b is not None for own in found.blocks)
    with pytest.raises(UsageError, match="--position 1 is outside the prompt, which has 1 token"):
        state_space(lone, 1)
