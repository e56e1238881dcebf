"""The encoder-decoder against a slow float64 one for every kind of positions and norms, and run step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sheepop.core.config import validate
from sheepop.core.errors import ConfigError
from sheepop.model import EncoderDecoder, ModelConfig, Transformer, blank_model, build_model
from sheepop.model.loss import cross_entropy
from sheepop.model.options import ACTIVATION_NAMES, Backend, Initialization, NormKind, NormPosition, PositionEncoding
from sheepop.model.probe import record

from ..reading import PieceReader, read_in_pieces

ENCODINGS = get_args(PositionEncoding)
SIZES: dict[str, Any] = {
    "architecture": "encoder_decoder",
    "vocab_size": 19,
    "d_model": 24,
    "num_heads": 6,
    "num_layers": 2,
    "num_encoder_layers": 3,
    "max_seq_len": 12,
    "dropout": 0.0,
}
Rows = np.ndarray
Weights = dict[str, np.ndarray]


def built(seed: int = 1, **settings: Any) -> EncoderDecoder:
    """A network whose every weight matters: norms that are not 1, biases that are not 0."""
    model = build_model(ModelConfig(**{**SIZES, **settings}), seed).eval()
    assert isinstance(model, EncoderDecoder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def tokens(*shape: int, seed: int = 5) -> Tensor:
    return torch.randint(19, shape, generator=torch.Generator().manual_seed(seed))


class SlowNetwork:
    """One source and one target at a time, in NumPy and float64, from the formulas."""

    def __init__(self, model: EncoderDecoder) -> None:
        self.config = model.config
        self.weights: Weights = {name: value.double().numpy() for name, value in model.state_dict().items()}

    def logits(self, source: list[int], target: list[int]) -> Rows:
        config = self.config
        memory = self.embedded(source)
        for layer in range(config.num_encoder_layers or 0):
            name = f"encoder_blocks.{layer}"
            memory = self.branch(memory, f"{name}.attention", self.to_itself(f"{name}.attention", causal=False))
            memory = self.branch(memory, f"{name}.feed_forward", self.feed_forward(f"{name}.feed_forward"))
        if config.final_norm:
            memory = self.norm(memory, "encoder_norm")
        x = self.embedded(target)
        for layer in range(config.num_layers):
            name = f"blocks.{layer}"
            x = self.branch(x, f"{name}.attention", self.to_itself(f"{name}.attention", causal=True))
            x = self.branch(x, f"{name}.cross_attention", self.to_memory(f"{name}.cross_attention", memory))
            x = self.branch(x, f"{name}.feed_forward", self.feed_forward(f"{name}.feed_forward"))
        if config.final_norm:
            x = self.norm(x, "final_norm")
        return x @ self.weights["embedding.weight"].T

    def embedded(self, ids: list[int]) -> Rows:
        config, d_model = self.config, self.config.d_model
        x = self.weights["embedding.weight"][ids]
        if config.position_encoding == "sinusoidal":
            x = x * math.sqrt(d_model)
            for p in range(len(ids)):
                for c in range(d_model):
                    x[p, c] += (math.cos if c % 2 else math.sin)(p / 10000 ** (2 * (c // 2) / d_model))
        elif config.position_encoding == "learned":
            x = x + self.weights["added_positions.table"][: len(ids)]
        return x

    def branch(self, x: Rows, name: str, sublayer: Callable[[Rows], Rows]) -> Rows:
        where = self.config.norm_position
        if where == "pre":
            return x + sublayer(self.norm(x, f"{name}_norm"))
        if where == "post":
            return self.norm(x + sublayer(x), f"{name}_norm")
        if where == "output":
            return x + self.norm(sublayer(x), f"{name}_output_norm")
        return x + self.norm(sublayer(self.norm(x, f"{name}_norm")), f"{name}_output_norm")

    def norm(self, x: Rows, name: str) -> Rows:
        if self.config.norm == "rmsnorm":
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps) * self.weights[f"{name}.weight"]
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        normed = (x - mean) / np.sqrt(variance + self.config.norm_eps)
        return normed * self.weights[f"{name}.weight"] + self.weights.get(f"{name}.bias", 0.0)

    def linear(self, x: Rows, name: str) -> Rows:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def feed_forward(self, name: str) -> Callable[[Rows], Rows]:
        def apply(x: Rows) -> Rows:
            up = self.linear(x, f"{name}.up_proj")
            if self.config.activation == "swiglu":
                gate = self.linear(x, f"{name}.gate_proj")
                return self.linear(gate / (1 + np.exp(-gate)) * up, f"{name}.down_proj")
            return self.linear(np.maximum(up, 0), f"{name}.down_proj")

        return apply

    def to_itself(self, name: str, *, causal: bool) -> Callable[[Rows], Rows]:
        return lambda x: self.attend(name, x, x, causal=causal, positions=True)

    def to_memory(self, name: str, memory: Rows) -> Callable[[Rows], Rows]:
        return lambda x: self.attend(name, x, memory, causal=False, positions=False)

    def attend(self, name: str, x: Rows, seen: Rows, *, causal: bool, positions: bool) -> Rows:
        config, heads, width = self.config, self.config.num_heads, self.config.head_size
        q, k, v = (self.linear(rows, f"{name}.{n}_proj") for n, rows in (("q", x), ("k", seen), ("v", seen)))
        out = np.zeros((len(x), heads * width))
        for head in range(heads):
            served = head // (heads // config.kv_heads)
            mine, theirs = slice(head * width, (head + 1) * width), slice(served * width, (served + 1) * width)
            for t in range(len(x)):
                places = range(t + 1) if causal else range(len(seen))
                scores = []
                for s in places:
                    query, key = q[t, mine], k[s, theirs]
                    if positions and config.position_encoding == "rope":
                        query, key = self.rotated(query, t), self.rotated(key, s)
                    score = query @ key / math.sqrt(width)
                    if positions and config.position_encoding == "alibi":
                        score -= self.slope(head) * abs(t - s)
                    scores.append(score)
                exponentials = np.exp(np.array(scores) - max(scores))
                for s, weight in zip(places, exponentials / exponentials.sum(), strict=True):
                    out[t, mine] += weight * v[s, theirs]
        return self.linear(out, f"{name}.o_proj")

    @staticmethod
    def rotated(vector: Rows, position: int) -> Rows:
        half = len(vector) // 2
        angles = position / 10000 ** (np.arange(half) / half)
        turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag])

    @staticmethod
    def slope(head: int) -> float:
        # Six heads: those of four, then the first and third of those of eight.
        return [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3][head]


CASES: list[dict[str, Any]] = [{"position_encoding": encoding} for encoding in ENCODINGS]
CASES += [{"norm_position": where, "norm": "rmsnorm"} for where in get_args(NormPosition)]
CASES += [{"norm_position": "post", "final_norm": True, "activation": "relu"}]
CASES += [{"position_encoding": "rope", "num_kv_heads": 2, "activation": "swiglu", "bias": False}]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_logits_equal_the_slow_network(settings: dict[str, Any]) -> None:
    model = built(**{"activation": "relu", **settings})
    slow = SlowNetwork(model)
    model = model.double()
    sources, targets = tokens(2, 7), tokens(2, 5, seed=6)
    # The second source is shorter than the first; what stands in its padding must not matter.
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    found = model(sources, targets, mask).detach()
    expected = [slow.logits(sources[0].tolist(), targets[0].tolist())]
    expected += [slow.logits(sources[1, :4].tolist(), targets[1].tolist())]
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-5 if "alibi" in settings.values() else 1e-6)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("pieces", [[1] * 8, [3, 1, 4]], ids=str)
def test_a_target_in_pieces_equals_the_whole_and_projects_the_memory_once(encoding: str, pieces: list[int]) -> None:
    model = built(position_encoding=encoding, num_kv_heads=3)
    sources, targets = tokens(3, 6), tokens(3, 8, seed=7)
    mask = torch.arange(6) < torch.tensor([6, 3, 5])[:, None]
    projections: list[str] = []
    for name, module in model.named_modules():
        if name.endswith(("cross_attention.k_proj", "cross_attention.v_proj")):
            module.register_forward_hook(lambda *_, name=name: projections.append(name))
    with torch.inference_mode():
        whole = model(sources, targets, mask)
        projections.clear()
        states = read_in_pieces(model, list(targets), [[piece] * 3 for piece in pieces], model.encode(sources, mask))
        found = model.read_out(torch.stack(states))
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)
    assert sorted(projections) == [f"blocks.{layer}.cross_attention.{n}_proj" for layer in range(2) for n in "kv"]


def test_rows_that_are_kept_repeated_and_put_in_another_order_go_on_as_if_alone() -> None:
    model = built(position_encoding="rope")
    sources, targets = tokens(3, 6), tokens(3, 4, seed=7)
    mask = torch.arange(6) < torch.tensor([6, 3, 5])[:, None]
    rows, following = torch.tensor([2, 0, 0]), tokens(3, 2, seed=8)
    with torch.inference_mode():
        reader = PieceReader(model, 3, memory=model.encode(sources, mask))
        reader.read(list(targets))
        reader.tables = [reader.manager.fork(reader.tables[row]) for row in rows]
        reader.sources = rows.tolist()
        found = model.read_out(torch.stack(reader.read(list(following))))
        for row, more, logits in zip(rows.tolist(), following, found, strict=True):
            length = int(mask[row].sum())
            alone = model(sources[row : row + 1, :length], torch.cat((targets[row], more))[None])[0, -2:]
            torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)


def test_a_later_target_token_changes_no_earlier_logit_and_every_source_token_changes_all() -> None:
    model = built()
    sources, targets = tokens(1, 6), tokens(1, 5, seed=6)
    before = model(sources, targets)
    changed = targets.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 19
    after = model(sources, changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.isclose(before[:, 3:], after[:, 3:]).all(-1).any()
    for place in range(6):
        other = sources.clone()
        other[0, place] = (other[0, place] + 1) % 19
        assert not torch.isclose(before, model(other, targets)).all(-1).any()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_weight_gets_a_gradient_with_every_backend_alike(encoding: str) -> None:
    gradients = []
    for settings in ({"attention_backend": "sdpa"}, {"attention_backend": "eager"}):
        model = built(position_encoding=encoding, qk_norm="head", norm_position="sandwich", **settings)
        model(tokens(2, 7), tokens(2, 5), torch.arange(7) < torch.tensor([[7], [4]])).square().sum().backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert [name for name, gradient in found.items() if gradient is None or not gradient.any()] == []
        gradients.append(found)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("settings", [{"attention_soft_cap": 4.0}, {"attention_sinks": True}], ids=str)
def test_caps_and_sinks_are_those_of_the_attention_across_too(settings: dict[str, Any]) -> None:
    model = built(position_encoding="rope", **settings)
    plain = blank_model(model.config.replace(attention_soft_cap=None, attention_sinks=False)).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    name = "blocks.1.cross_attention.weights"
    weights = []
    for network in (model, plain):
        with record(network, [name, name.replace("weights", "q"), name.replace("weights", "k")]) as seen:
            network(tokens(1, 6), tokens(1, 4))
        q, k = seen["blocks.1.cross_attention.q"].double(), seen["blocks.1.cross_attention.k"].double()
        scores = q @ k.transpose(-2, -1) / 2  # heads of four columns
        if network is model and model.config.attention_soft_cap is not None:
            scores = 4.0 * torch.tanh(scores / 4.0)
        exponentials = scores.exp()
        total = exponentials.sum(-1, keepdim=True)
        if network is model and model.config.attention_sinks:
            total = total + model.blocks[1].cross_attention.sinks.double().exp()[None, :, None, None]
        torch.testing.assert_close(seen[name].double(), exponentials / total, atol=1e-5, rtol=1e-4)
        weights.append(seen[name])
    assert not torch.allclose(*weights, atol=1e-3)


def test_the_encoders_numbers_have_probes_of_their_own() -> None:
    model = built()
    sources, targets = tokens(1, 6), tokens(1, 4)
    names = ["source_embedded", "source_positioned", "memory", "embedded", "blocks.0.cross_attention_output"]
    with record(model, names) as seen:
        model(sources, targets)
    torch.testing.assert_close(seen["source_embedded"], model.embedding(sources) * 24**0.5)
    torch.testing.assert_close(seen["embedded"], model.embedding(targets) * 24**0.5)
    torch.testing.assert_close(seen["memory"], model.encode(sources).states)
    assert seen["blocks.0.cross_attention_output"].shape == (1, 4, 24)


def test_initial_branches_are_scaled_by_the_number_in_their_stack() -> None:
    model = build_model(ModelConfig(**{**SIZES, "d_model": 192, "initialization": "gpt2"}), seed=2)
    deviations = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    encoder, decoder = 0.02 / math.sqrt(2 * 3), 0.02 / math.sqrt(3 * 2)
    for name, expected in (
        ("encoder_blocks.2.attention.o_proj.weight", encoder),
        ("encoder_blocks.0.feed_forward.down_proj.weight", encoder),
        ("blocks.1.attention.o_proj.weight", decoder),
        ("blocks.0.cross_attention.o_proj.weight", decoder),
        ("blocks.1.feed_forward.down_proj.weight", decoder),
        ("blocks.1.cross_attention.q_proj.weight", 0.02),
    ):
        assert deviations[name] == pytest.approx(expected, rel=0.02), name


def test_a_deeper_encoder_has_branches_that_are_smaller_by_the_root_of_the_depth() -> None:
    shallow, deep = (build_model(ModelConfig(**{**SIZES, "num_encoder_layers": n}), seed=2) for n in (2, 8))
    name = "encoder_blocks.1.attention.o_proj.weight"
    found = dict(deep.named_parameters())[name] * 2
    torch.testing.assert_close(found, dict(shallow.named_parameters())[name])
    assert torch.equal(deep.blocks[0].attention.o_proj.weight, shallow.blocks[0].attention.o_proj.weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position_encoding": "rope", "rotary_layers": [0]}, "rotary_layers applies to architecture: decoder"),
        ({"parallel_residual": True}, "parallel_residual applies to architecture: decoder"),
        ({"sliding_window": 4}, "sliding_window applies to architecture: decoder"),
        ({"experts": {"count": 4}}, "experts applies to architecture: decoder"),
        ({"attention_backend": "flex"}, "attention_backend: flex has no bidirectional attention; use eager"),
        ({"architecture": "decoder"}, "num_encoder_layers applies to architecture: encoder_decoder"),
    ],
    ids=str,
)
def test_what_an_encoder_decoder_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(ModelConfig, {**SIZES, **settings})


def test_left_out_sizes_are_derived() -> None:
    assert ModelConfig(architecture="encoder_decoder", num_layers=5).num_encoder_layers == 5
    paper = ModelConfig(preset="transformer-base", vocab_size=37000)
    assert (paper.d_ff, paper.head_dim, paper.num_encoder_layers, paper.final_norm) == (2048, 64, 6, False)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in blank_model(paper).parameters())
    # Table 3 of the paper says 65 million, for a vocabulary of about 37000 tokens.
    assert count == pytest.approx(65e6, rel=0.05)


def test_the_wrong_class_and_wrong_arguments_are_refused() -> None:
    model = built()
    with pytest.raises(ValueError, match=r"use sheepop\.model\.blank_model"):
        Transformer(model.config)
    sources, targets = tokens(2, 6), tokens(2, 4)
    with pytest.raises(ValueError, match="needs either source_ids or the memory"):
        model.hidden_states(targets)
    with pytest.raises(ValueError, match="needs either source_ids or the memory"):
        model.hidden_states(targets, source_ids=sources, memory=model.encode(sources))
    with pytest.raises(ValueError, match="one target per row"):
        model.hidden_states(targets, source_ids=sources, document_ids=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="2 targets, but 1 sources"):
        model(sources[:1], targets)
    with pytest.raises(ValueError, match="source of 13 positions does not fit max_seq_len = 12"):
        model(tokens(1, 13), targets[:1])
    with pytest.raises(ValueError, match=r"source_mask has shape \(2, 5\)"):
        model(sources, targets, torch.ones(2, 5, dtype=torch.bool))
    # Numbers would be added to the scores.
    with pytest.raises(ValueError, match=r"source_mask has dtype torch\.int64; it must be boolean"):
        model(sources, targets, torch.ones_like(sources))
    with pytest.raises(ValueError, match=r"source_ids must be \(B, S\)"):
        model(sources[0], targets)


CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "position_encoding": st.sampled_from(ENCODINGS),
    "norm": st.sampled_from(get_args(NormKind)),
    "norm_position": st.sampled_from(get_args(NormPosition)),
    "final_norm": st.sampled_from([None, True, False]),
    "embedding_norm": st.booleans(),
    "qk_norm": st.sampled_from([None, "head", "own_head", "width"]),
    "activation": st.sampled_from(list(ACTIVATION_NAMES)),
    "num_kv_heads": st.sampled_from([1, 2, 4]),
    "value_head_dim": st.sampled_from([None, 6]),
    "num_encoder_layers": st.sampled_from([1, 2]),
    "bias": st.booleans(),
    "attention_soft_cap": st.sampled_from([None, 5.0]),
    "attention_sinks": st.booleans(),
    "attention_scale": st.sampled_from([None, 0.4]),
    "attention_backend": st.sampled_from(get_args(Backend)),
    "logit_soft_cap": st.sampled_from([None, 4.0]),
    "tie_weights": st.booleans(),
    "dropout": st.sampled_from([0.0, 0.2]),
    "parallel_residual": st.booleans(),
    "sliding_window": st.sampled_from([None, None, 3]),
    "initialization": st.sampled_from([name for name in get_args(Initialization) if name != "mup"]),
}


@hypothesis.settings(max_examples=120)
@given(st.fixed_dictionaries({}, optional=CHOICES))
def test_every_combination_is_refused_in_words_or_trains_and_goes_on_with_a_cache(chosen: dict[str, Any]) -> None:
    sizes = {**SIZES, "d_model": 16, "num_heads": 4, "num_layers": 1, **chosen}
    try:
        config = validate(ModelConfig, sizes)
    except ConfigError as error:
        assert chosen.keys() & {"parallel_residual", "sliding_window", "attention_backend"}, error
        return
    model = build_model(config, seed=1)
    assert isinstance(model, EncoderDecoder)
    sources, targets = tokens(2, 6), tokens(2, 5, seed=6)
    mask = torch.arange(6) < torch.tensor([[6], [2]])
    model.train()
    loss = cross_entropy(model(sources, targets, mask)[:, :-1], targets[:, 1:])
    torch.autograd.backward(loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    model.eval()
    with torch.inference_mode():
        whole = model(sources, targets, mask)
        states = read_in_pieces(model, list(targets), ([2, 2], [1, 1], [2, 2]), model.encode(sources, mask))
        torch.testing.assert_close(model.read_out(torch.stack(states)), whole, atol=1e-4, rtol=1e-4)
        alone = model(sources[1:, :2], targets[1:])
        torch.testing.assert_close(alone, whole[1:], atol=1e-4, rtol=1e-4)
