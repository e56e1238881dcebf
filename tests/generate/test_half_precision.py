"""Models in 16 bits: their weights stay as they are stored, and their texts are those of exact arithmetic."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sheepop.adapt.native_products import with_native_products
from sheepop.adapt.quantization import quantize
from sheepop.adapt.stored_weight import StoredWeight, has_kernels
from sheepop.core.native import say_once
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.native_block import NativeBlock
from sheepop.generate.paged_cache import bytes_per_block
from sheepop.generate.sampling_kernels import choose_natively
from sheepop.model import Transformer
from sheepop.model.probe import watch
from sheepop.tokenizer import CharTokenizer

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no native kernels for this machine")

NETWORKS: dict[str, dict[str, Any]] = {
    "like GPT-2": {"activation": "gelu_tanh", "tie_weights": True},
    "like Gemma": {
        "norm": "rmsnorm_zero_centered",
        "norm_position": "sandwich",
        "activation": "geglu_tanh",
        "bias": False,
        "position_encoding": "rope",
        "num_kv_heads": 2,
        "qk_norm": "head",
        "attention_soft_cap": 20.0,
        "sliding_window": 6,
        "sliding_layers": [0],
        "sliding_position_base": 500.0,
        "logit_soft_cap": 30.0,
    },
    "n-grams": {"ngrams": {"orders": [2, 3], "rows": 64}, "position_encoding": "alibi"},
    "experts": {"experts": {"count": 4, "per_token": 2}, "activation": "swiglu"},
    "convolutions": {"short_convolution": 3, "qk_norm": "own_head"},
    "a delta rule": {
        "gated_delta_net": {
            "layers": [1],
            "num_key_heads": 2,
            "num_value_heads": 4,
            "key_head_dim": 8,
            "value_head_dim": 8,
        }
    },
}
WITHOUT_BLOCKS = ("convolutions", "a delta rule")
PROMPTS = [list(range(20, 41)), [7, 9, 4], list(range(90, 101)), [5]]
GREEDY = GenerationConfig(temperature=0, max_new_tokens=12, min_new_tokens=12)
Build = Callable[..., Transformer]


@pytest.fixture(autouse=True)
def kernels_for_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHEEPOP_NATIVE", "1")
    say_once.cache_clear()


def plain(model: Transformer, prompt: list[int], stored: torch.dtype, forbidden: Tensor) -> list[int]:
    """The likeliest tokens by float64 arithmetic over the whole text for each, with keys and values as stored."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(stored).to(x.dtype)

    text, exact = list(prompt), model.double()
    names = ("rotated_k", "v")
    with torch.inference_mode(), watch(exact, {f"blocks.*.attention.{name}": rounded for name in names}):
        for _ in range(GREEDY.max_new_tokens or 0):
            logits = exact(torch.tensor([text]))[0, -1]
            text.append(int(logits.masked_fill(forbidden, -torch.inf).argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NETWORKS)
def test_texts_are_those_of_exact_arithmetic(
    toy_model: Build, characters: CharTokenizer, caplog: pytest.LogCaptureFixture, name: str, dtype: torch.dtype
) -> None:
    """Several at once, their prompts read in chunks, beside a plain loop."""
    caplog.set_level(logging.WARNING)
    model = toy_model(vocab_size=characters.vocab_size, **NETWORKS[name]).to(dtype)
    generator = Generator(model, characters)
    assert all(isinstance(block, NativeBlock) for block in generator.model.layers) == (name not in WITHOUT_BLOCKS)
    assert bool(caplog.messages) == (name in WITHOUT_BLOCKS)
    found = [completion.token_ids for completion in generator.generate(PROMPTS, GREEDY)]
    forbidden = generator._sampler.forbidden.clone()
    forbidden[list(generator._end_ids)] = True
    assert found == [plain(model, prompt, dtype, forbidden) for prompt in PROMPTS]


def test_weights_are_read_where_they_are(toy_model: Build, characters: CharTokenizer) -> None:
    model = toy_model(tie_weights=True).bfloat16()
    generator = Generator(model, characters)
    mine = dict(generator.model.named_parameters())
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "positions" not in name:
            stored = mine[name]
            assert isinstance(stored, StoredWeight)
            assert (stored.stored, stored.parts[0].data_ptr()) == ("bfloat16", weight.data_ptr())
    assert bytes_per_block(generator.model, 16) == bytes_per_block(model, 16)


class Widened(TorchDispatchMode):
    """Counts the numbers that are converted to another data type."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.count += found.numel() if function is torch.ops.aten._to_copy.default else 0
        return found


def test_matrices_in_16_bits_are_not_widened_on_the_way(toy_model: Build) -> None:
    model = toy_model(position_encoding="rope").bfloat16()
    others = [*(weight for weight in model.parameters() if weight.ndim == 1), *model.buffers()]
    with Widened() as widened:
        with_native_products(model)
    assert widened.count == sum(tensor.numel() for tensor in others)


@pytest.mark.parametrize("network", [{}, {"experts": {"count": 4, "per_token": 1}}])
def test_changed_weights_are_used(toy_model: Build, characters: CharTokenizer, network: dict[str, Any]) -> None:
    """Also those of norms, and what balances experts, which are copied."""
    model, other = toy_model(**network).bfloat16(), toy_model(seed=5, **network).bfloat16()
    for name, tensor in other.named_buffers():
        if name.endswith("balance"):
            tensor.copy_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    generator = Generator(model, characters)
    before = generator.generate(PROMPTS, GREEDY)
    model.load_state_dict(other.state_dict())
    after = [completion.token_ids for completion in generator.generate(PROMPTS, GREEDY)]
    assert after != [completion.token_ids for completion in before]
    assert after == [completion.token_ids for completion in Generator(other, characters).generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("settings", [{"d_ff": 72}, {"latent_attention": {"kv_rank": 8, "rope_head_dim": 3}}])
def test_what_the_kernels_lack_computes_in_16_bits_and_says_so_once(
    toy_model: Build, characters: CharTokenizer, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        generator = Generator(toy_model(**settings).bfloat16(), characters)
        assert generator.model.dtype == torch.bfloat16
        assert len(generator.generate(PROMPTS, GREEDY)) == len(PROMPTS)
    assert len([message for message in caplog.messages if "computes in 16 bits in PyTorch" in message]) == 1


def test_a_number_that_is_not_finite_ends_its_request_alone(toy_model: Build, characters: CharTokenizer) -> None:
    """By its number; the other texts are what they would be without it."""
    model = toy_model().bfloat16()
    expected = [completion.token_ids for completion in Generator(model, characters).generate(PROMPTS, GREEDY)]
    unused = next(token for token in range(128) if token not in {t for text in (*PROMPTS, *expected) for t in text})
    with torch.no_grad():
        model.embedding.weight[unused] = torch.nan
    generator = Generator(model, characters)
    with torch.inference_mode():
        engine = generator.serving_engine(max_sequences=8, max_waiting=8)
        requests = [
            generator.request(prompt, GREEDY, index=index, name=f"Prompt {index + 1}")
            for index, prompt in enumerate([*PROMPTS[:2], [5, unused], *PROMPTS[2:]])
        ]
        for request in requests:
            engine.add(request)
        updates = []
        while not engine.is_idle:
            updates += engine.step()
    failed = [update for update in updates if update.error is not None]
    assert [update.request.index for update in failed] == [2]
    assert str(failed[0].error).startswith("Prompt 3 (position 2 of prompt and text): ")
    assert [request.completions()[0].token_ids for request in requests if request.index != 2] == expected


@pytest.mark.parametrize("vocabulary", [1, 500_000])
def test_the_smallest_and_the_largest_vocabulary(toy_model: Build, vocabulary: int) -> None:
    """Products and choices, without a tokenizer, which has no such vocabulary."""
    settings = {"vocab_size": vocabulary, "num_layers": 1, "d_model": 16, "num_heads": 2}
    model = with_native_products(toy_model(**settings).bfloat16()).eval()
    token_ids = torch.tensor([[0, vocabulary - 1, vocabulary // 2]])
    with torch.inference_mode():
        found = model(token_ids)[0]
        exact = toy_model(**settings).bfloat16().double()(token_ids)[0]
    assert torch.allclose(found.double(), exact, atol=1e-4, rtol=1e-4)
    for config, most in ((GREEDY, 1), (GREEDY.replace(temperature=0.5, top_k=40, top_p=0.9), 40)):
        chosen = choose_natively(found, found, [config] * 3, [1, 2, 3])
        assert chosen[:, 5].tolist() == [1.0] * 3
        own = exact.gather(1, chosen[:, :1].long())
        assert ((exact > own + 1e-4).sum(1) < most).all()


def test_rounded_weights_of_a_model_in_16_bits_have_native_blocks(toy_model: Build, characters: CharTokenizer) -> None:
    generator = Generator(quantize(toy_model().bfloat16(), "int8"), characters)
    assert {type(block) for block in generator.model.layers} == {NativeBlock}
    assert len(generator.generate(PROMPTS, GREEDY)) == len(PROMPTS)
