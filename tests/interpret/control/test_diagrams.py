"""The closed loop against dense matrices and by hand, the reduction of diagrams, and the comparison of models."""

from __future__ import annotations

import pytest
import torch

from sheepop.adapt.quantization import quantize
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.core.errors import UsageError
from sheepop.interpret.control.diagrams import Box, ClosedLoop, block_diagrams, forward_map, shortened
from sheepop.interpret.control.gains import compare_points
from sheepop.interpret.control.jacobian import Jacobian, singular_values
from sheepop.interpret.control.operating_point import OperatingPoint
from sheepop.model import ModelConfig, build_model

from ..conftest import shaken
from .conftest import SMALL, last_stream, matrix, point_of


def test_a_loop_of_one_gain_is_a_geometric_series() -> None:
    """G = 1/2 everywhere: an impulse comes round as 1/2, 1/4, 1/8; the prompt, which is not fed, keeps 1/2."""
    loop = ClosedLoop(Jacobian(lambda x: 0.5 * x, torch.zeros(5, 1, dtype=torch.float64)), first_fed=2)
    impulse = torch.tensor([[0.0], [1], [0], [0], [0]], dtype=torch.float64)
    assert loop.jvp(impulse).flatten().tolist() == [0, 0.5, 0.25, 0.125, 0.0625]
    assert loop.jvp(impulse.roll(-1, 0)).flatten().tolist() == [0.5, 0, 0, 0, 0]


def test_the_closed_loop_is_that_of_dense_matrices(point: OperatingPoint) -> None:
    """(I + G H)^-1 G with G by torch.func from an ordinary pass, and H by its definition."""
    ids, embedding = point.trace.token_ids, point.model.embedding.weight
    pass_ = last_stream(point.model, ids)

    def expected_vectors(x: torch.Tensor) -> torch.Tensor:
        logits = point.model.read_out(point.model.finish(pass_(x)[None]))[0]
        return logits.softmax(-1) @ embedding * 8**0.5  # embeddings are scaled by the root of the width

    forward = matrix(expected_vectors, point.states[0])
    back = torch.zeros(40, 40, dtype=torch.float64)
    back[24:, 16:32] = -torch.eye(16, dtype=torch.float64)  # positions 2 and 3 are read again at 3 and 4
    closed = torch.linalg.solve(torch.eye(40, dtype=torch.float64) + forward @ back, forward)
    loop = ClosedLoop(forward_map(point), first_fed=3)
    vector = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(loop.jvp(vector).flatten(), closed @ vector.flatten())
    torch.testing.assert_close(loop.vjp(vector).flatten(), closed.T @ vector.flatten())
    found = singular_values(loop, steps=99, tolerance=0.0)
    assert found.largest[0].value == pytest.approx(float(torch.linalg.svdvals(closed)[0]))


