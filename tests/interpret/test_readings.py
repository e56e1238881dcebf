"""What is read off a trace, against slow loops over the network's own numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sheepop.adapt.quantization import quantize
from sheepop.core.errors import UsageError
from sheepop.interpret.checks import check_trace
from sheepop.interpret.lens import (
    attention_entropy,
    embedding_map,
    logit_lens,
    nearest_tokens,
    residual_norms,
    token_similarity,
)
from sheepop.interpret.parts import (
    direct_attribution,
    gradient_times_input,
    norm_statistics,
    parts_of,
    project_heads,
)
from sheepop.interpret.patching import patch_residuals
from sheepop.interpret.trace import Trace
from sheepop.model import ModelConfig, Transformer, build_model
from sheepop.model.probe import watch
from sheepop.tokenizer import CharTokenizer

from ..model.architectures import ARCHITECTURES
from .conftest import PAIRS, TINY, shaken


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_parts_of_every_architecture_sum_to_its_logits(name: str) -> None:
    model = shaken(build_model(ARCHITECTURES[name], seed=3)).double()
    pairs = model.config.architecture == "encoder_decoder"
    trace = Trace.of(model, CharTokenizer(), [7, 1, 4, 4, 30, 2, 9], [3, 7, 8, 1, 5, 2] if pairs else None)
    cap = model.config.logit_soft_cap
    for position, token in ((0, 5), (3, 11), (-1, 40)):
        torch.testing.assert_close(parts_of(trace, position).total, trace.residuals[-1, position], atol=1e-9, rtol=0)
        total = direct_attribution(trace, position, token).total
        expected = float(trace["logits"][position, token])
        assert (cap * math.tanh(total / cap) if cap else total) == pytest.approx(expected, abs=1e-9)
        against = direct_attribution(trace, position, token, 8)
        assert against.total == pytest.approx(total - direct_attribution(trace, position, 8).total)
    with pytest.raises(IndexError):
        direct_attribution(trace, 0, 50)
    with pytest.raises(IndexError):
        direct_attribution(trace, 7, 5)


def test_a_head_without_its_output_leaves_out_its_contribution(traced: Callable[..., Trace]) -> None:
    trace = traced(bias=True)
    name = "blocks.1.attention.head_outputs"
    whole = trace["blocks.1.attention_output"][4]
    added, bias = project_heads(trace.model.layers[1].attention, trace[name][:, 4])
    torch.testing.assert_close(added.sum(0) + bias, whole)
    for head in range(4):

        def silence(value_BHTC: torch.Tensor, head: int = head) -> torch.Tensor:
            return value_BHTC * (torch.arange(4) != head)[:, None, None]

        seen: list[torch.Tensor] = []
        with watch(trace.model, {name: silence, "blocks.1.attention_output": seen.append}):
            trace.model(torch.tensor([trace.token_ids]))
        torch.testing.assert_close(whole - seen[0][0, 4], added[head])


def test_the_lens_is_what_a_network_without_the_later_blocks_says(traced: Callable[..., Trace]) -> None:
    trace = traced(num_layers=3, tie_weights=False)
    lens = logit_lens(trace, count=4)
    last = trace["logits"].log_softmax(-1)
    for layer in range(4):
        short = trace.model.sharing_copy()
        short.blocks, short.kinds = short.blocks[:layer], short.kinds[:layer]
        log_p = short(torch.tensor([trace.token_ids]))[0].log_softmax(-1)
        for t in range(trace.num_tokens):
            divergence = sum(float(last[t, v].exp() * (last[t, v] - log_p[t, v])) for v in range(128))
            assert float(lens.divergence[layer, t]) == pytest.approx(divergence, abs=1e-6)
            assert float(lens.entropy[layer, t]) == pytest.approx(-float((log_p[t].exp() * log_p[t]).sum()), rel=1e-6)
            assert lens.ids[layer, t].tolist() == log_p[t].topk(4).indices.tolist()
            assert lens.probabilities[layer, t].tolist() == pytest.approx(log_p[t].topk(4).values.exp().tolist())
            own = math.nan if t == 7 else float(log_p[t, trace.token_ids[t + 1]].exp())
            assert float(lens.own[layer, t]) == pytest.approx(own, nan_ok=True)


def test_entropy_likeness_and_length_by_hand(traced: Callable[..., Trace]) -> None:
    trace = traced()
    entropies, norms = attention_entropy(trace), residual_norms(trace.target)
    for layer in range(3):
        weights = trace[f"blocks.{layer}.attention.weights"]
        for head in range(4):
            row = [float(w) for w in weights[head, 5]]
            assert float(entropies[layer, head, 5]) == pytest.approx(-sum(w * math.log(w) for w in row if w), rel=1e-5)
    assert entropies[:, :, 0].abs().max() == 0, "the first token sees itself alone"
    a, b = (trace.residuals[2, t].tolist() for t in (1, 6))
    lengths = [math.sqrt(sum(x * x for x in vector)) for vector in (a, b)]
    cosine = sum(x * y for x, y in zip(a, b, strict=True)) / lengths[0] / lengths[1]
    assert float(token_similarity(trace, 2)[1, 6]) == pytest.approx(cosine, rel=1e-5)
    assert [float(norms[2, 1]), float(norms[2, 6])] == pytest.approx(lengths, rel=1e-6)


@pytest.mark.parametrize(
    "more", [{}, {"norm_position": "post"}, {"norm": "rmsnorm", "parallel_residual": True}, PAIRS], ids=str
)
def test_norms_divide_by_what_they_are_said_to_measure(network: Callable[..., Transformer], more: Any) -> None:
    """A hook sees what each norm reads."""
    model = network(**more).eval()
    trace = Trace.of(model, CharTokenizer(), "ABCDABXY", "QR" if PAIRS.items() <= more.items() else None)
    read: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def look(_: Any, given: tuple[torch.Tensor]) -> None:
            read[name] = given[0][0]

        return look

    hooks = [
        module.register_forward_pre_hook(keep(name)) for name, module in model.named_modules() if name.endswith("_norm")
    ]
    trace.run(torch.tensor([trace.token_ids]), model)
    for hook in hooks:
        hook.remove()
    inside = [name for name in read if "." in name]
    assert len(inside) == (2 * 2 + 3 * 3 if "architecture" in more else 6)
    for name in inside:
        x = read[name]
        rms = "norm" in more
        mean = torch.zeros(len(x), 1) if rms else x.sum(-1, keepdim=True) / 32
        scale = (((x - mean) ** 2).sum(-1, keepdim=True) / 32 + model.config.norm_eps).sqrt()
        torch.testing.assert_close(norm_statistics(trace, name), torch.cat([mean.double(), scale], -1))
    for name in ("blocks.9.attention_norm", "blocks.0.output_norm", "final_norm", "x.0.attention_norm"):
        with pytest.raises(KeyError, match="no block has a norm"):
            norm_statistics(trace, name)


@pytest.mark.parametrize("more", [{}, PAIRS])
def test_gradient_times_input_is_the_slope_along_each_vector(network: Callable[..., Transformer], more: Any) -> None:
    trace = Trace.of(network(**more), CharTokenizer(), "ABCDABXY", "ABXAB" if more else None)
    found = gradient_times_input(trace, 5, 66)
    step, ids = 1e-5, torch.tensor([trace.token_ids[:6]])
    vectors = [("source_embedded", place) for place in range(9 if more else 0)]
    vectors += [("embedded", place) for place in range(6)]
    assert len(found) == len(vectors)
    plain = trace.run(ids)[0, -1].log_softmax(-1)[66]
    for value, (name, place) in zip(found, vectors, strict=True):

        def longer(value_BTD: torch.Tensor, place: int = place) -> torch.Tensor:
            factor = torch.ones(value_BTD.shape[1], 1, dtype=torch.float64)
            factor[place] += step
            return value_BTD * factor

        with watch(trace.model, {name: longer}):
            slope = float(trace.run(ids)[0, -1].log_softmax(-1)[66] - plain) / step
        # What is called gets its log-probability in float32.
        assert value == pytest.approx(slope, rel=1e-2, abs=1e-4)


def test_patching_is_a_pass_with_one_vector_replaced(network: Callable[..., Transformer]) -> None:
    model = network()
    clean, corrupted = (Trace.of(model, CharTokenizer(), text) for text in ("ABCDE", "ABXDE"))
    found = patch_residuals(clean, corrupted, 70, 71)
    ends = [float(trace["logits"][-1, 70] - trace["logits"][-1, 71]) for trace in (clean, corrupted)]
    assert (found.clean, found.corrupted) == pytest.approx(tuple(ends))
    for layer in range(4):
        for place in range(5):

            def put(value_BTD: torch.Tensor, layer: int = layer, place: int = place) -> torch.Tensor:
                changed = value_BTD.clone()
                changed[0, place] = clean.residuals[layer, place]
                return changed

            with watch(model, {"positioned" if layer == 0 else f"blocks.{layer - 1}.output": put}):
                logits = model.eval()(torch.tensor([corrupted.token_ids]))[0, -1]
            effect = (float(logits[70] - logits[71]) - ends[1]) / (ends[0] - ends[1])
            assert float(found.effect[layer, place]) == pytest.approx(effect, abs=1e-9)
    assert found.effect[0].tolist() == pytest.approx([0, 0, 1, 0, 0], abs=1e-9), "one letter differs"
    assert found.effect[-1].tolist() == pytest.approx([0, 0, 0, 0, 1], abs=1e-9), "the last position is read"
    with pytest.raises(UsageError, match="5 and 4 tokens"):
        patch_residuals(clean, Trace.of(model, CharTokenizer(), "ABCD"), 70, 71)
    with pytest.raises(UsageError, match="the same difference"):
        patch_residuals(clean, clean, 70, 71)


def test_patching_a_source_changes_what_the_target_looks_at(network: Callable[..., Transformer]) -> None:
    model = network(**PAIRS)
    clean, corrupted = (Trace.of(model, CharTokenizer(), text, "QR") for text in ("ABCDE", "ABXDE"))
    found = patch_residuals(clean, corrupted, 70, 71)
    assert clean.source is not None
    assert found.source_effect is not None
    for layer in range(3):
        for place in range(6):

            def put(value_BTD: torch.Tensor, layer: int = layer, place: int = place) -> torch.Tensor:
                changed = value_BTD.clone()
                changed[0, place] = clean.source.residuals[layer, place]
                return changed

            with watch(model, {"source_positioned" if layer == 0 else f"encoder_blocks.{layer - 1}.output": put}):
                logits = corrupted.run(torch.tensor([corrupted.token_ids]), model.eval())[0, -1]
            effect = (float(logits[70] - logits[71]) - found.corrupted) / (found.clean - found.corrupted)
            assert float(found.source_effect[layer, place]) == pytest.approx(effect, abs=1e-9)
    assert found.source_effect[0].tolist() == pytest.approx([0, 0, 1, 0, 0, 0], abs=1e-9), "one letter differs"
    assert found.effect[0].tolist() == pytest.approx([0, 0, 0], abs=1e-9), "the targets begin alike"
    assert found.effect[-1].tolist() == pytest.approx([0, 0, 1], abs=1e-9), "the last position is read"


def test_the_map_of_embeddings_is_their_principal_components(network: Callable[..., Transformer]) -> None:
    model = network()
    ids = [5, 9, 9, 30, 77, 100]
    found = embedding_map(model, ids)
    assert found.token_ids == [5, 9, 30, 77, 100]
    rows = model.embedding.weight[found.token_ids].numpy()
    variances, axes = np.linalg.eigh(np.cov(rows.T))
    for axis in (0, 1):
        expected = (rows - rows.mean(0)) @ axes[:, -1 - axis]
        expected *= np.sign(expected[np.abs(expected).argmax()])
        np.testing.assert_allclose(found.points[:, axis], expected, atol=1e-9)
        assert found.explained[axis] == pytest.approx(variances[-1 - axis] / variances.sum())
    assert embedding_map(model, [4]).points.tolist() == [[0, 0]]


def test_neighbours_have_the_largest_cosines(network: Callable[..., Transformer]) -> None:
    model = network()
    table = model.embedding.weight.numpy()
    own = table[17]
    cosines = table @ own / np.linalg.norm(table, axis=1) / np.linalg.norm(own)
    expected = [token for token in np.argsort(-cosines).tolist() if token != 17][:5]
    found = nearest_tokens(model, 17, 5)
    assert [each.token_id for each in found] == expected
    assert found[0].cosine == pytest.approx(cosines[expected[0]], rel=1e-5)
    assert found[0].distance == pytest.approx(np.linalg.norm(table[expected[0]] - own), rel=1e-5)


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_weights_in_integers_are_traced_as_they_compute(stored: Any) -> None:
    model = quantize(shaken(build_model(ModelConfig(**TINY), seed=3)), stored).eval()
    trace = Trace.of(model, CharTokenizer(), [7, 1, 4, 4, 30, 2, 9])
    assert [found.name for found in check_trace(trace) if not found.holds] == []
    assert direct_attribution(trace, -1, 11).total == pytest.approx(float(trace["logits"][-1, 11]), abs=1e-3)
