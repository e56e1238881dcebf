"""The engine against a plain loop: the same tokens for any arrival of requests and any number of blocks and tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sheepop.adapt.native_products import with_native_products
from sheepop.adapt.quantization import quantize
from sheepop.adapt.row_adapters import Adapter
from sheepop.adapt.stored_weight import has_kernels
from sheepop.core.errors import UsageError
from sheepop.generate import GenerationConfig, paged_cache
from sheepop.generate.blocks import BlockManager, BlockTable, Chunk
from sheepop.generate.config import CacheDtype
from sheepop.generate.engine import Engine
from sheepop.generate.native_block import with_native_blocks
from sheepop.generate.paged_cache import PagedCache
from sheepop.generate.penalties import Occurrences
from sheepop.generate.request import Candidate, Prompt, Request
from sheepop.generate.runner import PagedRunner
from sheepop.generate.sampler import Row, Sampled, Sampler
from sheepop.generate.speculation import LookupDrafter
from sheepop.generate.updates import Update
from sheepop.model import EncoderDecoder, ModelConfig, Transformer, build_model
from sheepop.tokenizer import CharTokenizer

from .conftest import SHARED, RoundedPass

Build = Callable[..., Transformer]
BLOCK = 4
GUESSES = 3
CACHES: list[CacheDtype] = ["auto", "int8", "fp8"]

DELTA = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 5}
NETWORKS: list[dict[str, Any]] = [
    {},
    {"position_encoding": "rope", "num_kv_heads": 1, "activation": "swiglu", "norm": "rmsnorm"},
    {"position_encoding": "rope", "sliding_window": 6},
    {
        "position_encoding": "rope",
        "rotary_fraction": 0.5,
        "rotary_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 8},
        "sliding_window": 5,
        "sliding_layers": [0],
        "sliding_position_base": 500.0,
    },
    {"position_encoding": "learned", "sliding_window": 3, "sliding_layers": [1]},
    {"position_encoding": "alibi", "num_kv_heads": 2},
    {"position_encoding": "alibi", "sliding_window": 5, "attention_sinks": True, "attention_soft_cap": 9.0},
    {"position_encoding": "none", "value_head_dim": 12, "attention_scale": 0.3, "qk_norm": "width"},
    {"attention_sinks": True, "attention_soft_cap": 15.0, "qk_norm": "head", "attention_backend": "eager"},
    {"parallel_residual": True, "attention_bias": False, "logit_soft_cap": 20.0, "norm_position": "sandwich"},
    {"ngrams": {"orders": [2, 3], "rows": 64}, "short_convolution": 3, "qk_norm": "own_head"},
    {"ngrams": {"orders": [4], "rows": 64}, "short_convolution": 5, "sliding_window": 4, "position_encoding": "rope"},
    {"experts": {"count": 4, "per_token": 2}},
    {
        "position_encoding": "rope",
        "latent_attention": {"kv_rank": 6, "q_rank": 16, "rope_head_dim": 2},
        "experts": {"count": 6, "groups": 3, "groups_per_token": 2, "group_top": 2, "scale": 1.5, "scores": "sigmoid"},
    },
    {"latent_attention": {"kv_rank": 8, "rope_head_dim": 3}, "value_head_dim": 5, "sliding_window": 5},
    {"gated_convolution": {"layers": [0], "width": 4}, "position_encoding": "rope"},
    {"gated_delta_net": {"layers": [1], **DELTA}, "attention_output_gate": True},
    {"gated_delta_net": {"layers": [0], "width": 2, **DELTA}, "sliding_window": 5, "position_encoding": "rope"},
    {**SHARED, "position_encoding": "rope"},
    {"architecture": "encoder_decoder", "position_encoding": "rope", "num_kv_heads": 2},
    {"architecture": "encoder_decoder", "attention_sinks": True, "num_encoder_layers": 1},
]
# Whole contexts, windows, tails, latents, states, shared keys, an encoder.
AHEAD = [0, 2, 10, 11, 13, 16, 17, 18, 19]


@dataclass(frozen=True)
class Asked:
    """A request of a user: a prompt, settings, the step at which it arrives, and the step at which it is aborted.

    Only requests of one `tenant` share what is in the cache.
    """

    prompt: list[int]
    config: GenerationConfig
    arrival: int = 0
    priority: int = 0
    tenant: str = ""
    dropped: int | None = None


def build_engine(
    model: Transformer, *, num_blocks: int, max_tokens: int, max_sequences: int, drafts: str = "none", **settings: Any
) -> Engine:
    return Engine.build(
        model,
        sampler(model),
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_tokens=max_tokens,
        max_sequences=max_sequences,
        max_waiting=99,
        guesses=0 if drafts == "none" else GUESSES,
        draft=(model, sampler(model)) if drafts == "model" else None,
        **settings,
    )


def sampler(model: Transformer) -> Sampler:
    return Sampler(torch.zeros(model.config.vocabulary, dtype=torch.bool, device=model.device), [3])


def as_request(number: int, asked: Asked, model: Transformer, adapter: Adapter | None = None) -> Request:
    has_encoder = isinstance(model, EncoderDecoder)
    return Request(
        number,
        Prompt("", [2], [*asked.prompt, 3]) if has_encoder else Prompt("", asked.prompt),
        asked.config,
        CharTokenizer(),
        frozenset([3]),
        max_seq_len=model.config.max_seq_len,
        seed=asked.config.seed or 0,
        number=number,
        priority=asked.priority,
        tenant=asked.tenant,
        adapter=adapter,
    )


def plain(request: Request, model: Transformer) -> list[list[int]]:
    """The tokens of every candidate of a request by definition."""
    return [written for written, _ in plain_texts(request, model)]


def plain_texts(
    request: Request, model: Transformer, cache_dtype: CacheDtype = "auto"
) -> list[tuple[list[int], list[float]]]:
    """The tokens and their log-probabilities by definition: the network reads the whole context for each token.

    A network that sees no later token reads the context of several at once, if the engine has written what follows.
    """
    caching = {} if cache_dtype == "auto" else {"cache": RoundedPass(cache_dtype)}
    texts, config, chooser, tokenizer = [], request.config, sampler(model), CharTokenizer()
    source, longest = request.prompt.source_ids, model.config.max_seq_len
    for candidate in request.candidates:
        written: list[int] = []
        logprobs: list[float] = []
        context, following = list(request.prompt.token_ids), list[int]()
        while len(written) < config.max_new_tokens and 3 not in written:
            shown = tokenizer.decode(written[max(0, config.min_new_tokens - 1) :]) if config.stop else ""
            if len(written) >= config.min_new_tokens and any(stop in shown for stop in config.stop):
                break
            if source is not None and len(context) == longest:
                break  # a target needs its beginning
            if not following:
                following = [*candidate.token_ids[len(written) :][: longest - len(context)], -1]
                ids = torch.tensor([context + following[:-1]])
                read = [ids] if source is None else [torch.tensor([source]), ids]
                logits = iter(model(*read, **caching)[0, len(context) - 1 :])
            occurrences = Occurrences(request.prompt.token_ids, written)
            row = Row(config, len(written), candidate.seed, occurrences if config.penalises else None)
            choice = chooser.choose(next(logits)[None], [row])
            written += choice.token_ids
            logprobs += choice.logprobs
            context.append(written[-1])
            if len(context) > longest:
                context, following = context[-max(1, longest // 2) :], []
            elif following.pop(0) != written[-1]:
                following = []
        texts.append((written, logprobs))
    return texts


def drive(engine: Engine, model: Transformer, everything: list[Asked]) -> tuple[list[Request], list[Update]]:
    """Runs the engine; each request arrives at its step, and may be aborted at another."""
    requests = [as_request(number, asked, model) for number, asked in enumerate(everything)]
    updates: list[Update] = []
    step = 0
    with torch.inference_mode():
        while step <= max(asked.arrival for asked in everything) or not engine.is_idle:
            for asked, request in zip(everything, requests, strict=True):
                if asked.arrival == step:
                    engine.add(request)
                if asked.dropped is not None and asked.arrival + asked.dropped == step and request.writing:
                    updates += engine.abort(request)
            updates += engine.step()
            step += 1
            assert step < 3000
    return requests, updates


def drive_one(engine: Engine, request: Request) -> list[Candidate]:
    """The texts of a request that runs alone."""
    engine.add(request)
    while not engine.is_idle:
        engine.step()
    return request.candidates


def assert_texts_are_plain(
    requests: list[Request], everything: list[Asked], model: Transformer, cache_dtype: CacheDtype = "auto"
) -> None:
    """Whole texts, or their part that was written before they were aborted."""
    with torch.inference_mode():
        for request, asked in zip(requests, everything, strict=True):
            texts = plain_texts(request, model, cache_dtype)
            for candidate, (expected, logprobs) in zip(request.candidates, texts, strict=True):
                was_dropped = asked.dropped is not None and candidate.finish_reason == "abort"
                count = len(candidate.token_ids)
                assert candidate.token_ids == (expected[:count] if was_dropped else expected)
                assert candidate.logprobs == pytest.approx(logprobs[:count], abs=1e-6)


sampled = st.builds(
    GenerationConfig,
    max_new_tokens=st.integers(1, 20),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([None, 5]),
    top_p=st.sampled_from([0.8, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    num_completions=st.sampled_from([1, 1, 2, 3]),
    guesses=st.just(GUESSES),
    seed=st.integers(0, 5),
    on_overflow=st.just("slide"),
)
asked_for = st.builds(
    lambda length, tail, *rest: Asked([*range(10, 10 + length), *tail], *rest),
    st.integers(0, 18),
    st.lists(st.integers(4, 9), min_size=1, max_size=6),
    sampled,
    st.integers(0, 12),
    st.integers(0, 1),
    st.sampled_from(["", "", "another"]),
    st.one_of(st.none(), st.none(), st.integers(0, 25)),
)


MIXES: dict[str, Any] = {
    "everything": st.lists(asked_for, min_size=1, max_size=6),
    "spare_blocks": st.integers(0, 20),
    "max_tokens": st.integers(4, 40),
    "max_sequences": st.integers(3, 8),
    "drafts": st.sampled_from(["none", "lookup", "model"]),
}


@pytest.mark.parametrize("kind", range(len(NETWORKS)))
@settings(max_examples=4, deadline=None)
@given(**MIXES)
def test_texts_equal_those_of_a_plain_loop(toy_model: Build, kind: int, **mix: Any) -> None:
    assert_mix_is_plain(toy_model, kind, **mix)


@pytest.mark.parametrize("kind", AHEAD)
@settings(max_examples=2, deadline=None)
@given(**MIXES, steps_ahead=st.sampled_from([0, 1]))
def test_texts_are_plain_if_the_cache_grows(toy_model: Build, kind: int, **mix: Any) -> None:
    """As on a GPU: few blocks exist at first, and they are made when they are used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_cache, "_num_at_first", lambda num_blocks, _: min(num_blocks, 2))
        assert_mix_is_plain(toy_model, kind, **mix)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", range(len(NETWORKS)))
