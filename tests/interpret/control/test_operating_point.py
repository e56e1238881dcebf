"""An operating point is the network's own pass, and what cannot be linearised is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sheepop.adapt.quantization import quantize
from sheepop.adapt.stored_weight import StoredWeight
from sheepop.core.errors import CheckpointError, UsageError
from sheepop.interpret.control.analyses import Analyses
from sheepop.interpret.control.operating_point import OperatingPoint, plain_copy
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.tokenizer import CharTokenizer

from ...model.architectures import ARCHITECTURES
from ..conftest import PAIRS, shaken
from .conftest import SMALL, last_stream, matrix, point_of


def toy(**settings: object) -> Transformer:
    return shaken(build_model(ModelConfig(**{**SMALL, **settings}), seed=2), 0.2)


def test_the_stream_and_the_logits_are_those_of_the_network(point: OperatingPoint) -> None:
    ids = torch.tensor([point.trace.token_ids])
    streams = point.run(0, 3, point.states[:1])
    for layer, stream in enumerate(streams):
        assert torch.equal(stream[0], point.states[layer + 1])
    torch.testing.assert_close(point.logits(streams[-1]), point.model(ids))


def test_the_whole_jacobian_is_the_product_of_the_blocks(point: OperatingPoint) -> None:
    tangent = torch.randn(point.states[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = tangent
    for layer in range(3):
        expected = point.between(layer, layer + 1).jvp(expected)
    torch.testing.assert_close(point.between(0, 3).jvp(tangent), expected)


def test_parts_are_the_maps_between_their_probes(point: OperatingPoint) -> None:
    block = point.model.blocks[1]
    x_TD = point.trace["blocks.1.feed_forward_input"]
    expected = matrix(lambda x: block.feed_forward(x), x_TD)
    found = point.part(1, "feed_forward_input", "feed_forward_output")
    tangent = torch.ones_like(x_TD)
    torch.testing.assert_close(found.jvp(tangent).flatten(), expected @ tangent.flatten())
    norms = point.norms(1)
    assert list(norms) == ["attention_norm", "feed_forward_norm"]
    expected = matrix(block.attention_norm, point.states[1])
    torch.testing.assert_close(norms["attention_norm"].vjp(tangent).flatten(), expected.T @ tangent.flatten())


def test_squares_in_nats_are_the_fisher_metric_and_twice_the_divergence(point: OperatingPoint) -> None:
    x_TD = point.states[-1][-1:]
    z = point.logits(x_TD[None])[0, 0]
    p = z.softmax(-1)
    fisher = torch.diag(p) - p[:, None] * p
    of_logits = matrix(lambda x: point.logits(x[None])[0], x_TD)
    found = matrix(point.read_in_nats, x_TD)
    torch.testing.assert_close(found.T @ found, of_logits.T @ fisher @ of_logits)
    step = 1e-4 * torch.ones_like(x_TD)
    q = point.logits((x_TD + step)[None])[0, 0].softmax(-1)
    divergence = float((p * (p.log() - q.log())).sum())
    assert divergence == pytest.approx(float((found @ step.flatten()).square().sum()) / 2, rel=1e-3)


def test_the_model_itself_is_left_as_it_is() -> None:
    model = toy().train()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    point = OperatingPoint.of(model, CharTokenizer(), "sheep", torch.float64)
    point.between(0, 1).vjp(point.states[0])
    assert model.training and all(weight.dtype == torch.float32 for weight in model.parameters())
    assert all(torch.equal(weight, before[name]) and weight.grad is None for name, weight in model.named_parameters())
    assert all(weight.requires_grad for weight in model.parameters())


def test_quantised_weights_are_dequantised_and_that_is_said() -> None:
    model = quantize(toy(d_model=32), "int8")
    plain, notes = plain_copy(model, torch.float32)
    assert notes[1] == "Weights stored in int8 were dequantised."
    weight = model.blocks[0].attention.q_proj.weight
    assert torch.equal(plain.blocks[0].attention.q_proj.weight, weight.rows())
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(plain(ids), model(ids), rtol=0, atol=1e-3)
    found = Analyses(model, CharTokenizer()).at("sheep")
    assert found.notes == notes and plain.lm_head.weight is plain.embedding.weight


@pytest.mark.parametrize(("kind", "stored_in"), [("int8", "int8"), ("int4", "int4 and int8")])
def test_analyses_of_quantised_weights_are_those_of_the_weights_they_stand_for(kind: str, stored_in: str) -> None:
    """int4 leaves some matrices at int8."""
    model = quantize(toy(d_model=32), kind)
    plain = toy(d_model=32)
    stored = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            given = stored[name]
            weight.copy_(given.rows() if isinstance(given, StoredWeight) else given)
    ours, theirs = (Analyses(each, CharTokenizer()) for each in (model, plain))
    for verb, options in (
        ("influence", {}),
        ("blocks", {"fed": 1, "probes": 4}),
        ("decode", {"length": 4, "pairs": 2}),
    ):
        found, expected = (getattr(each, verb)("sheep", **options).to_dict() for each in (ours, theirs))
        assert f"Weights stored in {stored_in} were dequantised." in found.pop("notes")
        assert expected.pop("notes") and found == expected


def test_a_prompt_of_one_token_has_the_gains_of_its_full_jacobian() -> None:
    """No later token is reached, no earlier one remembered, and all influence is the token's own."""
    model = toy().double()
    analyses, ids = Analyses(model, CharTokenizer(), "float64"), [7]
    found = analyses.gains(ids, probes=4)
    full = matrix(last_stream(model, ids), analyses.at(ids).states[0])
    assert found.whole.largest == pytest.approx(float(torch.linalg.svdvals(full.detach())[0]))
    assert analyses.influence(ids).shares["influence"].tolist() == [[1.0]]
    response = analyses.impulse(ids, size=1e-4)
    assert response.response.shape == (4, 1) and response.nonlinearity < 1e-2
    assert all(system.memory is None and system.c is None for system in analyses.state_space(ids, steps=8).blocks)
    assert analyses.blocks(ids, fed=1).whole.largest == pytest.approx(found.whole.largest)
    assert analyses.compare(analyses, ids).sentences()[1].startswith("The influence of 0 of 1 token ")
    for finding in (found, response, analyses.decode(ids, length=3, pairs=2)):
        assert finding.table() and finding.sentences()


