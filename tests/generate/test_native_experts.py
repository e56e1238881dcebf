"""Texts of mixtures of experts in native blocks are those of PyTorch, in batches of any size; reasons for others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sheepop.adapt import native_products, stored_weight
from sheepop.adapt.native_products import missing_kernel, with_native_products
from sheepop.adapt.quantization import quantize
from sheepop.adapt.stored_weight import StoredWeight, has_kernels
from sheepop.core.native import say_once
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.native_block import NativeBlock, with_native_blocks
from sheepop.model import Transformer
from sheepop.model.block import Block
from sheepop.tokenizer import CharTokenizer

from .recomputing import RecomputingGenerator

pytestmark = pytest.mark.skipif(not has_kernels(), reason="there are no native kernels for this machine")

MIXTURES: dict[str, dict[str, Any]] = {
    "one expert a token": {"count": 4, "per_token": 1, "normalize": False},
    "two experts a token": {"count": 5, "per_token": 2, "d_ff": 64},
    "shared experts": {"count": 3, "per_token": 2, "shared": 2, "shared_gate": True, "d_ff": 32},
}
SETTINGS: dict[str, Any] = {"activation": "swiglu", "norm": "rmsnorm", "position_encoding": "rope"}
GREEDY = GenerationConfig(temperature=0, max_new_tokens=6, min_new_tokens=6)
# Twenty texts of different lengths, some of which begin alike.
PROMPTS = [[(7 * number + 3 * place) % 90 + 5 for place in range(1 + number * 5 % 12)] for number in range(20)]
Build = Callable[..., Transformer]


@pytest.fixture(autouse=True)
def kernels_for_the_smallest(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SHEEPOP_NATIVE", "1")
    say_once.cache_clear()
    yield
    say_once.cache_clear()


def stored_as(model: Transformer, stored: str) -> Transformer:
    if stored == "bfloat16":
        return model.bfloat16()
    return model if stored == "float32" else quantize(model, stored)  # type: ignore[arg-type]


def built(toy_model: Build, characters: CharTokenizer, **settings: Any) -> Transformer:
    """A network whose routers have balances that change the choice of some tokens."""
    model = toy_model(vocab_size=characters.vocab_size, **{**SETTINGS, **settings})
    generator = torch.Generator().manual_seed(1)
    for mixture in model.mixtures.values():
        mixture.router.balance.uniform_(-0.2, 0.2, generator=generator)
    return model


def tokens(generator: Generator, prompts: list[list[int]]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in generator.generate(prompts, GREEDY)]


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", MIXTURES)
def test_texts_are_those_of_the_layers_in_batches_of_any_size(
    toy_model: Build, characters: CharTokenizer, monkeypatch: pytest.MonkeyPatch, name: str, stored: str
) -> None:
    """PyTorch reads whole texts for each token; of weights in 16 bits, which it would round, it runs layer by layer."""
    model = stored_as(built(toy_model, characters, experts=MIXTURES[name]), stored)
    native = Generator(model, characters)
    assert all(type(block) is NativeBlock for block in native.model.layers)
    with monkeypatch.context() as patched:
        if stored == "bfloat16":
            patched.setattr("sheepop.generate.native_block.with_native_blocks", lambda copy: copy)
            plain = Generator(model, characters)
        else:
            patched.setenv("SHEEPOP_NATIVE", "0")
            plain = RecomputingGenerator(model, characters)
        assert all(type(block) is Block for block in plain.model.layers)
        expected = tokens(plain, PROMPTS)
    monkeypatch.setattr(Block, "forward", None)  # no pass needs it
    assert tokens(native, PROMPTS) == expected
    assert tokens(native, PROMPTS[4:7]) == expected[4:7]
    assert tokens(native, PROMPTS[19:]) == expected[19:]


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "int4"])
def test_a_text_has_the_same_bits_beside_any_others_and_with_any_threads(
    toy_model: Build, characters: CharTokenizer, stored: str
) -> None:
    experts = {"count": 5, "per_token": 2, "d_ff": 256, "shared": 1}
    model = stored_as(built(toy_model, characters, d_model=64, num_layers=2, experts=experts), stored)
    generator, config = Generator(model, characters), GREEDY.replace(batch_invariant=True)
    together = generator.generate(PROMPTS, config)
    torch.set_num_threads(3)
    try:
        threaded = generator.generate(PROMPTS, config)
    finally:
        torch.set_num_threads(1)
    assert [completion.logprobs for completion in threaded] == [completion.logprobs for completion in together]
    for place in (0, 6, 19):
        (alone,) = generator.generate([PROMPTS[place]], config)
        assert (alone.token_ids, alone.logprobs) == (together[place].token_ids, together[place].logprobs)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_number_that_is_not_finite_spoils_its_row_alone(
    toy_model: Build, characters: CharTokenizer, scores: str
) -> None:
    experts = {"count": 6, "per_token": 2, "scores": scores, "groups": 3, "groups_per_token": 2, "group_top": 2}
    model = built(toy_model, characters, experts=experts)
    expected = tokens(Generator(model, characters), PROMPTS)
    unused = next(token for token in range(128) if token not in {t for text in (*PROMPTS, *expected) for t in text})
    with torch.no_grad():
        model.embedding.weight[unused] = torch.nan
    generator = Generator(model, characters)
    with torch.inference_mode():
        engine = generator.serving_engine(max_sequences=21, max_waiting=21)
        requests = [generator.request(prompt, GREEDY) for prompt in [*PROMPTS, [5, unused]]]
        for request in requests:
            engine.add(request)
        failed = []
        while not engine.is_idle:
            failed += [update.request for update in engine.step() if update.error is not None]
    assert failed == requests[20:]
    assert [list(request.completions()[0].token_ids) for request in requests[:20]] == expected


def test_experts_that_do_not_fit_are_refused(toy_model: Build, characters: CharTokenizer) -> None:
    model = with_native_products(built(toy_model, characters, experts=MIXTURES["two experts a token"]))
    mixture = model.mixtures[0]
    kept, mixture.experts.down_proj = mixture.experts.down_proj, mixture.experts.up_proj
    with pytest.raises(ValueError, match="the projection down of the experts has the shape"):
        with_native_blocks(model)
    mixture.experts.down_proj = kept
    mixture.router.balance = mixture.router.balance[:-1]
    with pytest.raises(ValueError, match="the balance of experts must be contiguous"):
        with_native_blocks(model)


def test_a_missing_kernel_is_the_reason_that_is_said(
    toy_model: Build, characters: CharTokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the length of rows, which is right, unless it is wrong."""
    caplog.set_level(logging.WARNING)
    for changes, reason in (
        ({"d_ff": 72}, "rows whose length is no multiple of 16"),
        ({"experts": {"count": 4, "d_ff": 24}}, "rows whose length is no multiple of 16"),
    ):
        caplog.clear()
        say_once.cache_clear()
        with_native_blocks(with_native_products(built(toy_model, characters, **changes)))
        assert [message.rpartition(" lacks ")[2] for message in caplog.messages] == [f"{reason}."]
    fp8 = StoredWeight("fp8", torch.zeros(16, 32).to(torch.float8_e4m3fn), torch.ones(16), torch.float32)
    wide = StoredWeight("int8", torch.zeros(16, 128, dtype=torch.int8), torch.ones(16, 2), torch.float32)
    assert missing_kernel(fp8) == "weights in fp8"
    assert missing_kernel(wide) == "weights in int8 in groups of 64"
    assert missing_kernel(torch.zeros(16, 32).double()) == "weights in float64"

    # A machine that has the kernel of blocks, and cannot compile that of products.
    monkeypatch.setattr(stored_weight, "_kernel", lambda name: None)
    monkeypatch.setattr(native_products, "has_kernels", lambda: False)
    caplog.clear()
    say_once.cache_clear()
    with_native_blocks(with_native_products(built(toy_model, characters)))
    (message,) = caplog.messages
    assert message.endswith("because the native block lacks products with weights in float32 on this machine.")