def test_the_reduction_has_the_gains_of_the_network(point: OperatingPoint) -> None:
    found = block_diagrams(point, layer=1, fed=2)
    steps = found.steps
    assert [box.name for box in steps["a"]] == ["embedding", "positions", "block 0", "block 1", "block 2", "output"]
    assert [len(steps[step]) for step in "abcd"] == [6, 5, 3, 1]
    full = matrix(last_stream(point.model, point.trace.token_ids), point.states[0])
    head = matrix(point.read_in_nats, point.states[-1][-1:])
    assert found.whole.largest == pytest.approx(float(torch.linalg.svdvals(full)[0]), rel=1e-3)
    assert found.transfer.largest == pytest.approx(float(torch.linalg.svdvals(head @ full[-8:])[0]), rel=1e-3)
    assert "So H = 0" in found.sentences()[0] and "feeds 2 written tokens back" in found.sentences()[1]
    ids = torch.tensor([point.trace.token_ids])
    first = int(point.model(ids)[0, -1].argmax())
    assert found.written.startswith(point.trace.text_of(first))
    assert [picture.name for picture in found.pictures()] == ["blocks", "blocks_inside"]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"norm_position": "post"}, ["attention", "feed-forward", "attention norm", "feed-forward norm"]),
        ({"norm_position": "output"}, ["attention output norm", "feed-forward output norm"]),
        ({"parallel_residual": True, "shared_norm": True}, ["attention norm"]),
        ({"position_encoding": "rope", "norm_position": "sandwich"}, ["feed-forward norm", "feed-forward output norm"]),
    ],
)
def test_every_layout_is_drawn(settings: dict[str, object], names: list[str]) -> None:
    model = shaken(build_model(ModelConfig(**{**SMALL, "num_layers": 1, **settings}), seed=2), 0.2).double()
    found = block_diagrams(point_of(model, "ewe"), fed=1, probes=4)
    picture = list(found.pictures())[1].figure
    drawn = {text.get_text() for text in picture.axes[0].texts}
    assert set(names) <= drawn >= {"attention", "feed-forward", "$h_{0}$", "$h_{1}$"}
    is_parallel = "parallel_residual" in settings
    assert sum(text.get_text() == "+" for text in picture.axes[0].texts) == 2 - is_parallel
    assert ("positions" in found.table()[0]) != ("position_encoding" in settings)


@pytest.mark.parametrize(("options", "problem"), [({"layer": 3}, "--layer 3 does not"), ({"fed": 12}, "12 do not fit")])
def test_impossible_diagrams_are_refused(point: OperatingPoint, options: dict[str, int], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        block_diagrams(point, **options)


def test_a_change_of_one_block_is_named(point: OperatingPoint) -> None:
    """The values of block 1 are doubled: its gain changes, those of the blocks before it do not."""
    model = point.model.sharing_copy()
    values = model.blocks[1].attention.v_proj
    values.weight = torch.nn.Parameter(4 * values.weight)
    found = compare_points(point, point_of(model, "sheep"))
    assert found.first[0].largest == found.second[0].largest
    assert found.second[1].largest > found.first[1].largest
    assert "that changed most is that of block 1" in found.sentences()[0]
    same = compare_points(point, point)
    assert torch.equal(same.influence[0], same.influence[1])
    assert "The influence of 0 of 5 tokens" in same.sentences()[1]


def test_a_quantised_copy_is_compared_as_the_weights_that_it_stands_for() -> None:
    model, copy, rounded = (build_model(ModelConfig(**{**SMALL, "d_model": 32}), seed=0) for _ in range(3))
    copy = quantize(copy, "int8")
    stored = {name: weight for name, weight in copy.named_parameters() if isinstance(weight, StoredWeight)}
    with torch.no_grad():
        for name, weight in stored.items():
            rounded.get_parameter(name).copy_(weight.rows())
    found, expected = (compare_points(point_of(model, "sheep"), point_of(each, "sheep")) for each in (copy, rounded))
    assert [each.largest for each in found.second] == pytest.approx([each.largest for each in expected.second])
    assert found.first[0].largest != found.second[0].largest
    assert found.notes[1:] == ("The second model: Weights stored in int8 were dequantised.",) and stored


def test_models_that_cannot_be_compared_are_refused(point: OperatingPoint) -> None:
    deeper = point_of(build_model(ModelConfig(**{**SMALL, "num_layers": 4}), seed=0).double(), "sheep")
    with pytest.raises(UsageError, match="3 blocks of width 8, the second 4 blocks of width 8"):
        compare_points(point, deeper)
    with pytest.raises(UsageError, match="other tokens"):
        compare_points(point, point_of(point.model, "sheer"))


def test_a_long_chain_keeps_its_ends() -> None:
    boxes = [Box(f"block {layer}", "gain") for layer in range(20)]
    found = [box.line for box in shortened(boxes)]
    assert found == [*(box.line for box in boxes[:7]), "6 more blocks", *(box.line for box in boxes[13:])]
    assert shortened(boxes[:14]) == boxes[:14]
