"""Latent attention behind a cache of latents: with adapters, with rounded weights, and with someone who watches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sheepop.adapt.lora import add_lora
from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.quantization import dequantized, quantize
from sheepop.core.errors import UsageError
from sheepop.generate import GenerationConfig, Generator
from sheepop.generate.blocks import BlockManager, Chunk
from sheepop.generate.paged_cache import PagedCache, bytes_per_block, reaches_of
from sheepop.model import Transformer
from sheepop.model.accounting.cost import cache_bytes
from sheepop.model.attention.choose import choose_kernel
from sheepop.model.attention.kernel import absorbs
from sheepop.model.probe import watch
from sheepop.tokenizer import CharTokenizer

LATENT: dict[str, Any] = {
    "position_encoding": "rope",
    "head_dim": 32,
    "value_head_dim": 32,
    "latent_attention": {"kv_rank": 32, "q_rank": 32, "rope_head_dim": 8},
}


def behind_a_cache(model: Transformer, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """The hidden states (T, D) of a text that is read in chunks."""
    reaches, place = reaches_of(model), 0
    manager, cache = BlockManager([16], reaches, 4), PagedCache(model, [16], 4)
    table, found = manager.open(ids), []
    for count in chunks:
        assert manager.reserve(table, count) == []
        cache.read([Chunk(table, place, count)])
        found.append(model.hidden_states(torch.tensor(ids[place : place + count])[:, None], cache=cache)[:, 0])
        place += count
        manager.advance(table, ids, place)
    return torch.cat(found)


def adapted(model: Transformer, **settings: Any) -> Transformer:
    add_lora(model, LoraConfig(rank=3, targets=("attention.*",), **settings))
    for number, parameter in enumerate(each for each in model.parameters() if each.requires_grad):
        draws = torch.Generator().manual_seed(number)
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype)
    return model


CHANGES: dict[str, Callable[[Transformer], Transformer]] = {
    "as it is": lambda model: model.double(),
    "LoRA": lambda model: adapted(model).double(),
    "DoRA": lambda model: adapted(model, dora=True).double(),
    "int8": lambda model: quantize(model, "int8"),
    "int4": lambda model: quantize(model, "int4"),
}


@pytest.mark.parametrize(("rank", "width"), [(512, 256), (6, 20), (1, 1)])
def test_the_form_with_fewer_multiplications_is_computed(
    rank: int, width: int, toy_model: Callable[..., Transformer]
) -> None:
    for queries, keys in itertools.product((1, 2, 9, 200), (200, 201, 5000)):
        expanding = keys * rank * width + queries * keys * (64 + width)
        absorbing = queries * rank * width + queries * keys * (64 + rank + rank)
        assert absorbs(queries, keys, (rank, width)) == (absorbing < expanding)
    kind = toy_model(**LATENT).attention_kind(cached=True)
    names = [choose_kernel(kind, kind.sight(*counts)).kernel.name for counts in ((1, 200), (190, 200))]
    assert names == ["stepwise", "fused"]


@pytest.mark.parametrize("change", CHANGES)
@torch.inference_mode()
def test_a_text_in_chunks_has_the_states_of_a_whole_pass(change: str, toy_model: Callable[..., Transformer]) -> None:
    model = CHANGES[change](toy_model(**LATENT))
    ids = torch.randint(4, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = (dequantized(model) if "int" in change else model).hidden_states(torch.tensor([ids]))[0]
    found = behind_a_cache(model, ids, [11, *[1] * 9, 2, 14, *[1] * 4])
    assert (found - whole).abs().max() <= (2e-3 if "int" in change else 1e-10) * whole.abs().max()


def test_a_token_takes_the_numbers_of_its_latent_and_the_shared_key(toy_model: Callable[..., Transformer]) -> None:
    """By hand: 32 + 8 numbers in each of 2 layers, where 4 heads of keys and values would take 256."""
    model = toy_model(**LATENT)
    cache = PagedCache(model, [3], 16)
    stored = sum(blocks.numbers[0].nbytes for blocks in (*cache.keys, *cache.values))
    assert stored == bytes_per_block(model, 16) == cache_bytes(model.config, 1, 16) == 16 * 2 * 40 * 4
    # In int8 a byte for each number, and a scale for the latent and for the key.
    assert bytes_per_block(model, 16, cache_dtype="int8") == 16 * 2 * (40 + 2 * 4)


def test_a_text_that_shall_not_depend_on_the_others_is_refused(
    toy_model: Callable[..., Transformer], characters: CharTokenizer
) -> None:
    generator = Generator(toy_model(**LATENT), characters)
    with pytest.raises(UsageError, match="batch_invariant needs a decoder without latent attention"):
        generator.generate(["a"], GenerationConfig(batch_invariant=True))


@torch.inference_mode()
def test_whoever_watches_keys_that_a_cache_does_not_have_is_told(toy_model: Callable[..., Transformer]) -> None:
    model = toy_model(**LATENT)
    with watch(model, {"blocks.1.attention.k": lambda key: key * 2}):
        with pytest.raises(ValueError, match="the cache holds latents, not keys and values of heads"):
            behind_a_cache(model, [5, 6, 7], [3])
        doubled = model.hidden_states(torch.tensor([[5, 6, 7]]))
    assert not torch.equal(doubled, model.hidden_states(torch.tensor([[5, 6, 7]])))
    seen: list[torch.Tensor] = []
    with watch(model, {"blocks.1.attention.weights": seen.append}):
        behind_a_cache(model, [5, 6, 7], [3])
    assert torch.allclose(seen[0].sum(-1), torch.ones(()))