@settings(max_examples=100, deadline=None)
@given(**MIXES)
def test_many_texts_equal_those_of_a_plain_loop(toy_model: Build, kind: int, **mix: Any) -> None:
    assert_mix_is_plain(toy_model, kind, **mix)


def assert_mix_is_plain(
    toy_model: Build,
    kind: int,
    *,
    everything: list[Asked],
    spare_blocks: int,
    max_tokens: int,
    max_sequences: int,
    drafts: str,
    **options: Any,
) -> None:
    """Requests that arrive at any time, with preemptions, shared prefixes and guesses, get a plain loop's texts."""
    model = toy_model(max_seq_len=32, **NETWORKS[kind]).double()
    least = 3 * -(-32 // BLOCK)  # what the widest request needs alone
    sizes = {"num_blocks": least + spare_blocks, "max_tokens": max_tokens, "max_sequences": max_sequences}
    engine = build_engine(model, drafts=drafts, **sizes, **options)
    requests, updates = drive(engine, model, everything)
    assert_texts_are_plain(requests, everything, model)
    for request in requests:
        for candidate, done in zip(request.candidates, request.completions(), strict=True):
            own = [update for update in updates if update.request is request and update.index == candidate.index]
            assert "".join(update.text for update in own) == done.text
            assert [token_id for update in own for token_id in update.token_ids] == done.token_ids
            assert [update.finish_reason for update in own if update.finish_reason] == [done.finish_reason]
    assert engine.scheduler.manager.num_free == engine.scheduler.manager.num_blocks


asked_ahead = st.builds(
    lambda asked, stop, least, count, biased: replace(
        asked,
        config=asked.config.replace(
            stop=stop,
            min_new_tokens=min(least, asked.config.max_new_tokens),
            top_logprobs=count,
            logit_bias=dict.fromkeys(biased, 3.0),
        ),
    ),
    asked_for,
    st.lists(st.sampled_from(["a", "e", "st", "(", "7"]), max_size=2).map(tuple),
    st.integers(0, 6),
    st.sampled_from([None, 2]),
    st.lists(st.integers(3, 127), max_size=3),
)


@pytest.mark.parametrize("kind", AHEAD)
@settings(max_examples=2, deadline=None)
@given(**{**MIXES, "drafts": st.just("none"), "everything": st.lists(asked_ahead, min_size=2, max_size=5)})
def test_texts_are_plain_if_steps_start_before_the_last_is_read(toy_model: Build, kind: int, **mix: Any) -> None:
    """Texts that end by stop strings and end tokens, slide, share prefixes, are preempted and dropped meanwhile."""
    assert_mix_is_plain(toy_model, kind, steps_ahead=1, **mix)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", range(len(NETWORKS)))
@settings(max_examples=100, deadline=None)
@given(
    **{**MIXES, "everything": st.lists(st.one_of(asked_ahead, asked_ahead, asked_for), min_size=2, max_size=6)},
    steps_ahead=st.sampled_from([0, 1, 1]),
)
def test_many_texts_are_plain_if_steps_start_before_the_last_is_read(toy_model: Build, kind: int, **mix: Any) -> None:
    assert_mix_is_plain(toy_model, kind, **mix)


@pytest.mark.skipif(not has_kernels(), reason="there is no C++ compiler for the kernels")
@pytest.mark.parametrize("kind", range(len(NETWORKS)))
@settings(max_examples=2, deadline=None)
@given(
    everything=st.lists(asked_for, min_size=2, max_size=4),
    max_tokens=st.integers(4, 40),
    drafts=st.sampled_from(["none", "lookup"]),
)
def test_in_float32_a_text_need_not_depend_on_the_others(
    toy_model: Build, kind: int, everything: list[Asked], max_tokens: int, drafts: str
) -> None:
    """The log-probabilities are the same whatever else is in the batch, with chunks of any size."""
    if "architecture" in NETWORKS[kind]:
        pytest.skip("encoder-decoders have no kernels of their own")
    if "latent_attention" in NETWORKS[kind]:
        pytest.skip("latent attention has no kernel of its own")
    if "gated_delta_net" in NETWORKS[kind]:
        pytest.skip("chunks of a delta rule depend on how a text was read, which Generator refuses")
    rounded = kind % 2 == 1
    model = toy_model(max_seq_len=32, **NETWORKS[kind]).to(torch.bfloat16 if kind % 3 == 2 else torch.float32)
    network = with_native_blocks(with_native_products(quantize(model, "int8") if rounded else model, always=True))
    same = {"num_blocks": 80, "batch_invariant": True, "cache_dtype": CACHES[kind % 3]}
    together = build_engine(network, max_tokens=max_tokens, max_sequences=8, drafts=drafts, **same)
    requests, _ = drive(together, network, everything)
    for number, (asked, request) in enumerate(zip(everything, requests, strict=True)):
        alone = build_engine(network, max_tokens=64, max_sequences=8, **same)
        with torch.inference_mode():
            found = drive_one(alone, as_request(number, asked, network))
        for one, other in zip(found, request.candidates, strict=asked.dropped is None):
            written = len(other.token_ids) if other.finish_reason == "abort" else None
            assert one.token_ids[:written] == other.token_ids
            assert one.logprobs[:written] == other.logprobs


def fewest_blocks(model: Transformer, requests: list[Request], **settings: Any) -> Engine:
    """The smallest engine that accepts each of these requests."""
    for num_blocks in itertools.count(4):
        engine = build_engine(model, num_blocks=num_blocks, max_tokens=12, max_sequences=6, **settings)
        with suppress(UsageError):
            for request in requests:
                engine.scheduler.require_room(request, request.longest)
            return engine
    raise AssertionError


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"steps_ahead": 0}) for kind in range(len(NETWORKS))),
        *((kind, {"steps_ahead": 1}) for kind in AHEAD),
        *((kind, {"cache_dtype": "int8"}) for kind in (1, 13)),
        (3, {"cache_dtype": "fp8", "drafts": "lookup"}),
        *((kind, {"cache_dtype": "fp8"}) for kind in (6, 17)),
    ],
)
def test_texts_are_plain_where_requests_are_preempted_dropped_and_share_prefixes(
    toy_model: Build, kind: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch that certainly contains every feature that the random examples may have."""
    model = toy_model(max_seq_len=32, **NETWORKS[kind]).double()
    long = GenerationConfig(max_new_tokens=20, temperature=1.0, min_new_tokens=14, seed=3, on_overflow="slide")
    everything = [
        Asked([*range(10, 22), 5], long, 0, 1),
        Asked([*range(10, 22), 6], long, 3, 1, "another"),
        Asked([*range(10, 22), 7], long.replace(num_completions=2, seed=4), 6, 1),
        Asked([*range(10, 22), 7], long.replace(temperature=0.0), 9, 0, "another", dropped=6),
        Asked([8, 9, 4], long, 10, 0),
        Asked([*range(10, 30)], long, 11, 0, dropped=0),
        Asked([*range(10, 22), 5, 6], long, 30),
    ]
    engine = fewest_blocks(model, [as_request(0, asked, model) for asked in everything], **options)
    found: list[int] = []
    opened = engine.scheduler.manager.open

    def opening(tokens: list[int], salt: str = "") -> BlockTable:
        table = opened(tokens, salt)
        found.append(table.num_tokens)
        return table

    monkeypatch.setattr(engine.scheduler.manager, "open", opening)
    requests, _ = drive(engine, model, everything)
    assert engine.scheduler.num_preemptions > 0
    assert max(found) > 0
    assert [bool(request.candidates[0].token_ids) for request in requests] == [True] * 5 + [False, True]
    assert requests[3].candidates[0].finish_reason == requests[5].candidates[0].finish_reason == "abort"
    assert_texts_are_plain(requests, everything, model, options.get("cache_dtype", "auto"))
    assert engine.scheduler.manager.num_free == engine.scheduler.manager.num_blocks


def test_tenants_share_nothing(toy_model: Build) -> None:
    model = toy_model()
    counts: list[int] = []
    model.embedding.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].numel()))
    engine = build_engine(model, num_blocks=40, max_tokens=32, max_sequences=4)
    greedy = GenerationConfig(temperature=0, max_new_tokens=1)
    prompt = list(range(4, 34))
    for tenant, expected in (("a", 30), ("a", 2), ("b", 30), ("", 30), ("b", 2)):
        counts.clear()
        drive(engine, model, [Asked(prompt, greedy, tenant=tenant)])
        assert counts == [expected]


def test_what_was_read_is_not_read_again(toy_model: Build) -> None:
    model = toy_model()
    counts: list[int] = []
    model.embedding.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].numel()))
    engine = build_engine(model, num_blocks=40, max_tokens=16, max_sequences=4)
    greedy = GenerationConfig(temperature=0, max_new_tokens=3)
    drive(engine, model, [Asked(list(range(4, 34)), greedy, 0, 0)])
    assert counts == [16, 14, 1, 1]
    counts.clear()
    # Twenty-eight tokens are seven full blocks that the first request has cached.
    drive(engine, model, [Asked([*range(4, 32), 90, 91], greedy, 0, 0)])
    assert counts == [2, 1, 1]


def test_several_texts_of_one_prompt_read_it_once(toy_model: Build) -> None:
    model = toy_model()
    counts: list[int] = []
    model.embedding.register_forward_hook(lambda _, inputs, __: counts.append(inputs[0].numel()))
    engine = build_engine(model, num_blocks=40, max_tokens=64, max_sequences=4)
    config = GenerationConfig(num_completions=3, max_new_tokens=3, seed=2)
    (request,), _ = drive(engine, model, [Asked(list(range(4, 34)), config, 0, 0)])
    assert counts[0] == 30
    assert counts[1] <= 3
    assert len({tuple(candidate.token_ids) for candidate in request.candidates}) > 1


def test_the_likeliest_of_several_texts_are_given(toy_model: Build) -> None:
    model = toy_model()
    engine = build_engine(model, num_blocks=60, max_tokens=64, max_sequences=6)
    config = GenerationConfig(num_completions=2, best_of=6, max_new_tokens=4, seed=1, temperature=2.0)
    (request,), _ = drive(engine, model, [Asked([5, 6, 7], config, 0, 0)])
    means = sorted(sum(c.logprobs) / len(c.logprobs) for c in request.candidates)
    given_ = [sum(done.logprobs) / len(done.logprobs) for done in request.completions()]
    assert given_ == [means[-1], means[-2]]


def test_a_request_that_can_never_run_is_refused(toy_model: Build) -> None:
    model = toy_model()
    engine = build_engine(model, num_blocks=5, max_tokens=16, max_sequences=2)
    config = GenerationConfig(max_new_tokens=30)
    with pytest.raises(UsageError, match="may need 9 blocks of the cache, which has only 5"):
        engine.add(as_request(0, Asked([5] * 6, config, 0, 0), model))
    with pytest.raises(UsageError, match="writes 3 texts at a time, but max_sequences = 2"):
        engine.add(as_request(0, Asked([5], config.replace(num_completions=3), 0, 0), model))
    assert engine.is_idle


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_request_whose_logits_are_not_finite_fails_alone(toy_model: Build, steps_ahead: int) -> None:
    model = toy_model()
    with torch.no_grad():
        model.embedding.weight[99] = torch.nan
    engine = build_engine(model, num_blocks=40, max_tokens=16, max_sequences=4, steps_ahead=steps_ahead)
    config = GenerationConfig(temperature=0, max_new_tokens=8)
    (bad, good), updates = drive(
        engine, model, [Asked([5, 99], config, 1, 0), Asked([5, 6], config.replace(num_completions=2), 0, 0)]
    )
    errors = [update for update in updates if update.error is not None]
    assert [update.request for update in errors] == [bad]
    assert "not finite" in str(errors[0].error)
    assert bad.candidates[0].finish_reason == "abort"
    with torch.inference_mode():
        assert [candidate.token_ids for candidate in good.candidates] == plain(good, model)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("kind", [0, 10, 13, 16])
def test_blocks_that_a_failed_request_leaves_harm_nobody(toy_model: Build, kind: int, steps_ahead: int) -> None:
    """The blocks of the first request, full of NaN, are all taken by texts of different lengths."""
    model = toy_model(max_seq_len=64, **NETWORKS[kind]).double()
    with torch.no_grad():
        model.embedding.weight[99] = torch.nan
    config = GenerationConfig(temperature=0, max_new_tokens=8, logit_bias={99: -1000.0})
    everything = [Asked([5] * 13 + [99] * 5, config), Asked([5, 6, 7] * 4, config, 6), Asked([5, 6], config, 6)]
    engine = build_engine(model, num_blocks=12, max_tokens=16, max_sequences=2, steps_ahead=steps_ahead)
    (bad, *good), _ = drive(engine, model, everything)
    assert bad.candidates[0].finish_reason == "abort"
    assert_texts_are_plain(good, everything[1:], model)


@pytest.mark.parametrize("kind", [0, 2, 17])
def test_what_is_read_once_too_often_is_not_found_again(toy_model: Build, kind: int) -> None:
    """Texts that end by end tokens, stop strings and length leave the same prefixes if steps start ahead."""
    model = toy_model(max_seq_len=32, **NETWORKS[kind]).double()
    config = GenerationConfig(max_new_tokens=20, temperature=1.0, top_p=1.0, logit_bias={3: 3.0})
    everything = [
        Asked([*range(10, 16 + number)], config.replace(seed=number, min_new_tokens=least, stop=stop))
        for number, (least, stop) in enumerate([(0, ()), (2, ("a", "e", "7", "s")), (20, ())] * 3)
    ]
    found, reasons = [], set()
    for steps_ahead in (0, 1):
        engine = build_engine(model, num_blocks=99, max_tokens=64, max_sequences=9, steps_ahead=steps_ahead)
        requests, _ = drive(engine, model, everything)
        reasons |= {request.candidates[0].finish_reason for request in requests}
        found.append(set(engine.scheduler.manager._contents))
    assert found[0] == found[1]
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ["run", "run", "read", "run", "read", "read"]),
        (
            {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ("never",)},
            ["run", "run", "read", "run", "read", "read"],
        ),
        ({"num_beams": 2, "min_new_tokens": 0}, ["run", "read"] * 3),
    ],
)
def test_a_step_starts_before_the_last_is_read_unless_a_text_needs_its_tokens(
    toy_model: Build, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], expected: list[str]
) -> None:
    model, calls = toy_model(), list[str]()
    engine = build_engine(model, num_blocks=40, max_tokens=16, max_sequences=4, steps_ahead=1)
    for owner, name, word in ((engine._runner, "run", "run"), (Sampled, "choice", "read")):

        def noted(*given: Any, work: Any = getattr(owner, name), word: str = word) -> Any:
            calls.append(word)
            return work(*given)

        monkeypatch.setattr(owner, name, noted)
    config = GenerationConfig(temperature=0, max_new_tokens=3, min_new_tokens=3)
    drive(engine, model, [Asked([5, 6], config.replace(**change)), Asked([7, 8, 9], config)])
    assert calls == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("change", [{}, {"sliding_window": 6}])
@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.3, "presence_penalty": 0.5}], ids=["", "penalties"])
def test_on_a_gpu_a_step_starts_without_waiting_for_the_last(
    toy_model: Build, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], penalties: dict[str, float]
) -> None:
    """Once kernels are compiled and a graph is captured; PyTorch raises an error where it would wait."""
    settings = {"position_encoding": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
    model = toy_model(**settings, **change).cuda()
    config = GenerationConfig(max_new_tokens=40, min_new_tokens=40, temperature=1.0, top_k=20, top_p=0.9, **penalties)
    everything = [Asked([*range(10, 16 + number)], config.replace(seed=number)) for number in range(6)]
    texts = []
    for steps_ahead in (0, 1):
        engine = build_engine(model, num_blocks=99, max_tokens=64, max_sequences=8, steps_ahead=steps_ahead)
        start, numbers = engine._start, itertools.count()

        def watched(shares: list[Any], start: Any = start, numbers: Any = numbers) -> list[Update]:
            torch.cuda.set_sync_debug_mode("error" if next(numbers) > 10 else "default")
            try:
                return start(shares)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(engine, "_start", watched)
        requests, _ = drive(engine, model, everything)
        assert next(numbers) >= 40  # one for each token
        texts.append([request.candidates[0].token_ids for request in requests])
    assert texts[0] == texts[1]
    assert [len(text) for text in texts[0]] == [40] * 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_on_a_gpu_the_cache_grows_while_texts_are_written(
    toy_model: Build, monkeypatch: pytest.MonkeyPatch, steps_ahead: int
) -> None:
    """Of 512 blocks 128 exist at first; between captured passes they become 256 and then 512."""
    settings = {"position_encoding": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
    model = toy_model(max_seq_len=256, **settings).cuda()
    config = GenerationConfig(max_new_tokens=220, min_new_tokens=220, temperature=1.0, repetition_penalty=1.2)
    everything = [Asked([*range(10, 16 + number)], config.replace(seed=number)) for number in range(8)]
    texts, counts = [], []
    for at_first in (None, paged_cache._num_at_first):
        monkeypatch.setattr(paged_cache, "_num_at_first", at_first or (lambda num_blocks, _: num_blocks))
        engine = build_engine(model, num_blocks=512, max_tokens=64, max_sequences=8, steps_ahead=steps_ahead)
        cache = cast(PagedRunner, engine._runner)._cache
        counts.append(len(cache.keys[0].numbers))
        requests, _ = drive(engine, model, everything)
        counts.append(len(cache.keys[0].numbers))
        texts.append([request.candidates[0].token_ids for request in requests])
    assert counts == [513, 513, 129, 513]
    assert texts[0] == texts[1]


def test_a_model_that_guesses_for_itself_is_always_right_and_saves_passes(toy_model: Build) -> None:
    model = toy_model(max_seq_len=64).double()
    config = GenerationConfig(max_new_tokens=24, seed=4, temperature=1.0, guesses=GUESSES)
    texts, passes = [], []
    for drafts in ("none", "model"):
        engine = build_engine(model, num_blocks=40, max_tokens=16, max_sequences=4, drafts=drafts)
        asked = Asked([5, 6, 7], config, 0, 0)
        request = as_request(0, asked, model)
        engine.add(request)
        count = 0
        with torch.inference_mode():
            while not engine.is_idle:
                engine.step()
                count += 1
        texts.append(request.candidates[0].token_ids)
        passes.append(count)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 24
    assert passes == [24, 7]  # the prompt, then four tokens per pass except at the end


def test_what_followed_the_last_time_is_guessed() -> None:
    drafter = LookupDrafter(3)
    asked = Asked([1, 2, 3, 4, 5, 9, 2, 3], GenerationConfig(max_new_tokens=9, guesses=3), 0, 0)
    request = Request(
        0, Prompt("", asked.prompt), asked.config, CharTokenizer(), frozenset([0]), max_seq_len=64, seed=0
    )
    text = request.candidates[0]
    assert drafter.propose([text]) == [[4, 5, 9]]
    text.accept(4, 0.0)
    assert drafter.propose([text]) == [[5, 9, 2]]
    text.accept(7, 0.0)
    assert drafter.propose([text]) == [[]]
    drafter.forget(text)


@torch.no_grad()
def test_at_124_million_parameters_logits_agree_within_a_ten_thousandth() -> None:
    model = build_model(ModelConfig(preset="gpt2"), seed=3).eval()
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    row = torch.randint(0, 50257, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = model(torch.tensor([row]), logits_to_keep=5)[0]
    manager = BlockManager([4], [None], BLOCK)
    cache, table = PagedCache(model, [4], BLOCK), manager.open(row)
    logits = []
    for begin, end in ((0, 8), (8, 9), (9, 10), (10, 11), (11, 12)):
        manager.reserve(table, end - begin)
        cache.read([Chunk(table, begin, end - begin)])
        logits.append(model(torch.tensor(row[begin:end])[:, None], cache=cache)[-1])
        manager.advance(table, row, end)
    difference = (torch.cat(logits) - whole).abs().max()
    assert difference / whole.abs().max() < 1e-4
