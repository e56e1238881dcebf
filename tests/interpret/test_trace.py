"""A trace has the numbers of the pass, and its invariants hold for every network that can be configured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from sheepop.core.config import validate
from sheepop.core.console import Console
from sheepop.core.errors import UsageError
from sheepop.interpret.checks import check_trace
from sheepop.interpret.journey import journey_of
from sheepop.interpret.trace import Trace
from sheepop.model import EncoderDecoder, ModelConfig, Transformer, build_model
from sheepop.model.probe import record, watch
from sheepop.tokenizer import CharTokenizer, TokenizerConfig, train_tokenizer

from ..config_space import LENGTH, VOCAB, valid_settings
from ..model.architectures import ARCHITECTURES
from .conftest import PAIRS, shaken

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3][:LENGTH]


def check(model: Transformer, ids: list[int]) -> None:
    """Every tensor, kept or recomputed, is what a recorded pass has, to the bit, and every invariant holds."""
    trace = Trace.of(model, CharTokenizer(), ids, ids[::2] if isinstance(model, EncoderDecoder) else None)
    with torch.no_grad(), record(model.eval(), trace.names) as values:
        trace.run(torch.tensor([trace.token_ids]), model)
    for _ in ("kept", "recomputed"):
        for name in trace.names:
            assert torch.equal(trace[name].flatten(), values[name].flatten()), name
        trace.forget()
    assert [(found.name, found.error) for found in check_trace(trace) if not found.holds] == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_traced_to_the_bit(name: str) -> None:
    check(shaken(build_model(ARCHITECTURES[name], seed=3)), [7, 1, 4, 4, 30, 2, 9, 7, 1, 4, 11])


@settings(max_examples=30, suppress_health_check=[HealthCheck.data_too_large])
@given(keys=valid_settings())
def test_every_valid_configuration_is_traced_to_the_bit(keys: dict[str, Any]) -> None:
    # In float64 no rounding can send a token to another expert.
    check(shaken(build_model(validate(ModelConfig, keys), seed=0)).double(), [i % VOCAB for i in IDS])


def test_a_broken_number_breaks_its_invariant(traced: Callable[..., Trace]) -> None:
    trace = traced()
    trace.residuals[2, 5, 7] += 1e-6
    broken = [found.name for found in check_trace(trace) if not found.holds]
    assert "residual stream after every block = stream before it + its branches" in broken
    weight = trace.model.layers[1].attention.o_proj.weight
    with torch.no_grad():
        weight[0, 0] += 1e-3
    assert not next(found for found in check_trace(trace) if "bit for bit" in found.name).holds


def test_one_weight_changes_what_depends_on_it_and_nothing_else(network: Callable[..., Transformer]) -> None:
    model = network()
    before = Trace.of(model, CharTokenizer(), "ABCDEF")
    kept = {name: before[name] for name in before.names}
    model.layers[1].attention.k_proj.weight[0, 0] += 0.5  # of head 0
    after = Trace.of(model, CharTokenizer(), "ABCDEF")
    changed = {name for name in before.names if not torch.equal(kept[name], after[name])}
    untouched = [name for name in before.names if name.startswith("blocks.0.") or name in ("embedded", "positioned")]
    own = [f"blocks.1.attention.{name}" for name in ("q", "v", "rotated_q")] + ["blocks.1.attention_input"]
    assert not changed & {*untouched, *own}
    assert {"blocks.1.attention.k", "blocks.1.attention.weights", "blocks.2.output", "logits"} <= changed
    assert torch.equal(kept["blocks.1.attention.weights"][1:], after["blocks.1.attention.weights"][1:]), "other heads"


def test_a_source_and_its_target_are_two_streams(network: Callable[..., Transformer]) -> None:
    tokenizer = CharTokenizer()
    model = network(**PAIRS)
    trace = Trace.of(model, tokenizer, "a sheep", "ram")
    assert trace.token_ids == [tokenizer.bos_id, *b"ram"]
    assert [token.text for token in trace.tokens] == ["<bos>", "r", "a", "m"]
    assert [(token.begin, token.end) for token in trace.tokens[1:]] == [(0, 1), (1, 2), (2, 3)]
    assert [token.text for token in trace.source_tokens] == [*"a sheep", "<eos>"]
    assert trace["encoder_blocks.1.attention.weights"].shape == (4, 8, 8)
    assert trace["encoder_blocks.1.attention.weights"][:, 0].min() > 0, "the first token sees those behind it"
    assert trace["blocks.2.attention.weights"].shape == (4, 4, 4)
    assert trace["blocks.2.cross_attention.weights"].shape == (4, 4, 8)
    memory = model.eval().encode(torch.tensor([[*b"a sheep", tokenizer.eos_id]]))
    torch.testing.assert_close(trace["memory"], memory.states[0])
    seen = [name for name in trace.names if name.startswith("blocks.0.")]
    assert seen.index("blocks.0.middle") < seen.index("blocks.0.cross_attention.q") < seen.index("blocks.0.output")
    q, k = (trace[f"blocks.1.cross_attention.rotated_{name}"][2] for name in "qk")
    expected = q @ k.T / math.sqrt(8)
    torch.testing.assert_close(trace.unmasked_scores("blocks.1.cross_attention")[2], expected)
    assert trace.source is not None
    trace.source.residuals[1, 3, 5] += 1e-3
    broken = [found.name for found in check_trace(trace) if not found.holds]
    assert "residual stream after every block = stream before it + its branches" in broken


def test_a_short_text_passes_through_the_model_once(network: Callable[..., Transformer]) -> None:
    model, seen = network().eval(), list[Tensor]()
    with watch(model, {"blocks.*.output": seen.append}):
        trace = Trace.of(model, CharTokenizer(), "The sheep")
        whole = journey_of(trace, -1)
        assert len(seen) == trace.num_layers
        trace.forget()
        assert torch.equal(journey_of(trace, -1).stream, whole.stream)
        assert len(seen) == 2 * trace.num_layers


def test_a_model_that_trains_goes_on_training_and_its_trace_is_without_dropout(
    network: Callable[..., Transformer],
) -> None:
    model = network(dropout=0.5).train()
    trace = Trace.of(model, CharTokenizer(), "The sheep")
    assert model.training and model.layers[0].training
    torch.testing.assert_close(trace.residuals, Trace.of(model.eval(), CharTokenizer(), "The sheep").residuals)


def test_only_what_is_kept_is_held(traced: Callable[..., Trace]) -> None:
    trace = traced()
    pattern = "blocks.*.attention.weights"
    found = trace.collect([pattern], lambda weights_HTS: weights_HTS[2, -1])
    assert list(found) == [f"blocks.{layer}.attention.weights" for layer in range(3)]
    for name, row in found.items():
        assert torch.equal(row, trace[name][2, -1])
        assert row.untyped_storage().nbytes() == row.nbytes


@pytest.mark.parametrize("more", [{}, {"attention_soft_cap": 2.0}, {"position_encoding": "alibi"}])
def test_scores_before_the_mask_are_products_of_queries_and_keys(traced: Callable[..., Trace], more: Any) -> None:
    trace = traced(num_kv_heads=2, head_dim=6, **more)
    q, k, scores = (trace[f"blocks.1.attention.{name}"] for name in ("rotated_q", "rotated_k", "scores"))
    found = trace.unmasked_scores("blocks.1.attention")
    for head, t, s in ((0, 7, 2), (3, 2, 6)):
        expected = sum(float(a * b) for a, b in zip(q[head, t], k[head // 2, s], strict=True)) / math.sqrt(6)
        expected = 2 * math.tanh(expected / 2) if "attention_soft_cap" in more else expected
        assert float(found[head, t, s]) == pytest.approx(expected)
    if "position_encoding" not in more:
        seen = torch.ones(8, 8, dtype=torch.bool).tril()
        torch.testing.assert_close(found[:, seen], scores[:, seen])


def test_angles_are_position_over_wavelength(traced: Callable[..., Trace]) -> None:
    trace = traced(position_encoding="rope")
    angles = trace.angles("blocks.0.attention")
    for pair in range(4):
        found, expected = float(angles[5, pair]), 5 / 10_000 ** (pair / 4)
        assert (math.cos(found), math.sin(found)) == pytest.approx((math.cos(expected), math.sin(expected)), abs=1e-6)
    assert Trace.of(trace.model, CharTokenizer(), "ABC").angles("blocks.2.attention").tolist() == angles[:3].tolist()
    for path in ("blocks.3.attention", "encoder_blocks.0.attention", "blocks.0"):
        with pytest.raises(KeyError, match="no attention layer"):
            trace.angles(path)
    with pytest.raises(KeyError, match="turns its queries"):
        traced().angles("blocks.0.attention")


def test_predictions_are_those_of_a_slow_loop(traced: Callable[..., Trace]) -> None:
    trace = traced()
    logits = trace["logits"]
    for position, found in enumerate(trace.predictions):
        p = [math.exp(float(x) - float(logits[position].logsumexp(0))) for x in logits[position]]
        assert found.entropy == pytest.approx(-sum(x * math.log(x) for x in p if x))
        assert [token for token, _ in found.top] == sorted(range(len(p)), key=lambda token: -p[token])[:10]
        if position + 1 == trace.num_tokens:
            assert (found.token_id, found.logprob, found.rank) == (None, None, None)
            continue
        actual = trace.token_ids[position + 1]
        assert found.token_id == actual and found.logprob == pytest.approx(math.log(p[actual]))
        assert found.rank == 1 + sum(x > p[actual] for x in p)


def test_tokens_have_their_bytes(network: Callable[..., Transformer]) -> None:
    text = "a<b>\x1b</script>é שלום"
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=260), ["é script"], console=Console.silent())
    found = Trace.of(network(vocab_size=300), tokenizer, text).tokens
    joined = text.encode()
    assert b"".join(bytes.fromhex(token.bytes) for token in found) == joined
    assert [joined[token.begin : token.end].hex() for token in found] == [token.bytes for token in found]
    shown = [token.text for token in found]
    assert "\\x1b" in shown, "no control character reaches a terminal"
    assert "<D7>" in shown, "half a character is shown as its bytes"
    assert Trace.of(network(vocab_size=300), CharTokenizer(), "a").text_of(299) == "<299>", "a row without a token"
    unknown = Trace.of(network(), CharTokenizer(), "aéb").tokens
    assert [token.begin for token in unknown] == [None, None, None], "what is not the prompt's has no place in it"


def test_prompts_that_cannot_be_traced_are_refused(network: Callable[..., Transformer]) -> None:
    model, tokenizer = network(), CharTokenizer()
    assert Trace.of(model, tokenizer, "x" * 32).num_tokens == 32
    with pytest.raises(UsageError, match="The prompt has 33 tokens, but the model reads 32"):
        Trace.of(model, tokenizer, "x" * 33)
    with pytest.raises(UsageError, match="empty"):
        Trace.of(model, tokenizer, "")
    with pytest.raises(UsageError, match="This model reads one text"):
        Trace.of(model, tokenizer, "x", "y")
    pairs = network(**PAIRS)
    assert Trace.of(pairs, tokenizer, "x", "y" * 31).num_tokens == 32
    with pytest.raises(UsageError, match="The target has 33 tokens, but the model reads 32"):
        Trace.of(pairs, tokenizer, "x", "y" * 32)
    with pytest.raises(UsageError, match="The prompt has 32 tokens, but the encoder's max_seq_len = 32 has room for"):
        Trace.of(pairs, tokenizer, "x" * 32)
    with pytest.raises(UsageError, match="The target: token id 999 at position 1 is not in the vocabulary"):
        Trace.of(pairs, tokenizer, "x", [5, 999])
    with pytest.raises(KeyError, match=r"no probe is named 'blocks\.9\.output'"):
        Trace.of(model, tokenizer, "x")["blocks.9.output"]
