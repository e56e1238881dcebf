"""Texts of several adapters and of the base in one batch, against a plain loop over the network of each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sheepop.adapt.lora import activate, adapted_layers, add_lora, merged, target_layers
from sheepop.adapt.lora_config import LoraConfig
from sheepop.adapt.native_products import with_native_products
from sheepop.adapt.quantization import quantize
from sheepop.adapt.row_adapters import Adapter, RowAdapters
from sheepop.adapt.stored_weight import has_kernels
from sheepop.core.errors import UsageError
from sheepop.generate import GenerationConfig
from sheepop.generate.native_block import NativeBlock, with_native_blocks
from sheepop.model import EncoderDecoder, Transformer

from .recomputing import recomputing
from .test_engine import NETWORKS, Asked, as_request, build_engine, plain

Build = Callable[..., Transformer]
CONFIG = GenerationConfig(max_new_tokens=8, min_new_tokens=6, temperature=0.9, seed=3, on_overflow="slide")
PROMPT = [*range(10, 22), 5]  # three whole blocks that all requests share


def adapted(model: Transformer, seed: int, **settings: Any) -> tuple[Adapter, Transformer]:
    """An adapter with weights that matter, and the network that has it in all rows."""
    network = model.sharing_copy()
    latent = model.config.latent_attention is not None
    paths = [
        path
        for path in target_layers(network, ("*",))
        if not (latent and path.endswith(("k_proj", "v_proj"))) and not ("embedding" in path and settings)
    ]
    add_lora(network, LoraConfig(rank=3, targets=tuple(paths), **settings), seed=seed)
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted_layers(network).values():
            for change in layer.changes.values():
                change.to(torch.promote_types(model.dtype, torch.float32))
                for weight in change.parameters():
                    weight += 0.1 * torch.randn(weight.shape, generator=draws)
    return Adapter.of(network, "default"), network


# Grouped heads, windows with sinks, n-grams, latents with experts, a delta net, shared keys, an encoder.
@pytest.mark.parametrize(("kind", "drafts"), [(1, "model"), *((kind, "none") for kind in (6, 10, 13, 16, 18, 19))])
def test_a_mixed_batch_writes_what_each_network_writes_alone(toy_model: Build, kind: int, drafts: str) -> None:
    """Adapters come and go: each is made when its request arrives, and the last has the name and number of no other."""
    model = toy_model(max_seq_len=32, **NETWORKS[kind]).double()
    # Few blocks, so that requests are preempted and read again.
    engine = build_engine(model, num_blocks=16, max_tokens=16, max_sequences=4, drafts=drafts)
    config = CONFIG if drafts == "none" else CONFIG.replace(guesses=3)
    kinds: list[dict[str, Any] | None] = [None, {}, {"dora": True}, {"rank_stabilised": True}]
    arriving = list(enumerate(kinds))
    found = []
    with torch.inference_mode():
        while arriving or not engine.is_idle:
            if arriving:
                number, settings = arriving.pop(0)
                adapter, network = (None, model) if settings is None else adapted(model, number, **settings)
                if adapter is not None:
                    engine.require(adapter)
                asked = Asked(PROMPT, config.replace(num_completions=1 + number % 2))
                found.append((as_request(number, asked, model, adapter), network))
                engine.add(found[-1][0])
            engine.step()
        texts = [[candidate.token_ids for candidate in request.candidates] for request, _ in found]
        assert texts == [plain(request, network) for request, network in found]
    assert engine.scheduler.manager.num_free == engine.scheduler.manager.num_blocks
    assert len({str(text) for text in texts}) == len(texts)


def test_a_beam_has_adapters_too(toy_model: Build) -> None:
    model = toy_model().double()
    adapter, network = adapted(model, 1)
    wide = GenerationConfig(max_new_tokens=6, num_beams=3)
    texts = []
    for own, given, way in ((model, adapter, nullcontext()), (network, None, recomputing(network))):
        with way:
            engine = build_engine(own, num_blocks=64, max_tokens=32, max_sequences=4)
        request = as_request(0, Asked(PROMPT, wide), own, given)
        engine.add(request)
        with torch.inference_mode():
            while not engine.is_idle:
                engine.step()
        texts.append(request.candidates[0].token_ids)
    assert texts[0] == texts[1] != []


def test_only_requests_of_one_adapter_share_what_is_cached(toy_model: Build) -> None:
    model = toy_model().double()
    one, other = (adapted(model, seed)[0] for seed in (1, 2))
    again = Adapter(one.changes)  # loaded anew, from a file that may have changed
    engine = build_engine(model, num_blocks=64, max_tokens=64, max_sequences=4)
    cached = []
    with torch.inference_mode():
        for number, adapter in enumerate((one, other, again, None, one, None)):
            request = as_request(number, Asked(PROMPT, CONFIG), model, adapter)
            engine.add(request)
            while not engine.is_idle:
                engine.step()
            cached.append(request.num_cached)
    assert cached == [0, 0, 0, 0, 12, 12]


@pytest.mark.skipif(not has_kernels(), reason="there is no C++ compiler for the kernels")
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "float32 with shared experts"])
def test_adapted_rows_stay_on_native_blocks(toy_model: Build, monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
    """Log-probabilities of adapted texts in native blocks are those of a merged network in float64."""
    monkeypatch.setenv("SHEEPOP_NATIVE", "1")
    native, work = list[int](), NativeBlock._changes_of

    def counting(block: NativeBlock, count: int) -> Any:
        found = work(block, count)
        native.append(-1 if found is None else sum(address is not None for address in found))
        return found

    monkeypatch.setattr(NativeBlock, "_changes_of", counting)
    experts = {"count": 4, "shared": 1} if stored == "float32 with shared experts" else None
    plain_model = toy_model(norm="rmsnorm", position_encoding="rope", experts=experts)
    if stored == "bfloat16":
        plain_model = plain_model.to(torch.bfloat16)
    model = quantize(plain_model, "int8") if stored == "int8" else plain_model
    fast = with_native_blocks(with_native_products(model, always=True).eval())
    assert isinstance(fast.layers[0], NativeBlock)
    adapter, network = adapted(model, 1)
    engine = build_engine(fast, num_blocks=64, max_tokens=64, max_sequences=4)
    greedy = GenerationConfig(max_new_tokens=8, min_new_tokens=8, temperature=0.0)
    requests = [as_request(number, Asked(PROMPT, greedy), fast, given) for number, given in enumerate((None, adapter))]
    for request in requests:
        engine.add(request)
    with torch.inference_mode():
        while not engine.is_idle:
            engine.step()
        for request, own in zip(requests, (model, network), strict=True):
            candidate = request.candidates[0]
            whole = _in_float64(own)
            logprobs = whole(torch.tensor([[*PROMPT, *candidate.token_ids]]))[0].log_softmax(-1)
            for place, (token, logprob) in enumerate(zip(candidate.token_ids, candidate.logprobs, strict=True)):
                row = logprobs[len(PROMPT) - 1 + place]
                assert logprob == pytest.approx(float(row[token]), abs=2e-2 if stored == "bfloat16" else 1e-3)
    assert native.count(1) == 2 * 7 and -1 not in native  # one of two rows, in two layers, after the prompts


def _in_float64(network: Transformer) -> Transformer:
    from sheepop.adapt.quantization import dequantized

    plain = dequantized(network).double()
    return merged(plain).double() if adapted_layers(plain) else plain


def test_what_rows_cannot_have_is_refused_by_name(toy_model: Build) -> None:
    latent = toy_model(latent_attention={"kv_rank": 8, "rope_head_dim": 3})
    network = latent.sharing_copy()
    add_lora(network, LoraConfig(targets=("k_proj",)))
    with pytest.raises(UsageError, match=r"blocks\.0\.attention\.k_proj, which latent attention"):
        RowAdapters(latent).require(Adapter.of(network, "default"))
    adapter, _ = adapted(toy_model(num_layers=3), 1)
    with pytest.raises(UsageError, match=r"blocks\.2\..* is no layer of the served model"):
        RowAdapters(toy_model()).require(adapter)
    with pytest.raises(ValueError, match="selected for 2 rows"):
        RowAdapters(toy_model()).select([None, adapter])(torch.zeros(3, 1, dtype=torch.long))


def test_a_network_with_an_adapter_of_its_own_keeps_it(toy_model: Build) -> None:
    model = toy_model().double()
    _, first = adapted(model, 1)
    second = first.sharing_copy()
    add_lora(second, LoraConfig(targets=("q_proj",)), name="second")
    for layer in adapted_layers(second).values():
        if "second" in layer.changes:
            layer.changes["second"].double()
            torch.nn.init.constant_(layer.changes["second"].up, 0.05)  # type: ignore[arg-type]
    activate(second, "default", "second")
    ids = torch.tensor([[5], [6]])
    rows = RowAdapters(first)
    with torch.inference_mode():
        found = rows.select([None, Adapter.of(second, "second")])(ids)
        assert torch.allclose(found, torch.cat([first(ids[:1]), second(ids[1:])]))
    assert not isinstance(first, EncoderDecoder)