def not_a_number(model: Transformer) -> Transformer:
    model.blocks[1].feed_forward.up_proj.weight.data[3, :2] = torch.nan
    return model


def halved(model: Transformer) -> Transformer:
    projection = model.blocks[0].attention.q_proj
    projection.weight = torch.nn.Parameter(projection.weight[:4])
    return model


@pytest.mark.parametrize(
    ("make", "prompt", "error", "problem"),
    [
        (lambda: toy(**PAIRS), "sheep", UsageError, "encoder-decoder has two streams"),
        (lambda: not_a_number(toy()), "sheep", CheckpointError, "up_proj.weight has 2 numbers that are not finite"),
        (lambda: halved(toy()), "sheep", UsageError, "only a part of blocks.0.attention.q_proj.weight"),
        (toy, "sheep" * 4, UsageError, "has 20 tokens, but the model reads 16"),
        (toy, "", UsageError, "empty"),
    ],
)
def test_what_cannot_be_linearised_is_refused(
    make: Callable[[], Transformer], prompt: str, error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        Analyses(make(), CharTokenizer()).at(prompt)


def test_overflow_in_the_pass_names_the_block() -> None:
    model = toy()
    model.blocks[1].feed_forward.down_proj.weight.data.fill_(3e38)
    with pytest.raises(CheckpointError, match="after block 1 is not finite"):
        Analyses(model, CharTokenizer()).at("sheep")
    model = toy()
    model.blocks[2].feed_forward.down_proj.weight.data.mul_(1e25)  # the pass is finite, and products with it are not
    for verb in ("gains", "influence", "blocks"):
        with pytest.raises(CheckpointError, match=r"derivative of the network is not finite at this prompt: .*float32"):
            getattr(Analyses(model, CharTokenizer()), verb)("sheep")
    with pytest.raises(UsageError, match="dtype must be float32 or float64, not 'half'"):
        Analyses(model, CharTokenizer(), "half").at("sheep")


@pytest.mark.parametrize("name", ["gemma 4", "ngrams", "delta nets", "phi"])
def test_parts_of_unusual_blocks_are_found(name: str) -> None:
    """Every block has a map of its mixer and one of its feed-forward network, of the shape of the stream."""
    point = point_of(shaken(build_model(ARCHITECTURES[name], seed=3)).double(), [7, 1, 4, 4])
    for layer in range(point.num_layers):
        for kind in ("attention", "feed_forward"):
            found: Tensor = point.part(layer, f"{kind}_input", f"{kind}_output").jvp(point.states[0])
            assert found.shape == point.states[0].shape and float(found.norm()) > 0
